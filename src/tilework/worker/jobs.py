"""The jobs that a worker knows: what stages have written of them, and their state between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tilework.core.graph.itinerary import Itinerary
from tilework.core.graph.stage import Stage
from tilework.core.wire import Spec
from tilework.pipelines.family import LIVE, Family, StepState

_MAX_LOST = 1024


class JobMissing(Exception):
    """A command needs a job, or its state, that this worker does not have; with `state_lost` no other worker has it."""

    def __init__(self, reason: str, state_lost: bool = False) -> None:
        super().__init__(reason)
        self.state_lost = state_lost


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A job as it is here, which is outdated once the job continues elsewhere.

    `values` are what its stages have written, by name, as far as later ones need it. The stages up to `begun_at` are
    done; `state` is that of the next one if it has made steps.
    """

    spec: Spec
    itinerary: Itinerary
    begun_at: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    state: StepState | None = None

    @property
    def position(self) -> int:
        return self.begun_at + (0 if self.state is None else self.state.steps_done)

    @property
    def stage(self) -> Stage:
        """The stage that is next or has begun."""
        stage = self.itinerary.at[self.begun_at].stage
        assert stage is not None, "nothing of the job is left"
        return stage

    @property
    def is_ended(self) -> bool:
        return self.begun_at == self.itinerary.length

    def take_outputs(self, outputs: dict[str, Any]) -> None:
        """End the stage here, with these outputs; what no later stage reads is dropped, but the result is kept."""
        place = self.itinerary.at[self.begun_at]
        self.begun_at, self.state = self.itinerary.ends[place.num_done], None
        if self.is_ended:
            self.values = outputs
            return
        kept = outputs_read(self.itinerary, place.num_done + 1) | {LIVE}
        self.values = {name: value for name, value in {**self.values, **outputs}.items() if name in kept}

    def end_steps(self, family: Family) -> None:
        """End the stage here if it has made all its steps."""
        state = self.state
        if state is not None and self.position == self.itinerary.ends[self.itinerary.at[self.begun_at].num_done]:
            self.take_outputs(dict(family.finish(state)))

    def written(self, family: Family) -> dict[str, Any]:
        """What a blob of the job holds: its state between two steps, or the outputs of the stage that was done last."""
        if self.state is not None:
            return dict(family.export(self.state))
        outputs = self.itinerary.stages[self.itinerary.at[self.begun_at].num_done - 1].spec.outputs
        return {name: value for name, value in self.values.items() if name in outputs}


def outputs_read(itinerary: Itinerary, num_done: int) -> set[str]:
    """The outputs of the first `num_done` stages that those after them read."""
    done, left = itinerary.stages[:num_done], itinerary.stages[num_done:]
    read = {name for stage in left for name in stage.spec.inputs}
    return read.intersection(name for stage in done for name in stage.spec.outputs)


class Jobs:
    """Jobs by id. Why a job was lost is remembered for the last 1024 of them, so that its works can say so."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._lost: dict[int, tuple[str, bool]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._jobs

    def put(self, job_id: int, job: Job) -> None:
        self._jobs[job_id] = job
        self._lost.pop(job_id, None)

    def get(self, job_id: int) -> Job:
        """Raises JobMissing, with the reason if it is known."""
        if job_id not in self._jobs:
            unknown = "it was never begun or imported here, or has been forgotten", False
            why, state_lost = self._lost.get(job_id, unknown)
            raise JobMissing(f"job {job_id} is not on this worker: {why}", state_lost)
        return self._jobs[job_id]

    def at(self, job_id: int, position: int) -> Job:
        """Like `get`, for works: the job must be at this position."""
        job = self.get(job_id)
        if job.position != position:
            raise JobMissing(f"the state of job {job_id} here is at position {job.position}, not {position}")
        return job

    def forget(self, job_id: int) -> None:
        self._jobs.pop(job_id, None)
        self._lost.pop(job_id, None)

    def lose(self, job_id: int, reason: str, *, state_lost: bool = False) -> None:
        """Drop a job whose state is no longer valid; `state_lost` says that no blob has another state."""
        self.forget(job_id)
        self._lost[job_id] = reason, state_lost
        if len(self._lost) > _MAX_LOST:
            del self._lost[next(iter(self._lost))]
