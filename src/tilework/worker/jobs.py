"""The jobs that a worker knows: their conditioning, and their state while it is here."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.wire import Spec
from tilework.pipelines.family import Conditioning, StepState

_MAX_LOST = 1024


class JobMissing(Exception):
    """A command needs a job, or its state, that this worker does not have; with `state_lost` no other worker has it."""

    def __init__(self, reason: str, state_lost: bool = False) -> None:
        super().__init__(reason)
        self.state_lost = state_lost


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A job after its encode. `state` is None before its first step, and outdated once the job continues elsewhere."""

    spec: Spec
    conditioning: Conditioning
    state: StepState | None = None

    @property
    def steps_done(self) -> int:
        return 0 if self.state is None else self.state.steps_done


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
            unknown = "it was never encoded or imported here, or has been forgotten", False
            why, state_lost = self._lost.get(job_id, unknown)
            raise JobMissing(f"job {job_id} is not on this worker: {why}", state_lost)
        return self._jobs[job_id]

    def at_step(self, job_id: int, num_steps: int) -> Job:
        """Like `get`, for works that touch the state: it must be the one after `num_steps` steps."""
        job = self.get(job_id)
        if job.steps_done != num_steps:
            raise JobMissing(f"the state of job {job_id} here is after step {job.steps_done}, not {num_steps}")
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
