"""Weights that come beside runs, by a stream that does nothing until something waits for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny
from commands import decode, encode, steps
from lazy_streams import LazyStreams
from stages import DECODE, DIFFUSE, ENCODE
from tilework.core.wire.commands import DropWeights, LoadWeights
from tilework.core.wire.reports import Ended, Progress, WeightsLoaded
from tilework.pipelines.cuda import copies as of_cuda
from tilework.pipelines.cuda.copies import SideCopies
from tilework.worker.models.pinned import PinnedFiles
from tilework.worker.models.shared_weights import SharedWeights, laid_out
from tilework.worker.models.weights import KeptWeights, Weights
from tilework.worker.synchronize import synchronize
from worker.test_loads import Loading
from worker.test_weights import Large, bits, never, num_bytes, same
from worker.tied import Tied

JOB = 1


class Card:
    """Files, some of which the device reads by itself, as after an earlier load, and its streams."""

    def __init__(self, directory: Path) -> None:
        self.device, self.directory = LazyStreams(), directory
        self.unregistered_at: list[tuple[int, int]] = []
        """What the stream had done when a file was let go, and what it was told to do."""
        self.pinned = PinnedFiles(lambda *_: True, self._unregister)
        self.files = SharedWeights(directory, SideCopies(self.device), self.pinned)
        self.weights = Weights(self.files)

    def add(self, module: torch.nn.Module, *, is_registered: bool = True) -> str:
        kept = KeptWeights.of(module)
        self.weights.add(module, never)
        if is_registered:
            self.register(kept)
        return kept.component.digest

    def register(self, kept: KeptWeights) -> None:
        self.pinned.map(self.directory / kept.component.digest, laid_out(kept.forms)[1])

    @property
    def is_done(self) -> bool:
        return self.device.side.num_done == len(self.device.side.queue)

    def _unregister(self, _: int) -> None:
        self.unregistered_at.append((self.device.side.num_done, len(self.device.side.queue)))


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return Card(tmp_path / "weights")


def test_weights_are_there_when_they_have_been_waited_for_and_not_before(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_cuda, "_PART_BYTES", 1)
    module, tied = Large(), Large()
    before = bits(module)
    digest = card.add(module)
    assert card.add(tied) == digest
    card.weights.begin(digest)
    card.weights.begin(digest)
    assert num_bytes(module) == sum(one.nbytes for one in before)
    assert card.device.side.num_done == 0
    arriving = card.weights.loading(digest)
    for _ in range(5):
        assert not card.weights.has([digest])
        next(arriving)
    with pytest.raises(StopIteration) as end:
        next(arriving)
    assert end.value.value > 0, "they came beside what ran"
    assert card.weights.has([digest])
    assert same(module, before)
    assert same(tied, before), "the other model has them, too"


def test_a_file_that_the_device_does_not_read_by_itself_yet_is_left_for_later(card: Card) -> None:
    module = Tied()
    before = bits(module)
    digest = card.add(module, is_registered=False)
    card.weights.begin(digest)
    assert not card.device.side.queue
    assert list(card.weights.loading(digest))
    assert same(module, before)


def test_memory_is_not_given_back_while_it_is_written(card: Card) -> None:
    module = Tied()
    digest = card.add(module)
    card.weights.begin(digest)
    card.weights.drop((digest,))
    assert card.is_done
    assert num_bytes(module) == 0
    before = Tied()
    card.weights.begin(digest)
    assert list(card.weights.loading(digest))
    assert same(module, bits(before)), "it comes again"


def test_a_file_is_not_let_go_while_it_is_read(card: Card) -> None:
    first, second = card.add(Tied()), card.add(Large())
    card.weights.begin(first)
    (card.directory / first).unlink()  # Another worker needs the room.
    card.weights.begin(second)
    assert len(card.unregistered_at) == 1
    done, queued = card.unregistered_at[0]
    assert done == queued


@pytest.fixture
def rig(card: Card, tmp_path: Path) -> Loading:
    """All components are in files that the device reads by itself."""
    rig = Loading(tmp_path, card.files)
    for known in rig.weights._known.values():
        card.register(KeptWeights(known.component, tuple(known.modules[0].forms)))
    return rig


def test_a_work_waits_for_the_weights_that_it_needs_and_not_for_others(card: Card, rig: Loading) -> None:
    rig.bench.run(rig.load(1, ENCODE), encode(1, JOB, rig.spec))
    assert card.is_done
    done = card.device.side.num_done
    rig.bench.run(rig.load(2, DIFFUSE), rig.load_other(3), steps(2, ((JOB, 0),), 1))
    assert rig.ends == ["l1", "w1", "l2", "w2"]
    assert card.device.side.num_done > done
    assert not card.is_done, "the other component comes beside the steps"
    rig.bench.run(steps(3, ((JOB, 1),), 3))
    assert not card.is_done
    while rig.worker.loads.load_block():
        pass
    assert rig.ends[-1] == "l3"
    assert rig.weights.has([rig.other.digest])
    loads = [one for one in rig.bench.reports if isinstance(one, WeightsLoaded)]
    assert all(one.run_ns >= 1e6 for one in loads), "also what took place beside runs: a millisecond for each copy"


def test_pictures_have_the_same_bits_whatever_comes_and_goes_beside_their_steps(card: Card, rig: Loading) -> None:
    rig.bench.run(rig.load(1, ENCODE), encode(1, JOB, rig.spec), rig.load(2, DIFFUSE))
    for step in range(4):
        rig.bench.run(rig.load_other(10 + step), steps(2 + step, ((JOB, step),), 1))
        rig.bench.run(DropWeights((rig.other.digest,)))
        assert card.is_done
    end = rig.bench.run(DropWeights(rig.load(2, DIFFUSE).components), rig.load(3, DECODE), decode(6, JOB))[-1]
    assert isinstance(end, Ended)
    assert np.array_equal(tiny.pixels(end.images[JOB]), rig.expected)
    loads = {one.load_id: one for one in rig.bench.reports if isinstance(one, WeightsLoaded)}
    assert [loads[10 + step].dropped for step in range(4)] == [(rig.other.digest,)] * 4


def test_loads_that_are_received_while_steps_run_begin_beside_them(card: Card, tmp_path: Path) -> None:
    received = list[LoadWeights]()

    def take() -> list[LoadWeights]:
        taken = list(received)
        received.clear()
        return taken

    rig = Loading(tmp_path, card.files, take)
    for known in rig.weights._known.values():
        card.register(KeptWeights(known.component, tuple(known.modules[0].forms)))
    rig.bench.run(rig.load(1, ENCODE), encode(1, JOB, rig.spec), rig.load(2, DIFFUSE))
    queued = list[int]()

    def receive(report: object) -> None:
        if isinstance(report, Progress):
            queued.append(len(card.device.side.queue))
            if report.steps_done == 1:
                received.append(rig.load_other(3))

    rig.bench.on_report = receive
    rig.bench.run(steps(2, ((JOB, 0),), 4))
    first, second, *_ = queued
    assert second > first, "the copies begin before the next step"
    assert not card.is_done
    before = len(card.device.side.queue)
    rig.bench.run(rig.load_other(3))
    assert len(card.device.side.queue) == before, "its turn comes, and it is under way already"
    while rig.worker.loads.load_block():
        pass
    assert rig.weights.has([rig.other.digest])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError])
def test_without_memory_beside_a_run_a_load_comes_block_by_block(
    card: Card, rig: Loading, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def like(_: torch.Tensor) -> torch.Tensor:
        raise error

    monkeypatch.setattr(card.device, "like", like)
    rig.worker.execute(rig.load_other(1))
    while rig.worker.loads.load_block():
        pass
    assert rig.ends == ["l1"]
    assert rig.weights.has([rig.other.digest])


def test_steps_wait_for_the_current_stream_and_not_for_copies_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[object]()

    def current(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    def everything(device: torch.device) -> None:
        raise AssertionError("all streams are waited for")

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "synchronize", everything)
    synchronize(torch.device("cuda", 1))
    synchronize(torch.device("cpu"))
    assert waited == [torch.device("cuda", 1)]
