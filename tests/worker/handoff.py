"""A request from run to run over workers of this process, with the imports that an engine would send on the way.

A picture is the same, bit for bit, wherever its runs are and whether they find its tensors. The tests of that are in
several files, by what is drawn, since each file runs in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import MODEL
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.commands import Command, Execute, ImportState
from tilework.core.wire.reports import Ended
from tilework.core.wire.spec import Image, Spec
from tilework.pipelines.family import Family
from tilework.pipelines.support.record import served_classes
from worker.worker_bench import WorkerBench
from zoo import requests
from zoo.model import ZooModel
from zoo.registry import ZOO

JOB = 5
PLENTY, NOTHING = 1 << 40, 0
QUICK = ("z-image",)


class Handoff:
    """One request on `benches`; what its runs write is known by the position after them, as to `StateRegistry`."""

    def __init__(self, benches: Sequence[WorkerBench], spec: Spec) -> None:
        self.benches, self.spec = benches, spec
        self.way = benches[0].family.info.graph.itinerary(spec.steps)
        self.position = 0
        self._blobs: dict[int, StateBlob] = {}
        self._holders: dict[int, int] = {}
        self._latest = -1
        self._num_works = 0

    def run(self, at: int, num_steps: int = 1) -> None:
        """Run the next steps, or the next stage that has none, on one of the benches, and wait for its end."""
        self._take(self.benches[at].run(*self._moves(at), self._execute(num_steps)), num_steps)
        self._latest, self._holders[at] = at, self.way.at[self.position].num_done

    def run_merged(self, at: int, chunks: Sequence[int]) -> None:
        """Run chunks on a bench that has got all of them before the first begins."""
        commands: list[Command] = []
        begun_at = self.position
        for num_steps in chunks:
            commands.append(self._execute(num_steps))
            self.position += num_steps
        self.position = begun_at
        ended = [one for one in self.benches[at].run(*commands) if isinstance(one, Ended)]
        assert len(ended) == len(chunks), self.benches[at].reports
        for report, num_steps in zip(ended, chunks, strict=True):
            self._take([report], num_steps)

    @property
    def chunks(self) -> list[int]:
        """The sizes of its runs: every stage is one, but the first two steps of a loop are by themselves."""
        sizes: list[int] = []
        for stage, begin, end in zip(self.way.stages, (0, *self.way.ends), self.way.ends, strict=False):
            alone = min(2, end - begin - 1) if stage.has_steps else 0
            sizes += [1] * alone + [end - begin - alone]
        return sizes

    @property
    def num_spills(self) -> int:
        return sum(bench.worker.jobs.kept.num_spills for bench in self.benches)

    @property
    def picture(self) -> np.ndarray:
        assert self.position == self.way.length
        return np.frombuffer(self._image.pixels, np.uint8)

    def _execute(self, num_steps: int) -> Execute:
        self._num_works += 1
        stage = self.way.at[self.position].stage
        assert stage is not None
        specs = {} if self.position else {JOB: self.spec}
        return Execute(self._num_works, MODEL, stage.name, ((JOB, self.position),), num_steps, specs=specs)

    def _moves(self, at: int) -> list[ImportState]:
        """As `control.plan` and `StateRegistry.resolve` make them."""
        if not self.position or at == self._latest:
            return []
        needed, known = self.way.needed_from[self.way.at[self.position].num_done], self._holders.get(at, 0)
        lacks = [index for index in needed if index >= known]
        places = [self.way.ends[index] for index in lacks]
        places += [] if self.position in self.way.ends else [self.position]
        states = tuple(SavedState(self.way.at[one - 1].num_done, one, self._blobs[one]) for one in places)
        return [ImportState(JOB, MODEL, self.spec, self.position, states, known=0 not in lacks)]

    def _take(self, reports: Sequence[object], num_steps: int) -> None:
        ended = reports[-1]
        assert isinstance(ended, Ended), reports
        assert ended.steps_done == num_steps
        self.position += num_steps
        if self.position == self.way.length:
            self._image: Image = ended.images[JOB]
        else:
            self._discard_before(self.position)
            self._blobs[self.position] = ended.blobs[JOB]

    def _discard_before(self, position: int) -> None:
        """Blobs of states between two steps go when the next one is there."""
        for place in [one for one in self._blobs if one < position and one not in self.way.ends]:
            self.benches[0].blobs.remove(self._blobs.pop(place))


def check_all_ways(here: Family, there: Family, spec: Spec, directory: Path) -> None:
    """Merged or not, on one worker or in turns on two, spilled between its runs or not."""

    def handoff(states_bytes: int) -> Handoff:
        benches = [WorkerBench(family, directory, states_bytes=states_bytes) for family in (here, there)]
        return Handoff(benches, spec)

    merged = handoff(NOTHING)
    merged.run_merged(0, merged.chunks)
    assert merged.num_spills == 0, "a job with a work that was received has spilled"
    for states_bytes in (PLENTY, NOTHING):
        for places in ((0,), (0, 1), (0, 1, 1)):
            one = handoff(states_bytes)
            for index, num_steps in enumerate(one.chunks):
                one.run(places[index % len(places)], num_steps)
            assert np.array_equal(one.picture, merged.picture), (states_bytes, places)
            assert bool(one.num_spills) == (states_bytes == NOTHING)
    assert np.array_equal(requests.alone(here, spec), merged.picture)


def check_stock_call(model: ZooModel, directory: Path) -> None:
    """Two loads of a model from the zoo, each on a worker."""
    saved = directory / "model"
    saved.mkdir()
    here, there = (requests.family(model, saved) for _ in range(2))
    check_all_ways(here, there, requests.spec_of(model, here, 1), directory)


def served(*, clips: bool) -> Iterable[Any]:
    """Parameters of tests: the models of the zoo that Tilework serves, and that make clips or pictures."""
    return (
        pytest.param(model, id=name, marks=[] if name in QUICK else pytest.mark.exhaustive)
        for name, model in ZOO.items()
        if model.class_name in served_classes() and model.kind.endswith("video") == clips
    )
