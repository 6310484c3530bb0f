"""Waiting jobs in the policy's order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from tilework.control.job import Job
from tilework.core.interfaces import Ahead, Demand

_ONE_BY_ONE = 128


class WaitingQueue:
    """Jobs sorted by (urgency_ns, job_id), with the demand of each beside them.

    Parallel sorted lists: an insertion moves at most 8 bytes per waiting job and list, which at 10,000 jobs takes
    microseconds, and the work ahead of a place is one slice.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._jobs: list[Job] = []
        self._demands: list[Demand] = []
        self._volumes_ns: list[int] = []

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
        self._volumes_ns.insert(index, job.demand.width * job.demand.run_ns)

    def remove(self, job: Job) -> None:
        index = bisect_left(self._keys, _key(job))
        assert self._jobs[index] is job, f"job {job.job_id} is not where its urgency says"
        for column in (self._keys, self._jobs, self._demands, self._volumes_ns):
            del column[index]

    def ahead(self, key: tuple[int, int]) -> Ahead:
        """What the jobs take that are served before one of this urgency and id, the last of them one by one."""
        end = bisect_left(self._keys, key)
        start = max(0, end - _ONE_BY_ONE)
        return Ahead(sum(self._volumes_ns[:start]), self._demands[start:end])


def _key(job: Job) -> tuple[int, int]:
    return job.urgency_ns, job.job_id
