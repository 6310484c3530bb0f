"""Where the states of jobs are, and which moves wait for one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tilework.core.checkpoint import Checkpoint
from tilework.core.wire import StateBlob
from tilework.core.work import DECODE, ENCODE, Group

Blobs = tuple[StateBlob, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class StateMove:
    """A job's state on its way from `source`, the devices of its latest work, to the queues of `targets`.

    What is queued behind it waits until it `is_resolved`. If nothing comes by it (`comes` is False), what a target has
    of the job stays. Otherwise that is replaced by what the blobs hold: without `conditioning` a target has it already;
    without `state` there is none yet.
    """

    job_id: int
    targets: Group
    source: Group
    wants_conditioning: bool
    is_resolved: bool = False
    comes: bool = False
    conditioning: StateBlob | None = None
    state: StateBlob | None = None


@dataclass(slots=True, eq=False)
class _JobStates:
    """What the works of a job have put down: its conditioning, and states by the steps that are done in them."""

    conditioning: StateBlob | None = None
    states: dict[int, StateBlob] = field(default_factory=dict)

    @property
    def blobs(self) -> Blobs:
        return (*(() if self.conditioning is None else (self.conditioning,)), *self.states.values())


class StateRegistry:
    """The blobs of all jobs.

    Of each job there is the state at which the controller believes it to stand, and later ones: the report of a work
    may overtake that of an earlier one, which may still be lost. What is superseded is returned, to be discarded.

    Blobs of a job that has ended may be held, by its uid, until its picture is safe.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, _JobStates] = {}
        self._held: dict[str, Blobs] = {}

    @property
    def num_bytes(self) -> int:
        """What the blobs of all jobs take."""
        kept = [blob for job in self._jobs.values() for blob in job.blobs]
        return sum(blob.num_bytes for blob in kept) + sum(
            blob.num_bytes for held in self._held.values() for blob in held
        )

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
        """Take a job in, of which so much is there already."""
        states = {} if kept.state is None else {kept.steps_done: kept.state}
        self._jobs[job_id] = _JobStates(kept.conditioning, states)

    def end(self, job_id: int) -> Blobs:
        """Forget a job."""
        return self._jobs.pop(job_id).blobs

    def hold(self, job_id: int, uid: str) -> None:
        """A job has ended, but its picture may have to be made again."""
        self._held[uid] = self.end(job_id)

    def release(self, uid: str) -> Blobs:
        """What was held of a job is not needed any more."""
        return self._held.pop(uid, ())

    def lose(self, job_id: int) -> Blobs:
        """What was put down of a job is gone or of no use: it begins anew."""
        lost = self._jobs[job_id].blobs
        self._jobs[job_id] = _JobStates()
        return lost

    def adopt(self, job_id: int, stage: str, blob: StateBlob, steps_done: int) -> Blobs:
        """Keep what a work has put down of a job that has so many steps done."""
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
        """The controller believes a job to stand after so many steps: earlier states are superseded."""
        states = self._jobs[job_id].states
        if len(states) < 2:
            return ()
        old = [steps for steps in states if steps < steps_done]
        return tuple([states.pop(steps) for steps in old])

    def strays(self, blobs: Iterable[StateBlob]) -> Blobs:
        """Those of these blobs that are of no job."""
        kept = set(self._blobs())
        return tuple(blob for blob in blobs if blob not in kept)

    def resolve(self, move: StateMove, steps_done: int | None) -> StateMove:
        """Let a move take the job's state after so many steps; None: nothing comes."""
        move.is_resolved = True
        if steps_done is not None:
            job = self._jobs[move.job_id]
            move.comes = True
            move.conditioning = job.conditioning if move.wants_conditioning else None
            move.state = job.states.get(steps_done)
        return move

    def checkpoint(self, job_id: int) -> Checkpoint:
        """What was put down last of a job."""
        job = self._jobs[job_id]
        last = max(job.states, default=0)
        return Checkpoint(conditioning=job.conditioning, state=job.states.get(last), steps_done=last)
