"""The jobs that a worker knows: the outputs of their stages, and their state between two steps.

A worker keeps them after a work, so that the next one here starts at once. Blobs hold the same. The memory of jobs
without a work is bounded. Beyond the bound jobs *spill*: their tensors are dropped, and their next work here reads the
blobs again. The controller need not know: the worker has the same jobs as before. The controller discards no blob of a
state from which a job may go on, so a missing blob means that the job goes on elsewhere or has ended.

Rejected: drops that the controller orders. It would need bytes in its events, and a device would exceed its bound until
the order came. Rejected, too: copies in the host's memory, which would be there twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilework.core.cache import CacheChoice
from tilework.core.graph.itinerary import Itinerary
from tilework.core.graph.stage import Stage
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.commands import ImportState
from tilework.core.wire.reports import KeptStates
from tilework.core.wire.spec import Spec
from tilework.pipelines import serialization
from tilework.pipelines.errors import describe
from tilework.pipelines.family import LIVE, Family, StepState, Values
from tilework.pipelines.serialization import BadState
from tilework.worker.hardware import check_device
from tilework.worker.held_bytes import held_bytes
from tilework.worker.models.models import Models
from tilework.worker.state_blobs import StateBlobs, TruncatedStateBlob
from tilework.worker.works import OpenWorks

_log = logging.getLogger(__name__)
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
        kept = _outputs_read(self.itinerary, place.num_done + 1) | {LIVE}
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


@dataclass(frozen=True, slots=True, eq=False)
class WorkJob:
    """A job of a work, which starts at this `position` of it."""

    job_id: int
    position: int
    job: HeldJob

    @property
    def num_steps_left(self) -> int:
        """Number of steps of the work's stage that are left when the work begins."""
        return self.job.itinerary.at[self.position].num_left_here


def _outputs_read(itinerary: Itinerary, num_done: int) -> set[str]:
    """Return the outputs of the first `num_done` stages that later ones read."""
    done, left = itinerary.stages[:num_done], itinerary.stages[num_done:]
    read = {name for stage in left for name in stage.spec.inputs}
    return read.intersection(name for stage in done for name in stage.spec.outputs)


