"""Which blobs hold the states of jobs, and moves of states between devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tilework.core.checkpoint import Checkpoint
from tilework.core.wire import StateBlob
from tilework.core.work import DECODE, ENCODE, Group

Blobs = tuple[StateBlob, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class StateMove:
    """The move of a job's state from `source`, the devices of its latest work, to the queues of `targets`.

    Works queued after it wait until it `is_resolved`. If it `delivers`, the blobs replace what a target has of the job:
    without `conditioning` the target has it already; without `state` there is none yet. If it does not, a target keeps
    what it has.
    """

    job_id: int
    targets: Group
    source: Group
    wants_conditioning: bool
    is_resolved: bool = False
    delivers: bool = False
    conditioning: StateBlob | None = None
    state: StateBlob | None = None


@dataclass(slots=True, eq=False)
class _JobStates:
    """The blobs of a job: its conditioning, and its states by the number of steps done."""

    conditioning: StateBlob | None = None
    states: dict[int, StateBlob] = field(default_factory=dict)

    @property
    def blobs(self) -> Blobs:
        return (*(() if self.conditioning is None else (self.conditioning,)), *self.states.values())


class StateRegistry:
    """The blobs of all jobs.

    A job has the state at which the controller believes it to stand, and later ones: the report of a work may overtake
    that of an earlier work, which may still be lost. Methods return the blobs that are superseded, to be discarded.

    Blobs of a job that has ended may be held, by its uid, until its picture is stored.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, _JobStates] = {}
        self._held: dict[str, Blobs] = {}

    @property
    def num_bytes(self) -> int:
        """The size of all blobs."""
        return sum(blob.num_bytes for blob in self._blobs())

    @property
    def is_empty(self) -> bool:
        return not self._jobs and not self._held

    @property
    def job_ids(self) -> Sequence[int]:
        """The jobs that have not ended."""
        return tuple(self._jobs)

    def _blobs(self) -> Iterator[StateBlob]:
        for job in self._jobs.values():
            yield from job.blobs
        for held in self._held.values():
            yield from held

    def begin(self, job_id: int, kept: Checkpoint) -> None:
        """Add a job that starts from a checkpoint, which may be empty."""
        states = {} if kept.state is None else {kept.steps_done: kept.state}
        self._jobs[job_id] = _JobStates(kept.conditioning, states)

    def end(self, job_id: int) -> Blobs:
        """Forget a job; returns its blobs."""
        return self._jobs.pop(job_id).blobs

    def hold(self, job_id: int, uid: str) -> None:
        """Keep the blobs of a job that has ended, since its picture may have to be made again."""
        self._held[uid] = self.end(job_id)

    def release(self, uid: str) -> Blobs:
        """Returns the blobs that were held for a request, which are no longer needed."""
        return self._held.pop(uid, ())

    def reset(self, job_id: int) -> Blobs:
        """The state of a job is lost: it starts over. Returns the blobs that it had."""
        lost = self._jobs[job_id].blobs
        self._jobs[job_id] = _JobStates()
        return lost

    def adopt(self, job_id: int, stage: str, blob: StateBlob, steps_done: int) -> Blobs:
        """Keep the blob that a work has written for a job with this many steps done."""
        job = self._jobs[job_id]
        if stage == DECODE:
            return (blob,)
        if stage == ENCODE:
            old, job.conditioning = job.conditioning, blob
        else:
            old = job.states.get(steps_done)
            job.states[steps_done] = blob
        return () if old is None else (old,)

    def advance(self, job_id: int, steps_done: int) -> Blobs:
        """The controller believes that a job has done this many steps: earlier states are superseded."""
        states = self._jobs[job_id].states
        if len(states) < 2:
            return ()
        old = [steps for steps in states if steps < steps_done]
        return tuple([states.pop(steps) for steps in old])

    def unknown(self, blobs: Iterable[StateBlob]) -> Blobs:
        """Those of these blobs that belong to no job."""
        kept = set(self._blobs())
        return tuple(blob for blob in blobs if blob not in kept)

    def resolve(self, move: StateMove, steps_done: int | None) -> StateMove:
        """Let a move deliver the job's state after this many steps; nothing if None."""
        move.is_resolved = True
        if steps_done is not None:
            job = self._jobs[move.job_id]
            move.delivers = True
            move.conditioning = job.conditioning if move.wants_conditioning else None
            move.state = job.states.get(steps_done)
        return move

    def checkpoint(self, job_id: int) -> Checkpoint:
        """The latest blobs of a job."""
        job = self._jobs[job_id]
        last = max(job.states, default=0)
        return Checkpoint(conditioning=job.conditioning, state=job.states.get(last), steps_done=last)
