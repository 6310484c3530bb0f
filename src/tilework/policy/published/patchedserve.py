"""PatchedServe: batches of any sizes, formed by slack and throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilework.core.interfaces import CostModel, JobView
from tilework.core.progress import Cursor
from tilework.core.request import Request
from tilework.core.work import DIFFUSE, StageId
from tilework.policy.registry import policy
from tilework.policy.toolkit.continuous_batching import Batching, Choice, Crowd, may_join, together
from tilework.policy.toolkit.demand import demand_at
from tilework.policy.toolkit.order import DeadlineOrder, doom


@policy("patchedserve")
@dataclass(slots=True, kw_only=True)
class PatchedServe(Batching):
    """Algorithm 1: let requests into the batch of a device, one by one, as long as nobody in it is late by that.

    A request's slack is the time to its deadline, less what is left of it; its score is that over what all of it
    takes alone. Whoever has the lowest score among those that wait is next (*urgent* mode); if even that is at least
    `relaxed` with it in the batch, another is next, the one with which the batch makes most pictures per second
    (*throughput* mode). If with the next one a member would be late, nobody is let in any more (the schedulability
    test; who has the lowest score is enough to look at). Who would be late even if it were let in now is discarded.
    Members stay to their end. What is left of a request in a batch is predicted at the pace of that batch.

    Source: PatchedServe §6.2, §8.2. What the paper leaves open, or we do otherwise:

    - "Relatively relaxed" is a score of `relaxed` or more: so often its own time alone.
    - "Throughput" is members over the time of a step.
    - Whoever is discarded is set aside: served when its device has nobody else, or when ten minutes have passed
      (`DeadlineOrder`). So is a member that cannot be on time any more, which the paper cannot have.
    - Requests without a deadline have the one of `DeadlineOrder`. Promises are not discarded.
    - The cache of patches is not modelled, and steps are chosen for `chunk_ns` at a time, not one by one.
    """

    relaxed: float = 1.0
    order: DeadlineOrder = field(default_factory=DeadlineOrder)

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return self.order.urgency_ns(request, dropped_to_best_effort, delay_ns)

    def choose(self, crowd: Crowd, costs: CostModel, begin_ns: int) -> Choice:
        begun, waiting = ([job for job in jobs if _has_a_turn(job, begin_ns)] for jobs in (crowd.begun, crowd.waiting))
        if not begun and not waiting:
            return Choice(together(crowd.begun + crowd.waiting, costs))
        late = [(job.job_id, why) for job in begun if (why := doom(job, begin_ns + job.demand.run_ns)) is not None]
        if late:
            return Choice((), tuple(late))
        return _Admission(self, costs, begin_ns).run(together(begun, costs), waiting)


def _has_a_turn(job: JobView, now_ns: int) -> bool:
    """Whether it is not set aside, or has been for long enough."""
    return not job.dropped_to_best_effort or job.urgency_ns <= now_ns


@dataclass(slots=True)
class _Admission:
    """Algorithm 1 for one device at one time."""

    policy: PatchedServe
    costs: CostModel
    begin_ns: int

    def run(self, members: list[JobView], waiting: list[JobView]) -> Choice:
        late: list[tuple[int, str]] = []
        queue = sorted(waiting, key=lambda job: (self._score(job, job.demand.run_ns), job.job_id))
        while queue := [job for job in queue if may_join(members, job, self.costs)]:
            job = queue[0]
            if (why := doom(job, self._finish_ns(job, [*members, job]))) is not None:
                late.append((job.job_id, why))
                queue.remove(job)
                continue
            if self._score_in(job, [*members, job]) >= self.policy.relaxed:
                job = self._best(members, queue)
            if not self._is_schedulable(members, [*members, job]):
                break
            queue.remove(job)
            members.append(job)
        return Choice(members, tuple(late))

    def _best(self, members: Sequence[JobView], queue: Sequence[JobView]) -> JobView:
        """With whom the batch makes most pictures per second; of those, the first of the queue."""
        first = {(job.request.shape, job.request.guided): job for job in reversed(queue)}
        return min(first.values(), key=lambda job: (self._step_ns([*members, job]), queue.index(job)))

    def _is_schedulable(self, members: Sequence[JobView], batch: Sequence[JobView]) -> bool:
        """Whether no member is late in the batch that would not be late alone."""
        on_time = [job for job in members if self._score(job, job.demand.run_ns) >= 0]
        return min([self._score_in(job, batch) for job in on_time], default=0) >= 0

    def _score_in(self, job: JobView, batch: Sequence[JobView]) -> float:
        return self._score(job, self._finish_ns(job, batch) - self.begin_ns)

    def _score(self, job: JobView, left_ns: int) -> float:
        """(DDL - C - P) / SA, P being what is left."""
        alone_ns = demand_at(job.request, Cursor.start(job.request), 1, self.costs).run_ns
        return (job.urgency_ns - self.begin_ns - left_ns) / max(1, alone_ns)

    def _finish_ns(self, job: JobView, batch: Sequence[JobView]) -> int:
        """When a job ends if the batch stays as it is; encode and decode are its own."""
        own_ns = job.num_steps_left * self._step_ns([job])
        return self.begin_ns + job.demand.run_ns - own_ns + job.num_steps_left * self._step_ns(batch)

    def _step_ns(self, batch: Sequence[JobView]) -> int:
        stage = StageId(batch[0].request.pipeline, DIFFUSE)
        return self.costs.work_ns(stage, [job.request for job in batch], 1)
