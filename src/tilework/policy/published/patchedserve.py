"""PatchedServe: batches of any sizes, formed by slack and throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilework.core.policy import CostModel, JobView
from tilework.core.request import Request
from tilework.cost.demand import demand_at
from tilework.policy.toolkit.continuous_batching import (
    BatchChoice,
    ContinuousBatching,
    DeviceQueue,
    first_batch,
    may_join,
)
from tilework.policy.toolkit.order import DeadlineOrder, drop_reason, late_jobs


@dataclass(slots=True, kw_only=True)
class PatchedServe(ContinuousBatching):
    """Algorithm 1: requests enter the batch of a device, one by one, as long as no member is late by that.

    The slack of a request is the time to its deadline, less its remaining time; its score is the slack over the time
    that all of it takes alone. The waiting request with the lowest score is next (*urgent* mode). If even that score is
    at least `relaxed` in the batch, the next one is the request with which the batch makes most images per second
    (*throughput* mode). If a member would be late with the next one, no more enter (the schedulability test; only the
    member with the lowest score needs to be looked at). A request that would be late even if it entered now is
    discarded. Members stay to their end. The remaining time of a request in a batch is predicted at the batch's pace.

    Source: PatchedServe §6.2, §8.2. Where the paper is silent, and departures:

    - "Relatively relaxed" is a score of `relaxed` or more: a slack of that many times its own time alone.
    - "Throughput" is members over the time of a step.
    - A discarded request is dropped to best effort: served when its device has no other job, or when ten minutes have
      passed (`DeadlineOrder`). So is a member that can no longer be on time, which the paper does not have.
    - Requests without a deadline have the one of `DeadlineOrder`. Promises are not discarded.
    - The cache of patches is that of the requests, if they have one, and saves what the cost table says. Steps are
      chosen for `chunk_ns` at a time, not one by one.
    """

    relaxed: float = 1.0
    order: DeadlineOrder = field(default_factory=DeadlineOrder)

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return self.order.urgency_ns(request, dropped_to_best_effort, delay_ns)

    def choose(self, queue: DeviceQueue, costs: CostModel, begin_ns: int) -> BatchChoice:
        begun, waiting = ([job for job in jobs if _has_a_turn(job, begin_ns)] for jobs in (queue.begun, queue.waiting))
        if not begun and not waiting:
            return BatchChoice(first_batch(queue.jobs, costs))
        if late := late_jobs([(job, begin_ns + job.demand.run_ns) for job in begun]):
            return BatchChoice((), late)
        return _BatchAdmission(self, costs, begin_ns).run(first_batch(begun, costs), waiting)


def _has_a_turn(job: JobView, now_ns: int) -> bool:
    """Return whether a job is not dropped to best effort, or has been for long enough."""
    return not job.dropped_to_best_effort or job.urgency_ns <= now_ns


@dataclass(slots=True)
class _BatchAdmission:
    """Algorithm 1 for one device at one time."""

    policy: PatchedServe
    costs: CostModel
    begin_ns: int

    def run(self, members: list[JobView], waiting: list[JobView]) -> BatchChoice:
        late: list[tuple[int, str]] = []
        queue = sorted(waiting, key=lambda job: (self._score(job, job.demand.run_ns), job.job_id))
        while queue := [job for job in queue if may_join(members, job, self.costs)]:
            job = queue[0]
            if (why := drop_reason(job, self._finish_ns(job, [*members, job]))) is not None:
                late.append((job.job_id, why))
                queue.remove(job)
                continue
            if self._score_in(job, [*members, job]) >= self.policy.relaxed:
                job = self._best(members, queue)
            if not self._is_schedulable(members, [*members, job]):
                break
            queue.remove(job)
            members.append(job)
        return BatchChoice(members, tuple(late))

    def _best(self, members: Sequence[JobView], queue: Sequence[JobView]) -> JobView:
        """Return the job with which the batch makes most images per second; of several, the first of the queue."""
        # Coarser than `step_key`: of jobs that differ in their previews alone, the first of the queue is tried.
        first = {(job.request.shape, job.request.guided): job for job in reversed(queue)}
        return min(first.values(), key=lambda job: (self._step_ns([*members, job]), queue.index(job)))

    def _is_schedulable(self, members: Sequence[JobView], batch: Sequence[JobView]) -> bool:
        """Return whether no member is late in the batch that would not be late alone."""
        on_time = [job for job in members if self._score(job, job.demand.run_ns) >= 0]
        return min([self._score_in(job, batch) for job in on_time], default=0) >= 0

    def _score_in(self, job: JobView, batch: Sequence[JobView]) -> float:
        return self._score(job, self._finish_ns(job, batch) - self.begin_ns)

    def _score(self, job: JobView, remaining_ns: int) -> float:
        """Return (DDL - C - P) / SA, P being the remaining time."""
        alone_ns = demand_at(job.request, self.costs.start(job.request), 1, self.costs).run_ns
        return (job.urgency_ns - self.begin_ns - remaining_ns) / max(1, alone_ns)

    def _finish_ns(self, job: JobView, batch: Sequence[JobView]) -> int:
        """Return when a job ends if the batch stays as it is; encode and decode are its own."""
        num_steps = job.left.num_steps
        own_ns = num_steps * self._step_ns([job])
        return self.begin_ns + job.demand.run_ns - own_ns + num_steps * self._step_ns(batch)

    def _step_ns(self, batch: Sequence[JobView]) -> int:
        stage = batch[0].left.stepped
        assert stage is not None
        return self.costs.work_ns(stage, [job.request for job in batch], 1)