class Jobs:
    """Begins, imports, spills, returns and loses jobs, by id.

    Those without a received work keep `most_bytes` at most. Remembers why the last 1024 lost jobs were lost, so that
    their works can say so.
    """

    def __init__(self, models: Models, blobs: StateBlobs, works: OpenWorks, most_bytes: int) -> None:
        self.blobs = blobs
        self._models = models
        self._works = works
        self._most_bytes = most_bytes
        self.kept = KeptStates(0, 0, 0)  # As of the latest time that it was bounded.
        self._num_spills = 0
        self._num_returns = 0
        self._jobs: dict[int, HeldJob] = {}  # Least recently used first.
        self._lost: dict[int, tuple[str, bool]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, job_id: int, model: str, spec: Spec) -> None:
        """Begin a job of which nothing is done yet."""
        itinerary = self._models[model].info.graph.itinerary(spec.steps, result=spec.result)
        self._put(job_id, HeldJob(spec=spec, itinerary=itinerary))

    def _put(self, job_id: int, job: HeldJob) -> None:
        self.forget(job_id)
        self._jobs[job_id] = job

    def at(self, job_id: int, position: int) -> HeldJob:
        """Return a job for a work that starts at this position.

        Raises:
            JobMissing: it is not here, for this reason if it is known, or at another position.
        """
        job = self._jobs.get(job_id)
        if job is None or job.is_spilled:
            unknown = "it was never begun or imported here, or has been forgotten", False
            why, state_lost = self._lost.get(job_id, unknown)
            raise JobMissing(f"job {job_id} is not on this worker: {why}", state_lost)
        if job.position != position:
            raise JobMissing(f"the state of job {job_id} here is at position {job.position}, not {position}")
        job.touch()
        self._jobs[job_id] = self._jobs.pop(job_id)
        return job

    def note(self, job_id: int, saved: SavedState) -> None:
        """Note a blob that a job can spill to, if the job is here."""
        if job := self._jobs.get(job_id):
            job.note(saved)
        self.spill()

    def write(self, family: Family, members: Sequence[WorkJob]) -> dict[int, StateBlob]:
        """Write the results of a work for its jobs, which then know their blobs; return the blobs by job.

        A job of which nothing is done has no blob. After an error no blob remains.
        """
        written: dict[int, StateBlob] = {}
        begun = [member for member in members if member.job.position]
        try:
            for member in begun:
                state = serialization.serialize(member.job.written(family), self.blobs.copies)
                written[member.job_id] = self.blobs.write(state)
        except Exception:
            for blob in written.values():
                self.blobs.remove(blob)
            raise
        for member in begun:
            member.job.note_written(written[member.job_id])
        return written

    def spill(self) -> None:
        """Spill jobs until those without a work hold at most what they may.

        The least recently used jobs come first. A job with a blob that is not known stays as it is.
        """
        with_work = self._works.job_ids
        idle = [job for job_id, job in self._jobs.items() if job_id not in with_work]
        held = sum(job.held_bytes for job in idle)
        for job in idle:
            if held <= self._most_bytes:
                break
            if job.held_bytes and job.sources is not None:
                held -= job.held_bytes
                job.spill()
                self._num_spills += 1
        self.kept = KeptStates(held, self._num_spills, self._num_returns)

    def return_spilled(self, job_id: int, model: str) -> None:
        """Read a job again if it was spilled. If its blobs are gone, it is not on this worker any more."""
        job = self._jobs.get(job_id)
        if job is None or not job.is_spilled:
            return
        assert job.sources is not None, f"job {job_id} was spilled without its blobs"
        self.take(ImportState(job_id, model, job.spec, job.position, job.sources, known=False), are_latest=False)
        self._num_returns += job_id in self._jobs

    def take(self, command: ImportState, *, are_latest: bool = True) -> None:
        """Import a job. If one of its blobs is lost and they `are_latest`, the job has to begin again.

        Raises:
            DeviceFailed: the device accepts nothing from this process any more.
        """
        job_id = command.job_id
        try:
            self._models.use(command.model, None, command.spec.loras)
            self._put(job_id, self._read(command))
        except (BadState, FileNotFoundError, TruncatedStateBlob) as error:
            # Either the job continues without this worker and needs nothing here, or a blob of it is lost.
            reason = f"a blob of its state is missing or damaged ({describe(error)})"
            self.lose(job_id, reason, state_lost=are_latest)
        except Exception as error:
            _log.exception("import of job %d failed", job_id)
            check_device(self._models.device, error)
            self.lose(job_id, f"its import failed with {describe(error)}")

    def _read(self, command: ImportState) -> HeldJob:
        """Read the blobs of an import, in addition to what the worker has of the job if it is `known`.

        The outputs of a job that was spilled here are read from its blobs, too.

        Raises:
            JobMissing: an output that the remaining stages read is neither here nor in the blobs.
            FileNotFoundError, TruncatedStateBlob: a blob is missing, for example if its job continued on other workers.
            BadState: a blob is damaged.
        """
        family = self._models[command.model]
        itinerary = family.info.graph.itinerary(command.spec.steps, result=command.spec.result)
        num_done = itinerary.at[command.position].num_done
        here = self._jobs.get(command.job_id) if command.known else None
        values = {} if here is None else dict(here.values)
        states = (*_outputs_spilled(here, num_done, command), *command.states)
        exported: Values | None = None
        for saved in states:
            contents = serialization.deserialize(self.blobs.read(saved.blob), family.device, self.blobs.copies)
            if saved.position == itinerary.ends[saved.index]:
                values.update(contents)
            else:
                exported = contents
        read = _outputs_read(itinerary, num_done)
        if missing := read - values.keys():
            raise JobMissing(
                f"job {command.job_id} was moved without its {min(missing)} to a worker that has none of it"
            )
        job = HeldJob(spec=command.spec, itinerary=itinerary, begun_at=itinerary.ends[num_done - 1] if num_done else 0)
        job.values = {name: value for name, value in values.items() if name in read or name == LIVE}
        job.saved = {} if here is None else dict(here.saved)
        for saved in states:
            job.note(saved)
        if exported is not None:
            job.state = family.restore(job.stage.name, command.spec, job.values, exported)
        return job

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


def _outputs_spilled(here: HeldJob | None, num_done: int, command: ImportState) -> list[SavedState]:
    """Return blobs of a spilled job with outputs that later stages need and that the import does not name."""
    if here is None or not here.is_spilled:
        return []
    ends = here.itinerary.ends
    named = {one.index for one in command.states}
    return [
        here.saved[ends[index]]
        for index in here.itinerary.needed_from[num_done]
        if index not in named and ends[index] in here.saved
    ]
