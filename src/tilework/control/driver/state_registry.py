"""Registry of the blobs that hold the states of jobs, and moves of states between devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tilework.core.checkpoint import Checkpoint
from tilework.core.graph.itinerary import Itinerary
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.work import Group

Blobs = tuple[StateBlob, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class StateMove:
    """The move of a job's state from `source`, the devices of its latest work, to the queues of `targets`.

    The targets lack the outputs of these `stages` (indices on the job's way), and have the other outputs that they
    need. The state between two steps goes with every move. Works queued after the move wait until it `is_resolved`. If
    it `delivers`, the job is at `position`, and `states` are what a target gets; it keeps what it has of other stages.
    Otherwise a target keeps all that it has.
    """

    job_id: int
    targets: Group
    source: Group
    stages: tuple[int, ...]
    is_resolved: bool = False
    delivers: bool = False
    position: int = 0
    states: tuple[SavedState, ...] = ()


@dataclass(slots=True, eq=False)
class _JobStates:
    """The blobs of a job by the position after which they were written."""

    itinerary: Itinerary
    blobs: dict[int, StateBlob] = field(default_factory=dict)

    def saved(self, position: int) -> SavedState | None:
        blob = self.blobs.get(position)
        return None if blob is None else SavedState(self.itinerary.at[position - 1].num_done, position, blob)

    def newest(self, position: int) -> int:
        """Return the last position up to this one from which the job can go on with the existing blobs."""
        places = {0, position, *self.blobs, *self.itinerary.ends}
        return max(place for place in places if place <= position and self._has_all_of(place))

    def _has_all_of(self, position: int) -> bool:
        ends = self.itinerary.ends
        needed = [ends[index] for index in self.itinerary.needed_from[self.itinerary.at[position].num_done]]
        return self.blobs.keys() >= {*needed, *(() if position in (0, *ends) else (position,))}


class StateRegistry:
    """The blobs of all jobs.

    A job has the outputs of the stages that are done, the state at the position where the controller believes it to be,
    and later ones: the report of a work may overtake that of an earlier work, which may still be lost. Methods return
    the blobs that are superseded, to be discarded.

    Blobs of a job that has ended may be held, by its uid, until its image is stored.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, _JobStates] = {}
        self._held: dict[str, Blobs] = {}

    @property
    def num_bytes(self) -> int:
        """Size of all blobs."""
        return sum(blob.num_bytes for blob in self._blobs())

    @property
    def is_empty(self) -> bool:
        return not self._jobs and not self._held

    @property
    def job_ids(self) -> Sequence[int]:
        """Ids of the jobs that have not ended."""
        return tuple(self._jobs)

    def _blobs(self) -> Iterator[StateBlob]:
        for job in self._jobs.values():
            yield from job.blobs.values()
        for held in self._held.values():
            yield from held

    def begin(self, job_id: int, itinerary: Itinerary, kept: Checkpoint) -> None:
        """Add a job that starts from a checkpoint, which may be empty."""
        self._jobs[job_id] = _JobStates(itinerary, {state.position: state.blob for state in kept.states})

    def end(self, job_id: int) -> Blobs:
        """Forget a job; returns its blobs."""
        return tuple(self._jobs.pop(job_id).blobs.values())

    def hold(self, job_id: int, uid: str) -> None:
        """Keep the blobs of a job that has ended, since its image may have to be made again."""
        self._held[uid] = self.end(job_id)

    def release(self, uid: str) -> Blobs:
        """Return the blobs that were held for a request, which are no longer needed."""
        return self._held.pop(uid, ())

    def reset(self, job_id: int) -> Blobs:
        """Start a job over, since its state is lost. Returns the blobs that it had."""
        lost = tuple(self._jobs[job_id].blobs.values())
        self._jobs[job_id].blobs.clear()
        return lost

    def lose(self, gone: Collection[StateBlob], positions: Mapping[int, int]) -> tuple[dict[int, int], Blobs]:
        """Forget blobs that no node has any more. `positions` are where the controller believes the jobs to be.

        Returns the earlier positions of jobs that cannot go on from there, and their blobs of what comes after these.
        """
        lost = set(gone)
        back: dict[int, int] = {}
        outdated: list[StateBlob] = []
        for job_id, job in self._jobs.items():
            left = {place: blob for place, blob in job.blobs.items() if blob not in lost}
            if len(left) == len(job.blobs):
                continue
            job.blobs = left
            newest = job.newest(positions[job_id])
            if newest < positions[job_id]:
                back[job_id] = newest
                outdated += [job.blobs.pop(place) for place in list(left) if place > newest]
        return back, tuple(outdated)

    def adopt(self, job_id: int, blob: StateBlob, position: int) -> Blobs:
        """Keep the blob that a work has written for a job that is then at this position; not that of the result."""
        job = self._jobs[job_id]
        if position == job.itinerary.length:
            return (blob,)
        old = job.blobs.get(position)
        job.blobs[position] = blob
        return () if old is None else (old,)

    def saved(self, job_id: int, position: int) -> SavedState | None:
        """Return the saved state of a job at this position; None if there is none, as for a result."""
        return self._jobs[job_id].saved(position)

    def advance(self, job_id: int, position: int) -> Blobs:
        """Note where the controller believes a job to be; earlier states between two steps are superseded."""
        job = self._jobs[job_id]
        if len(job.blobs) < 2:
            return ()
        old = [before for before in job.blobs if before < position and before not in job.itinerary.ends]
        return tuple([job.blobs.pop(before) for before in old])

    def unknown(self, blobs: Iterable[StateBlob]) -> Blobs:
        """Return those of these blobs that belong to no job."""
        kept = set(self._blobs())
        return tuple(blob for blob in blobs if blob not in kept)

    def resolve(self, move: StateMove, position: int | None) -> StateMove:
        """Let a move deliver the job's state at this position; nothing if None."""
        move.is_resolved = True
        if position is not None:
            job = self._jobs[move.job_id]
            ends = [job.itinerary.ends[index] for index in move.stages]
            places = ends if position in job.itinerary.ends else [*ends, position]
            move.delivers = True
            move.position = position
            move.states = tuple([state for place in places if (state := job.saved(place)) is not None])
        return move

    def checkpoint(self, job_id: int) -> Checkpoint:
        """Return the latest blobs of a job."""
        job = self._jobs[job_id]
        last = max(job.blobs, default=0)
        places = sorted(place for place in job.blobs if place == last or place in job.itinerary.ends)
        return Checkpoint(tuple([state for place in places if (state := job.saved(place)) is not None]))
