"""A request from run to run over workers of this process, with the imports that an engine would send on the way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commands import MODEL
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.commands import Command, Execute, ImportState
from tilework.core.wire.reports import Ended
from tilework.core.wire.spec import Image, Spec
from worker.worker_bench import WorkerBench

JOB = 5


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
        return sum(bench.worker.kept.num_spills for bench in self.benches)

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
