"""Promised jobs and their reservations."""

from __future__ import annotations

from bisect import bisect_left

from tilework.admission.contract import Held, ReservationChange, ReservationChanges
from tilework.control.cluster.job import Job
from tilework.core.block import Block

_NOTHING = Held(0, 0)
_MOST_KEPT = 4  # Most changes that are kept, beside one for each promised job; then the older half is dropped.


class Promises:
    """Promised jobs by (deadline, job id), and their reservations in the same order, as if no job had works."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.blocks: list[Block] = []
        self._changes: list[ReservationChange] = []
        self._num_dropped = 0  # Changes that are not known any more.
        self._held: dict[str, Held] = {}  # By tenant.

    def held(self, tenant: str) -> Held:
        """Return how many promised jobs a tenant has, and the device time of their reservations."""
        return self._held.get(tenant, _NOTHING)

    def _hold(self, job: Job, num_jobs: int, device_ns: int) -> None:
        """Add to the counts of a job's tenant; the numbers may be negative."""
        tenant = job.request.tenant
        before = self.held(tenant)
        now = Held(before.num_jobs + num_jobs, before.device_ns + device_ns)
        if now.num_jobs:
            self._held[tenant] = now
        else:
            del self._held[tenant]

    def add(self, job: Job, block: Block) -> None:
        index = self.index(_due(job))  # The job has this reservation already.
        self.jobs.insert(index, job)
        self.blocks.insert(index, block)
        self._hold(job, 1, block.demand.device_ns)
        self._note(job, block)

    def replace(self, job: Job, block: Block) -> None:
        index = self.index(_due(job))
        self._hold(job, 0, block.demand.device_ns - self.blocks[index].demand.device_ns)
        job.promised = self.blocks[index] = block
        self._note(job, block)

    def remove(self, job: Job) -> None:
        """Give up the reservation of a job, if it has one."""
        if job.promised is not None:
            index = self.index(_due(job))
            self._hold(job, -1, -self.blocks[index].demand.device_ns)
            del self.jobs[index], self.blocks[index]
            self._note(job, None)
            job.promised = None

    def index(self, due: tuple[int, int]) -> int:
        """Return the index of the promised job with this deadline and id."""
        return bisect_left(self.jobs, due, key=_due)

    def changes(self, since: int) -> ReservationChanges:
        """Return what has changed since this number of changes were made."""
        number = self._num_dropped + len(self._changes)
        if since >= self._num_dropped:
            return ReservationChanges(number, self._changes[since - self._num_dropped :], False)
        every = zip(self.jobs, self.blocks, strict=True)
        return ReservationChanges(number, [ReservationChange(*_due(job), block) for job, block in every], True)

    def _note(self, job: Job, block: Block | None) -> None:
        self._changes.append(ReservationChange(*_due(job), block))
        if len(self._changes) > _MOST_KEPT + len(self.jobs):
            num_old = len(self._changes) // 2
            del self._changes[:num_old]
            self._num_dropped += num_old


def _due(job: Job) -> tuple[int, int]:
    assert job.promised is not None
    return job.promised.due_ns, job.job_id
