"""Earliest deadline first, preempting between chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilework.core.interfaces import ClusterView, CostModel, Demand, DeviceView, JobView
from tilework.core.progress import Cursor
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS, s_from_ns
from tilework.core.work import Plan
from tilework.policy.registry import policy
from tilework.policy.toolkit.demand import demand_at
from tilework.policy.toolkit.fixed_groups import WORKS_PER_LANE, Choice, Lane, Slots, fill
from tilework.policy.toolkit.order import DeadlineOrder, by_urgency, doom, explain, jobs_at_hand


@policy("edf")
@dataclass(slots=True, kw_only=True)
class EarliestDeadlineFirst:
    """Serve the earliest deadline first, each job on one GPU; a more urgent job takes it over at the end of a chunk.

    Strict EDF serves doomed requests first and so dooms others. Here a job that cannot be on time any more, even if it
    ran alone from now on, is set aside (see `DeadlineOrder`).
    """

    chunk_ns: int = 200 * NS_PER_MS
    order: DeadlineOrder = field(default_factory=DeadlineOrder)
    _devices: Sequence[DeviceView] | None = field(default=None, init=False)
    _lanes: Sequence[Lane] = field(default=(), init=False)

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return self.order.urgency_ns(request, dropped_to_best_effort, delay_ns)

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (1,)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        return demand_at(request, left, 1, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """Raises nothing; a plan that sets jobs aside starts nothing, and is asked for again in the new order."""
        jobs = list(jobs_at_hand(view, WORKS_PER_LANE * len(view.devices)))
        if not jobs:
            return Plan()
        doomed = tuple(
            (job.job_id, why)
            for job in jobs
            if job.stage is not None and (why := doom(job, now_ns + job.demand.run_ns)) is not None
        )
        if doomed:
            return Plan(dropped_to_best_effort=doomed)
        if self._devices is not view.devices:
            self._devices, self._lanes = view.devices, [Lane((device_id,)) for device_id in view.devices]
        waiting = iter(view.waiting())
        head = next(waiting, None)
        # While nobody waits there is nobody to give an idle device to.
        lanes = self._lanes if head is not None else [lane for lane in self._lanes if lane.num_works]
        slots = Slots(view, lanes, costs, self.chunk_ns)

        def choose(lane: Lane) -> Choice | None:
            nonlocal head
            running = slots.continued(lane)
            if running is not None and (head is None or by_urgency(running) <= by_urgency(head)):
                return running, explain(running, "continues", now_ns)
            if head is None:
                return None
            job, head = head, next(waiting, None)
            return job, explain(job, "is most urgent" if running is None else _goes_before(job, running), now_ns)

        fill(slots, choose)
        return Plan(starts=tuple(slots.starts))


def _goes_before(job: JobView, other: JobView) -> str:
    """Without the other's name: whoever asked for this one reads it, and the other may be somebody else's."""
    more_s = s_from_ns(other.urgency_ns - job.urgency_ns)
    return f"goes before a request that has {more_s:.2f} s more"
