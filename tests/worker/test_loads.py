"""Loads of a worker, block by block: what goes first, what waits, what is dropped midway, and that no bit changes."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import tiny
from commands import MODEL, decode, encode, steps
from stages import DECODE, DIFFUSE, ENCODE
from tilework.core.component import Component
from tilework.core.wire.commands import DropWeights, LoadWeights
from tilework.core.wire.reports import Ended, Ending, WeightsLoaded
from tilework.pipelines.components import weights_of
from tilework.pipelines.draw import draw
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.worker.models import shared_weights
from tilework.worker.models.loads import WeightsNotLoaded
from tilework.worker.models.models import Models
from tilework.worker.models.shared_weights import SharedWeights
from tilework.worker.models.weights import Weights
from worker.test_weights import Large, never
from worker.worker_bench import WorkerBench

JOB = 1


class Loading:
    """A worker with a tiny model of which nothing is loaded, and a component of another model that takes 3 blocks."""

    def __init__(
        self,
        directory: Path,
        files: SharedWeights | None = None,
        loads_ahead: Callable[[], Sequence[LoadWeights]] = tuple,
    ) -> None:
        tiny.prepare()
        self.family = StableDiffusion3(tiny.build_sd3(), MODEL, {"max_sequence_length": tiny.TEXT_LENGTH}, "")
        self.spec = tiny.spec()
        self.expected = tiny.pixels(draw(self.family, self.spec))
        self.weights = Weights(files or SharedWeights(directory / "weights"))
        self.parts = {name: self.weights.add(one, never) for name, one in self.family.modules.items()}
        self.large = Large()
        self.other = self.weights.add(self.large, never)
        models = Models({MODEL: self.family}, self.family.device, self.weights, {MODEL: self.parts})
        self.bench = WorkerBench(self.family, directory, models=models, loads_ahead=loads_ahead)
        self.worker = self.bench.worker

    def load(self, load_id: int, stage: str) -> LoadWeights:
        names = self.family.info.graph.stage(stage).spec.components
        return LoadWeights(load_id, tuple(self.parts[name].digest for name in names))

    def load_other(self, load_id: int) -> LoadWeights:
        return LoadWeights(load_id, (self.other.digest,))

    @property
    def held_bytes(self) -> int:
        modules: list[nn.Module] = [*self.family.modules.values(), self.large]
        return sum(one.nbytes for module in modules for one in weights_of(module))

    @property
    def ends(self) -> list[str]:
        """What has ended, in order: works by `w`, loads by `l`."""
        known = {Ended: "w", WeightsLoaded: "l"}
        return [
            f"{known[type(one)]}{one.work_id if isinstance(one, Ended) else one.load_id}"
            for one in self.bench.reports
            if isinstance(one, Ended | WeightsLoaded)
        ]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loading:
    monkeypatch.setattr(shared_weights, "_BLOCK_BYTES", mmap.PAGESIZE)
    return Loading(tmp_path)


def test_works_wait_for_what_they_need_and_for_nothing_else(rig: Loading) -> None:
    rig.bench.run(rig.load_other(1), rig.load(2, ENCODE), encode(1, JOB, rig.spec), rig.load(3, DIFFUSE))
    assert rig.ends == ["l2", "w1"], "what no work needs is loaded while there is no command"
    assert not rig.weights.has([rig.other.digest])
    assert sum(rig.worker.loads.load_block() for _ in range(3)) == 3
    assert not rig.weights.has([rig.other.digest]), "the last block is followed by the end"
    assert rig.worker.loads.load_block()
    assert rig.ends == ["l2", "w1", "l1"]
    while rig.worker.loads.load_block():
        pass
    assert rig.ends == ["l2", "w1", "l1", "l3"]


def test_pictures_have_the_same_bits_whatever_is_loaded_and_dropped_between_their_steps(rig: Loading) -> None:
    """Another component comes in blocks, is dropped with some blocks there, and comes again."""
    rig.bench.run(rig.load(1, ENCODE), encode(1, JOB, rig.spec), rig.load(2, DIFFUSE))
    for step in range(4):
        rig.bench.run(steps(2 + step, ((JOB, step),), 1), rig.load_other(10 + step))
        for _ in range(1 + step):
            rig.worker.loads.load_block()
        rig.bench.run(DropWeights((rig.other.digest,)))
    end = rig.bench.run(DropWeights(rig.load(2, DIFFUSE).components), rig.load(3, DECODE), decode(6, JOB))[-1]
    assert isinstance(end, Ended)
    assert np.array_equal(tiny.pixels(end.images[JOB]), rig.expected)
    loads = {one.load_id: one for one in rig.bench.reports if isinstance(one, WeightsLoaded)}
    assert [loads[10 + step].dropped for step in range(4)] == [*[(rig.other.digest,)] * 3, ()]


def test_a_work_that_is_stopped_while_it_waits_ends_without_its_weights(rig: Loading) -> None:
    rig.bench.works.open(1, (JOB,))
    rig.worker.execute(rig.load(1, ENCODE))
    rig.bench.works.stop(1)
    rig.worker.execute(encode(1, JOB, rig.spec))
    assert rig.ends == ["w1"]
    [end] = rig.bench.reports
    assert isinstance(end, Ended)
    assert (end.ending, end.steps_done) == (Ending.STOPPED, 0)
    assert rig.worker.loads.load_block(), "the load goes on"


def test_what_is_dropped_before_it_is_there_is_said_and_takes_no_memory(rig: Loading) -> None:
    first, *_ = rig.load(1, DIFFUSE).components
    rig.worker.execute(LoadWeights(1, (rig.other.digest, first)))
    for _ in range(2):
        rig.worker.loads.load_block()
    assert rig.held_bytes > 0
    rig.worker.execute(DropWeights((rig.other.digest,)))
    assert rig.held_bytes == 0
    while rig.worker.loads.load_block():
        pass
    [end] = rig.bench.reports
    assert isinstance(end, WeightsLoaded)
    assert (end.dropped, end.run_ns > 0) == ((rig.other.digest,), True)
    assert rig.weights.has([first])


def test_a_worker_never_has_more_than_it_was_told_to_load(rig: Loading) -> None:
    """The denoiser takes the place of the other component, of which a part is there, and after it the decoder."""
    rig.bench.run(rig.load(1, ENCODE), encode(1, JOB, rig.spec), DropWeights(rig.load(1, ENCODE).components))
    parts, held = dict[str, Component](rig.parts), list[int]()
    most = max(rig.other.num_bytes, parts["transformer"].num_bytes, parts["vae"].num_bytes)
    rig.bench.on_report = lambda _: held.append(rig.held_bytes)
    for num_blocks, command in enumerate((rig.load_other(2), rig.load(3, DIFFUSE), rig.load(4, DECODE)), 1):
        rig.worker.execute(command)
        for _ in range(num_blocks):
            rig.worker.loads.load_block()
            held.append(rig.held_bytes)
        rig.worker.execute(DropWeights(command.components))
        held.append(rig.held_bytes)
    assert 0 < max(held) <= most
    assert held[-1] == 0


@pytest.mark.slow
def test_a_load_without_memory_is_tried_again_and_then_ends_the_worker(
    rig: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, failures = rig.weights.loading, 1

    def fails(digest: str, forgets: tuple[str, ...] = ()) -> Generator[None, None, int]:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise MemoryError
        return (yield from loading(digest, forgets))

    monkeypatch.setattr(rig.weights, "loading", fails)
    rig.worker.execute(rig.load_other(1))
    while rig.worker.loads.load_block():
        pass
    assert rig.ends == ["l1"]
    rig.worker.execute(DropWeights((rig.other.digest,)))
    failures = 2
    rig.worker.execute(rig.load_other(2))
    with pytest.raises(WeightsNotLoaded, match="MemoryError"):
        rig.worker.loads.load_block()
