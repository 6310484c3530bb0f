"""The jobs that a worker knows: the outputs of their stages, and their state between two steps.

A worker keeps them after a work, so that the next one here starts at once. Blobs hold the same. The memory of jobs
without a work is bounded. Beyond the bound jobs *spill*: their tensors are dropped, and their next work here reads the
blobs again. The controller need not know: the worker has the same jobs as before. The controller discards no blob of a
state from which a job may go on, so a missing blob means that the job goes on elsewhere or has ended.

Rejected: drops that the controller orders. It would need bytes in its events, and a device would exceed its bound until
the order came. Rejected, too: copies in the host's memory, which would be there twice.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any

from tilework.core.cache import CacheChoice
from tilework.core.graph.itinerary import Itinerary
from tilework.core.graph.stage import Stage
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.spec import Spec
from tilework.pipelines.family import LIVE, Family, StepState
from tilework.worker.held_bytes import held_bytes

_MAX_LOST = 1024


class JobMissing(Exception):
    """A command needs a job, or its state, that this worker does not have; with `state_lost` no other worker has it."""

    def __init__(self, reason: str, state_lost: bool = False) -> None:
        super().__init__(reason)
        self.state_lost = state_lost


@dataclass(slots=True, kw_only=True, eq=False)
class HeldJob:
    """A job as it is here, which is outdated once the job continues elsewhere.

    `values` are the outputs of its stages, by name, as far as later ones need them. The stages up to `begun_at` are
    done; `state` is that of the next one if it has made steps. `saved` are the blobs that are known to hold some of it,
    by the position after which they were written. A job that was spilled at a position has nothing else.
    """

    spec: Spec
    itinerary: Itinerary
    begun_at: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    state: StepState | None = None
    saved: dict[int, SavedState] = field(default_factory=dict)
    _spilled_at: int | None = field(default=None, init=False)
    _held_bytes: int | None = field(default=None, init=False)  # None: a work may have changed it.

    @property
    def is_spilled(self) -> bool:
        return self._spilled_at is not None

    @property
    def position(self) -> int:
        if self._spilled_at is not None:
            return self._spilled_at
        return self.begun_at + (0 if self.state is None else self.state.steps_done)

    @property
    def stage(self) -> Stage:
        """Stage that is next or has begun."""
        stage = self.itinerary.at[self.begun_at].stage
        assert stage is not None, "nothing of the job is left"
        return stage

    @property
    def is_ended(self) -> bool:
        return self.begun_at == self.itinerary.length

    def take_outputs(self, outputs: dict[str, Any]) -> None:
        """End the stage here with these outputs. Drops what no later stage reads; at the end keeps the result."""
        place = self.itinerary.at[self.begun_at]
        self.begun_at = self.itinerary.ends[place.num_done]
        self.state = None
        if self.is_ended:
            self.values = outputs
            return
        kept = outputs_read(self.itinerary, place.num_done + 1) | {LIVE}
        self.values = {name: value for name, value in {**self.values, **outputs}.items() if name in kept}

    def take_values(self) -> dict[str, Any]:
        """Return the values and remove them from the job."""
        values, self.values = self.values, {}
        return values

    def use_cache(self, family: Family, choice: CacheChoice | None = None) -> None:
        """Let its next steps use this cache; None: none. If the job had another cache, they find nothing kept."""
        if self.spec.cache == choice:
            return
        self.spec = replace(self.spec, cache=choice)
        if self.state is not None:
            self.state = family.restore(self.stage.name, self.spec, self.values, family.export(self.state))

    def end_steps(self, family: Family) -> None:
        """End the stage here if it has made all its steps."""
        state = self.state
        if state is not None and self.position == self.itinerary.ends[self.itinerary.at[self.begun_at].num_done]:
            self.take_outputs(dict(family.finish(state)))

    def drop_progress(self) -> None:
        """Drop what a group may have computed from messages that never came; outputs of done stages stay."""
        self.state = None
        self.values = {name: value for name, value in self.values.items() if name != LIVE}

    def note(self, saved: SavedState) -> None:
        """Note a blob that holds what is here. It supersedes earlier blobs of a state between two steps."""
        self.saved = {place: one for place, one in self.saved.items() if place in self.itinerary.ends}
        self.saved[saved.position] = saved

    def note_written(self, blob: StateBlob) -> None:
        """Note that a blob holds the result of a work here."""
        self.note(SavedState(self.itinerary.at[self.position - 1].num_done, self.position, blob))

    @property
    def sources(self) -> tuple[SavedState, ...] | None:
        """Blobs that hold all that is needed from here, in the order of stages; None if one is not known."""
        needed = self.itinerary.needed_from[self.itinerary.at[self.begun_at].num_done]
        places = [self.itinerary.ends[index] for index in needed]
        places += [] if self.position == self.begun_at else [self.position]
        return tuple(self.saved[place] for place in places) if self.saved.keys() >= set(places) else None

    @property
    def held_bytes(self) -> int:
        """Bytes of its tensors, as after its latest work."""
        if self._held_bytes is None:
            self._held_bytes = held_bytes(self.values, self.state)
        return self._held_bytes

    def touch(self) -> None:
        """Note that a work begins, which may change what is held."""
        self._held_bytes = None

    def spill(self) -> None:
        """Drop all tensors."""
        self._spilled_at = self.position
        self._held_bytes = 0
        self.values = {}
        self.state = None

    def written(self, family: Family) -> dict[str, Any]:
        """Return the contents of the job's blob: its state between two steps, or the outputs of its latest stage."""
        if self.state is not None:
            return dict(family.export(self.state))
        outputs = self.itinerary.stages[self.itinerary.at[self.begun_at].num_done - 1].spec.outputs
        return {name: value for name, value in self.values.items() if name in outputs}


