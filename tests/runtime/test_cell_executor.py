"""Workers that are one device for the controller: what they are told, what they report together, how they are lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from commands import decode, encode, steps
from runtime.test_worker_process import MODELLED, Listener
from tilework.core.model import ModelSource
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Execute, Forget, GroupRef, StopWork
from tilework.core.wire.reports import (
    CardReading,
    DeviceReading,
    Ended,
    Ending,
    Failed,
    Progress,
    Report,
    WeightsLoaded,
)
from tilework.core.wire.spec import Image, Spec
from tilework.core.work import Group
from tilework.runtime.cell_executor import CellExecutor
from tilework.runtime.local_config import LocalConfig

SPEC = Spec(prompt="", height=64, width=64, steps=5, guidance_scale=1.0, seed=0)
IMAGE = Image(height=1, width=1, pixels=bytes(3))
SLOT = 6
"""The CPU slot among the workers; it is device 3."""


READING = DeviceReading(card=CardReading(celsius=61), allocator=None)


@dataclass
class Workers:
    """Six workers and a CPU slot: notes what they are told."""

    num_devices = 6
    num_slots = 1
    up: set[int] = field(default_factory=lambda: set(range(7)))
    sent: list[tuple[int, Any]] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    groups: dict[Group, GroupRef] = field(default_factory=dict)
    broken: list[GroupRef] = field(default_factory=list)

    @property
    def devices_up(self) -> Group:
        return tuple(sorted(self.up - {SLOT}))

    @property
    def serving(self) -> Mapping[str, tuple[int, ...]]:
        return {"m": (2, 3, 4, 5)}

    def send(self, worker: int, outgoing: Any) -> None:
        self.sent.append((worker, outgoing))

    def kill(self, worker: int, reason: str) -> None:
        self.killed.append(worker)

    def discard(self, blob: StateBlob) -> None:
        self.discarded.append(blob.name)

    def group(self, workers: Group) -> GroupRef:
        return self.groups.setdefault(workers, GroupRef(len(self.groups) + 1, workers))

    def break_off(self, ref: GroupRef) -> None:
        self.broken.append(ref)

    @property
    def readings(self) -> Mapping[str, DeviceReading]:
        return {"0": READING, "5": READING}

    def pid(self, worker: int) -> int | None:
        return 100 + worker if worker in self.up else None


class Cells:
    """Three cells of two workers each."""

    def __init__(self) -> None:
        self.executor = CellExecutor(LocalConfig(num_workers=6, sources=(MODELLED,), cell_size=2))
        self.workers, self.listener = Workers(), Listener()
        self.executor._inner, self.executor._listener = self.workers, self.listener  # type: ignore[assignment]
        self.executor._up = {0, 1, 2}

    def run(self, work_id: int, *devices: int) -> GroupRef:
        """Let cells run a work; returns its group."""
        group = self.executor.group(devices)
        for device_id in devices:
            self.executor.send(device_id, steps(work_id, ((1, 0),), 3, group=group))
        return group

    def report(self, worker: int, report: Report) -> list[Report]:
        """Returns what the cell reports because of it."""
        known = len(self.listener.reports)
        self.executor.on_report(worker, report)
        return self.listener.reports[known:]


@pytest.fixture
def cells() -> Cells:
    return Cells()


def ended(work_id: int, steps_done: int = 3, blob: str = "", **how: Any) -> Ended:
    blobs = {1: StateBlob(blob, 8)} if blob else {}
    return Ended(work_id, 0, 1, steps_done, blobs=blobs, **how)


def test_all_workers_of_a_cell_are_told_and_run_its_works_as_a_group(cells: Cells) -> None:
    cells.executor.send(1, encode(1, 1, SPEC))
    cells.executor.send(1, Forget(1))
    group = GroupRef(1, (2, 3))
    work = Execute(1, "model", "encode", ((1, 0),), specs={1: SPEC}, group=group)
    assert cells.workers.sent == [(2, work), (3, work), (2, Forget(1)), (3, Forget(1))]
    wide = cells.executor.group((2, 0))
    assert wide.devices == (4, 5, 0, 1)
    cells.workers.sent.clear()
    cells.executor.send(2, steps(2, ((1, 0),), 3, group=wide))
    assert [(worker, one.group) for worker, one in cells.workers.sent] == [(4, wide), (5, wide)]
    cells.workers.sent.clear()
    cells.executor.send(2, StopWork(2))
    cells.executor.send(3, decode(3, 1))
    assert cells.workers.sent == [(4, StopWork(2)), (SLOT, decode(3, 1))], "the first decides; a slot is no cell"


def test_devices_are_cells_and_slots_follow_them(cells: Cells) -> None:
    executor = cells.executor
    assert (executor.num_devices, executor.num_slots, executor.devices_up) == (3, 1, (0, 1, 2))
    assert executor.serving == {"m": (1, 2)}
    assert executor.pids == {"0.0": 100, "0.1": 101, "1.0": 102, "1.1": 103, "2.0": 104, "2.1": 105, "3": 106}
    placed = CellExecutor(
        LocalConfig(num_workers=6, sources=(ModelSource(path="m", devices=(0, 2)),), cell_size=2)
    )._inner._config.sources[0]
    assert isinstance(placed, ModelSource)
    assert placed.devices == (0, 1, 4, 5)


def test_workers_are_named_by_their_place_in_a_cell(cells: Cells) -> None:
    assert cells.executor.readings == {"0.0": READING, "2.1": READING}
    assert cells.executor.pids == {"0.0": 100, "0.1": 101, "1.0": 102, "1.1": 103, "2.0": 104, "2.1": 105, "3": 106}


def test_a_cell_reports_when_all_its_workers_have(cells: Cells) -> None:
    cells.run(1, 0, 1)
    assert cells.report(0, Progress(1, 1)) == [Progress(1, 1)]
    first, second = ended(1, blob="a"), ended(1)
    assert cells.report(1, second) == []
    assert cells.report(2, ended(1)) == [], "the other cell of the group"
    assert cells.report(0, first) == [first]
    assert cells.report(3, WeightsLoaded(4, 20)) == []
    assert cells.report(2, WeightsLoaded(4, 30, ("x",))) == [WeightsLoaded(4, 30, ("x",))]
    assert cells.report(SLOT, ended(7)) == [ended(7)]
    assert cells.workers.discarded == []
    assert cells.workers.broken == []
    assert cells.report(3, ended(1)) == [ended(1)]
    assert not cells.executor._running


@pytest.mark.parametrize(
    ("first", "second", "merged", "discarded"),
    [
        (
            ended(1, 2, "a", ending=Ending.BROKEN),
            ended(1, 3, "b", ending=Ending.BROKEN),
            ended(1, 3, "b", ending=Ending.BROKEN),
            ["a"],
        ),
        (ended(1, 3, "a", ending=Ending.BROKEN), ended(1, 3), ended(1, 3, "a", ending=Ending.BROKEN), []),
        (ended(1, 2, "a", ending=Ending.BROKEN), Failed(1, "why"), Failed(1, "why"), ["a"]),
        (
            ended(1, 2, "a", ending=Ending.BROKEN),
            ended(1, 1, "b", ending=Ending.OUT_OF_MEMORY),
            ended(1, 2, "a", ending=Ending.OUT_OF_MEMORY),
            ["b"],
        ),
        (ended(1, 3, "a"), ended(1, 2, "b", ending=Ending.BROKEN), ended(1, 3, "a"), ["b"]),
        (ended(1, 1, images={1: IMAGE}), Failed(1, "why"), ended(1, 1, images={1: IMAGE}), []),
    ],
    ids=["farthest", "one was done", "failed", "no memory", "the first was done", "it has the result"],
)
def test_the_report_of_a_cell_that_could_not_go_on(
    cells: Cells, first: Report, second: Report, merged: Report, discarded: list[str]
) -> None:
    group = cells.run(1, 0)
    assert cells.report(0, first) == []
    is_cut_off = isinstance(first, Failed) or (isinstance(first, Ended) and first.ending is Ending.BROKEN)
    assert cells.workers.broken == [group] * is_cut_off, "the other worker must not wait"
    assert cells.report(1, second) == [merged]
    assert cells.workers.discarded == discarded


def test_a_cell_is_lost_with_one_of_its_workers_and_joins_when_all_are_back(cells: Cells) -> None:
    executor, workers, listener = cells.executor, cells.workers, cells.listener
    cells.run(1, 1)
    cells.report(3, ended(1, blob="early"))
    workers.up -= {2}
    executor.on_lost(2, "signal 9")
    assert listener.lost == [(1, "signal 9")]
    assert workers.killed == [3]
    assert executor.devices_up == (0, 2)
    assert cells.report(3, ended(2, blob="late")) == []
    assert cells.report(3, Progress(2, 1)) == []
    assert workers.discarded == ["early", "late"]
    workers.up |= {2}
    executor.on_joined(2)
    assert listener.joined == [], "the other one is about to end"
    workers.up -= {3}
    executor.on_lost(3, "its cell")
    workers.up |= {3}
    executor.on_joined(3)
    assert listener.joined == [1]
    assert listener.lost == [(1, "signal 9")], "it is lost once"
    cells.run(1, 1)
    assert cells.report(2, ended(1, blob="new")) == [], "nothing is left of the reports before"


def test_a_cell_is_killed_as_a_whole_and_given_up_with_one_of_its_workers(cells: Cells) -> None:
    cells.executor.kill(1, "stuck")
    assert cells.workers.killed == [2, 3]
    left: list[Any] = []
    cells.listener.on_given_up = left.append  # type: ignore[method-assign]
    cells.executor.on_given_up({0, 1, 2, 4, 5, SLOT})
    cells.executor.on_given_up({0, 2, 4, SLOT})
    assert left == [[0, 2, 3], ()]
