"""Earliest deadline first, preempting between chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilework.core.block import Demand
from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel, JobView
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS, s_from_ns
from tilework.core.work import Plan
from tilework.cost.demand import demand_at
from tilework.policy.toolkit.fixed_groups import Lane, LaneDivision, LanePlan, Pick
from tilework.policy.toolkit.open_devices import WORKS_PER_DEVICE
from tilework.policy.toolkit.order import DeadlineOrdered, by_urgency, jobs_at_hand, late_jobs
from tilework.policy.toolkit.starts import explain


@dataclass(slots=True, kw_only=True)
class EarliestDeadlineFirst(DeadlineOrdered):
    """Serves the earliest deadline first, each job on one device; a more urgent job takes over at the end of a chunk.

    Strict EDF serves late requests first and makes others late by that. Here a job that can no longer be on time, even
    if it ran alone from now on, is dropped to best effort (see `DeadlineOrder`).
    """

    chunk_ns: int = 200 * NS_PER_MS
    _division: LaneDivision = field(default_factory=LaneDivision, init=False)

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (1,)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        return demand_at(request, left, 1, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """Return the next starts.

        A plan that drops jobs to best effort starts nothing, and is asked for again in the new order.
        """
        jobs = list(jobs_at_hand(view, WORKS_PER_DEVICE * len(view.devices)))
        if not jobs:
            return Plan()
        if late := late_jobs([(job, now_ns + job.demand.run_ns) for job in jobs if job.left.stage is not None]):
            return Plan(dropped_to_best_effort=late)
        waiting = iter(view.waiting())
        head = next(waiting, None)
        division = self._division.lanes(view.devices)
        # While no job waits, an idle device gets none.
        lanes = LanePlan(
            view, division if head is not None else [lane for lane in division if lane.num_works], costs, self.chunk_ns
        )

        def choose(lane: Lane) -> Pick | None:
            nonlocal head
            running = lanes.continued(lane)
            if running is not None and (head is None or by_urgency(running) <= by_urgency(head)):
                return running, explain(running, "continues", now_ns)
            if head is None:
                return None
            job, head = head, next(waiting, None)
            return job, explain(job, "is most urgent" if running is None else _goes_before(job, running), now_ns)

        return lanes.plan(choose)


def _goes_before(job: JobView, other: JobView) -> str:
    """Return the reason without the other job's name: the client reads it, and the other may be another tenant's."""
    more_s = s_from_ns(other.urgency_ns - job.urgency_ns)
    return f"goes before a request that has {more_s:.2f} s more"
