"""Workers that are one device for the controller: what they are told, what they report together, how they are lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from commands import decode, encode, steps
from runtime.test_worker_process import Listener
from tilework.core.model import ModelSource
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import BreakGroup, CloseGroup, Execute, Forget, GroupRef, StopWork
from tilework.core.wire.reports import (
    CardReading,
    DeviceReading,
    Ended,
    Ending,
    Failed,
    Loaded,
    Progress,
    Report,
    WeightsLoaded,
)
from tilework.core.wire.spec import Image, Spec
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor

SPEC = Spec(prompt="", height=64, width=64, steps=5, guidance_scale=1.0, seed=0)
IMAGE = Image(height=1, width=1, pixels=bytes(3))
SLOT = 6
"""The CPU slot among the workers; it is device 3."""
PLACED = ModelSource(path="m", name="m", devices=(0, 2))


READING = DeviceReading(card=CardReading(celsius=61), allocator=None)


@dataclass
class Worker:
    """Notes what it is told."""

    pid: int
    sent: list[Any] = field(default_factory=list)
    is_killed: bool = False
    is_believed = True

    def send(self, outgoing: Any) -> None:
        self.sent.append(outgoing)

    def kill(self, reason: str) -> None:
        self.is_killed = True


class Blobs:
    """Notes which blobs are removed."""

    def __init__(self) -> None:
        self.discarded: list[str] = []

    def add(self, blob: StateBlob) -> None: ...
    def sweep(self, worker_id: int, pid: int) -> None: ...
    def discard(self, blob: StateBlob) -> None:
        self.discarded.append(blob.name)


class Cells:
    """Three cells of two workers each, and a CPU slot."""

    def __init__(self, max_restarts: int = 6) -> None:
        config = LocalConfig(num_workers=6, sources=(PLACED,), cell_size=2, max_restarts=max_restarts)
        self.executor = LocalExecutor(config)
        self.workers = {worker_id: Worker(100 + worker_id) for worker_id in range(7)}
        self.listener, self.blobs = Listener(), Blobs()
        played: dict[str, Any] = {
            "_workers": dict(self.workers),
            "_up": set(self.workers),
            "_num_slots": 1,
            "_listener": self.listener,
            "_blobs": self.blobs,
            "_measures_beside": True,  # The start is over.
            "_changes": SimpleNamespace(lost=lambda _worker_id: None),
            "_loop": SimpleNamespace(call_later=lambda *_: None),
            "_started_with": {worker_id: self.executor._sources_of(worker_id // 2) for worker_id in self.workers},
            "_loaded": {worker_id: SimpleNamespace(done=lambda: True) for worker_id in self.workers},
        }
        vars(self.executor).update(played)

    def run(self, work_id: int, *devices: int) -> GroupRef:
        """Let cells run a work; returns its group."""
        group = self.executor.group(devices)
        for device_id in devices:
            self.executor.send(device_id, steps(work_id, ((1, 0),), 3, group=group))
        return group

    def report(self, worker_id: int, report: Report) -> list[Report]:
        """Returns what the cell reports because of it."""
        known = len(self.listener.reports)
        self.executor._report(worker_id, report)
        return self.listener.reports[known:]

    def restart(self, worker_id: int) -> None:
        """Let a lost worker be up again."""
        self.executor._workers[worker_id] = Worker(200 + worker_id)  # type: ignore[assignment]
        self.executor._report(worker_id, Loaded((), 0))

    def sent(self) -> list[tuple[int, Any]]:
        """All that was sent since the last call, worker by worker."""
        sent = [(worker_id, one) for worker_id, worker in self.workers.items() for one in worker.sent]
        for worker in self.workers.values():
            worker.sent.clear()
        return sent

    @property
    def killed(self) -> list[int]:
        return [worker_id for worker_id, worker in self.workers.items() if worker.is_killed]


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
    assert cells.sent() == [(2, work), (2, Forget(1)), (3, work), (3, Forget(1))]
    wide = cells.executor.group((2, 0))
    assert wide.devices == (4, 5, 0, 1)
    cells.executor.send(2, steps(2, ((1, 0),), 3, group=wide))
    assert [(worker_id, one.group) for worker_id, one in cells.sent()] == [(4, wide), (5, wide)]
    cells.executor.send(2, StopWork(2))
    cells.executor.send(3, decode(3, 1))
    assert cells.sent() == [(4, StopWork(2)), (SLOT, decode(3, 1))], "the first decides; a slot is no cell"


def test_devices_are_cells_and_slots_follow_them(cells: Cells) -> None:
    executor = cells.executor
    assert (executor.num_devices, executor.num_slots, executor.devices_up) == (3, 1, (0, 1, 2))
    assert executor.slots_up == (3,)
    assert executor.serving == {"m": (0, 2)}
    assert executor._sources_of(0) == executor._sources_of(2) == (PLACED,)


def test_workers_are_named_by_their_place_in_a_cell(cells: Cells) -> None:
    for worker_id in (0, 5):
        assert cells.report(worker_id, READING) == []
    assert cells.executor.readings == {"0.0": READING, "2.1": READING}
    assert cells.executor.pids == {"0.0": 100, "0.1": 101, "1.0": 102, "1.1": 103, "2.0": 104, "2.1": 105, "3": 106}


def test_a_cell_reports_when_all_its_workers_have(cells: Cells) -> None:
    cells.run(1, 0, 1)
    cells.sent()
    assert cells.report(0, Progress(1, 1)) == [Progress(1, 1)]
    first, second = ended(1, blob="a"), ended(1)
    assert cells.report(1, second) == []
    assert cells.report(2, ended(1)) == [], "the other cell of the group"
    assert cells.report(0, first) == [first]
    assert cells.report(3, WeightsLoaded(4, 20)) == []
    assert cells.report(2, WeightsLoaded(4, 30, ("x",))) == [WeightsLoaded(4, 30, ("x",))]
    assert cells.report(SLOT, ended(7)) == [ended(7)]
    assert cells.blobs.discarded == []
    assert cells.report(3, ended(1)) == [ended(1)]
    assert cells.sent() == [], "no group is broken off"
    assert not any(cell._running for cell in cells.executor._cells)


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
    cells.sent()
    assert cells.report(0, first) == []
    is_cut_off = isinstance(first, Failed) or (isinstance(first, Ended) and first.ending is Ending.BROKEN)
    broken = [(worker_id, how(group.group_id)) for worker_id in (0, 1) for how in (BreakGroup, CloseGroup)]
    assert cells.sent() == (broken if is_cut_off else []), "the other worker must not wait"
    assert cells.report(1, second) == [merged]
    assert cells.blobs.discarded == discarded


def test_a_cell_is_lost_with_one_of_its_workers_and_joins_when_all_are_back(cells: Cells) -> None:
    executor, listener = cells.executor, cells.listener
    cells.run(1, 1)
    cells.report(3, ended(1, blob="early"))
    executor._on_exit(2, "signal 9")
    assert listener.lost == [(1, "signal 9")]
    assert cells.killed == [3]
    assert executor.devices_up == (0, 2)
    assert cells.report(3, ended(2, blob="late")) == []
    assert cells.report(3, Progress(2, 1)) == []
    assert cells.blobs.discarded == ["early", "late"]
    cells.restart(2)
    assert listener.joined == [], "the other one is about to end"
    executor._on_exit(3, "its cell")
    cells.restart(3)
    assert listener.joined == [1]
    assert listener.lost == [(1, "signal 9")], "it is lost once"
    cells.run(1, 1)
    assert cells.report(2, ended(1, blob="new")) == [], "nothing is left of the reports before"


def test_a_cell_is_killed_as_a_whole_and_given_up_with_one_of_its_workers() -> None:
    cells = Cells(max_restarts=0)
    cells.executor.kill(1, "stuck")
    assert cells.killed == [2, 3]
    left: list[Any] = []
    cells.listener.on_given_up = left.append  # type: ignore[method-assign]
    for worker_id in (3, 1, 5):
        cells.executor._on_exit(worker_id, "stuck")
    assert left == [[0, 2, 3], [2, 3], ()]