def outputs_read(itinerary: Itinerary, num_done: int) -> set[str]:
    """Return the outputs of the first `num_done` stages that later ones read."""
    done, left = itinerary.stages[:num_done], itinerary.stages[num_done:]
    read = {name for stage in left for name in stage.spec.inputs}
    return read.intersection(name for stage in done for name in stage.spec.outputs)


class Jobs:
    """Jobs by id. Remembers why the last 1024 lost jobs were lost, so that their works can say so."""

    def __init__(self) -> None:
        self.num_spills = 0
        self._jobs: dict[int, HeldJob] = {}  # Least recently used first.
        self._lost: dict[int, tuple[str, bool]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: int) -> bool:
        """Return whether a job is here and not spilled."""
        job = self._jobs.get(job_id)
        return job is not None and not job.is_spilled

    def put(self, job_id: int, job: HeldJob) -> None:
        self.forget(job_id)
        self._jobs[job_id] = job

    def find(self, job_id: int) -> HeldJob | None:
        """Return a job that is here, spilled or not."""
        return self._jobs.get(job_id)

    def get(self, job_id: int) -> HeldJob:
        """Return a job. Raises JobMissing, with the reason if it is known."""
        if job_id not in self:
            unknown = "it was never begun or imported here, or has been forgotten", False
            why, state_lost = self._lost.get(job_id, unknown)
            raise JobMissing(f"job {job_id} is not on this worker: {why}", state_lost)
        return self._jobs[job_id]

    def at(self, job_id: int, position: int) -> HeldJob:
        """Return a job for a work, as `get`; the job must be at this position."""
        job = self.get(job_id)
        if job.position != position:
            raise JobMissing(f"the state of job {job_id} here is at position {job.position}, not {position}")
        job.touch()
        self._jobs[job_id] = self._jobs.pop(job_id)
        return job

    def spill(self, most_bytes: int, with_work: Container[int]) -> int:
        """Spill jobs until those not `with_work` hold at most `most_bytes`; return the bytes that they then hold.

        The least recently used jobs come first. A job with a blob that is not known stays as it is.
        """
        idle = [job for job_id, job in self._jobs.items() if job_id not in with_work]
        held = sum(job.held_bytes for job in idle)
        for job in idle:
            if held <= most_bytes:
                break
            if job.held_bytes and job.sources is not None:
                held -= job.held_bytes
                job.spill()
                self.num_spills += 1
        return held

    def forget(self, job_id: int) -> None:
        self._jobs.pop(job_id, None)
        self._lost.pop(job_id, None)

    def clear(self) -> None:
        """Forget all jobs: their ids will belong to other jobs."""
        self._jobs.clear()
        self._lost.clear()

    def lose(self, job_id: int, reason: str, *, state_lost: bool = False) -> None:
        """Drop a job whose state is no longer valid; `state_lost` says that no blob has another state."""
        self.forget(job_id)
        self._lost[job_id] = reason, state_lost
        if len(self._lost) > _MAX_LOST:
            del self._lost[next(iter(self._lost))]
