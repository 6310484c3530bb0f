"""Promised jobs and their reservations."""

from __future__ import annotations

from bisect import bisect_left

from tilework.control.cluster.job import Job
from tilework.core.interfaces import Block


class Promises:
    """Promised jobs by (deadline, job id), and their reservations in the same order, as if no job had works."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.blocks: list[Block] = []

    def add(self, job: Job, block: Block) -> None:
        rank = self.rank(job)
        self.jobs.insert(rank, job)
        self.blocks.insert(rank, block)

    def replace(self, job: Job, block: Block) -> None:
        job.promised = self.blocks[self.rank(job)] = block

    def remove(self, job: Job) -> None:
        """Give up the reservation of a job, if it has one."""
        if job.promised is not None:
            job.promised, rank = None, self.rank(job)
            del self.jobs[rank], self.blocks[rank]

    def rank(self, job: Job) -> int:
        """The index of a promised job."""
        return bisect_left(self.jobs, _due(job), key=_due)


def _due(job: Job) -> tuple[int, int]:
    assert job.request.deadline_ns is not None
    return job.request.deadline_ns, job.job_id
