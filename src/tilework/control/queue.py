"""Waiting jobs in the policy's order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from tilework.control.job import Job
from tilework.core.interfaces import Demand


class WaitingQueue:
    """Jobs sorted by (urgency_ns, job_id), with the demand of each beside them.

    Parallel sorted lists: an insertion moves at most 8 bytes per waiting job and list, which at 10,000 jobs takes
    microseconds, and the work ahead of a place is one slice.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._jobs: list[Job] = []
        self._demands: list[Demand] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __contains__(self, job: Job) -> bool:
        index = bisect_left(self._keys, _key(job))
        return index < len(self._jobs) and self._jobs[index] is job

    def add(self, job: Job) -> None:
        index = bisect_left(self._keys, _key(job))
        self._keys.insert(index, _key(job))
        self._jobs.insert(index, job)
        self._demands.insert(index, job.demand)

    def remove(self, job: Job) -> None:
        index = bisect_left(self._keys, _key(job))
        assert self._jobs[index] is job, f"job {job.job_id} is not where its urgency says"
        del self._keys[index], self._jobs[index], self._demands[index]

    def ahead(self, key: tuple[int, int]) -> Sequence[Demand]:
        """What each job takes that is served before one of this urgency and id, in order."""
        return self._demands[: bisect_left(self._keys, key)]


def _key(job: Job) -> tuple[int, int]:
    return job.urgency_ns, job.job_id
