"""Requests that are worthless when late (`on_miss: drop`): they end as soon as their deadline cannot be met."""

from __future__ import annotations

from heapq import heappop, heappush

from tilework.control.cluster.job import Job
from tilework.control.cluster.tracker import Tracker
from tilework.control.recovery import Recovery
from tilework.core.actions import Action, UseCache
from tilework.core.policy import CostModel, Policy
from tilework.core.request import Status
from tilework.cost.demand import fastest

LATE = "even if nothing else ran from now on, it would be late"


class Expiry:
    """Ends jobs with `on_miss: drop` under every policy, also one that ignores deadlines.

    A job can be on time until the moment from which even the fastest group would end its uncommitted work too late. The
    job is checked at that moment; if it has made progress, the moment is later by then.
    """

    def __init__(self, policy: Policy, costs: CostModel, tracker: Tracker, recovery: Recovery) -> None:
        self._policy = policy
        self._costs = costs
        self._tracker = tracker
        self._recovery = recovery
        self._looks: list[tuple[int, int]] = []  # (time, job id), a heap; jobs that have ended are still in it.

    def watch(self, job: Job) -> None:
        if job.request.is_dropped_if_late:
            heappush(self._looks, (self._last_ns(job) + 1, job.job_id))

    def expire(self, now_ns: int) -> list[Action]:
        """End the jobs that cannot be on time any more."""
        actions: list[Action] = []
        while self._looks and self._looks[0][0] <= now_ns:
            _, job_id = heappop(self._looks)
            job = self._tracker.job(job_id)
            if job is None or not job.request.is_dropped_if_late:
                continue
            last_ns = self._last_ns(job)
            if now_ns <= last_ns:
                heappush(self._looks, (last_ns + 1, job_id))
                continue
            if job.may_use_cache:
                actions.append(self.use_cache(job, LATE))
                heappush(self._looks, (self._last_ns(job) + 1, job_id))
                continue
            actions += self.end(job, LATE)
        return actions

    def end(self, job: Job, why: str) -> list[Action]:
        return self._recovery.end(job, Status.EXPIRED, why)

    def use_cache(self, job: Job, why: str) -> Action:
        """Let a job use its spare cache, since it would be late without it."""
        self._tracker.use_cache(job)
        return UseCache(job.job_id, job.request.uid, why)

    def wake_ns(self) -> int | None:
        """Return when to check again if nothing happens; None if there is nothing to check."""
        return self._looks[0][0] if self._looks else None

    def _last_ns(self, job: Job) -> int:
        """Return the last time at which its uncommitted work may begin, to be on time on the fastest group."""
        assert job.request.deadline_ns is not None
        degrees = self._policy.degrees(job.request, self._costs)
        return job.request.deadline_ns - fastest(job.request, job.committed, degrees, self._costs).run_ns
