"""First come, first served, a fixed number of devices per request: what servers do today (xDiT, vLLM-Omni)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from tilework.core.block import Demand
from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework.cost.demand import demand_at, usable_degree
from tilework.policy.toolkit.fixed_groups import Lane, LaneDivision, LanePlan, Pick
from tilework.policy.toolkit.order import ArrivalOrdered, jobs_at_hand
from tilework.policy.toolkit.starts import devices_text


@dataclass(slots=True, kw_only=True)
class FixedDegree(ArrivalOrdered):
    """Serves in order of arrival; a group of `degree` devices keeps a request until it is finished.

    Deadlines, weights and tenants are ignored.

    The devices of a node that are too few for a group are divided into groups as wide as they go. A request takes as
    many devices of its group as its pipeline was profiled for.
    """

    degree: int
    chunk_ns: int = 200 * NS_PER_MS
    _division: LaneDivision = field(init=False)

    def __post_init__(self) -> None:
        self._division = LaneDivision(self.degree)

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (usable_degree(request, self.degree, costs),)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        (degree,) = self.degrees(request, costs)
        return demand_at(request, left, degree, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        if not self._division.is_of(view.devices) and next(jobs_at_hand(view, 1), None) is None:
            return Plan()  # Thousands of devices may join before the first request comes.
        lanes = LanePlan(view, self._division.lanes(view.devices), costs, self.chunk_ns)
        waiting = iter(view.waiting())

        def choose(lane: Lane) -> Pick | None:
            job, reason = lanes.continued(lane), "keeps its group until it is finished"
            if job is None:
                job, reason = next(waiting, None), "has waited longest"
            return None if job is None else (job, reason + self._narrower(lane, job.request, costs))

        return lanes.plan(choose)

    def _narrower(self, lane: Lane, request: Request, costs: CostModel) -> str:
        """Return why a request gets fewer devices than `degree`; empty if it gets them."""
        if len(lane.devices) < self.degree:
            return f"; only {devices_text(len(lane.devices))} of its node can form a group now"
        if request.has_single_steps:
            why = "it is exact" if request.exact else "it has a cache of whole steps"
            return "" if self.degree == 1 else f"; its steps run on one device, since {why}"
        (profiled,) = self.degrees(request, costs)
        return "" if profiled == self.degree else f"; its pipeline was profiled for {devices_text(profiled)} at most"


SP1, SP2, SP4, SP8 = (partial(FixedDegree, degree=degree) for degree in (1, 2, 4, 8))
