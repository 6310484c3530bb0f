"""First come, first served, a fixed number of GPUs per request: what diffusion servers do today (xDiT, vLLM-Omni)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from tilework.core.interfaces import ClusterView, CostModel, Demand
from tilework.core.progress import Cursor
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import DIFFUSE, Group, Plan, StageId
from tilework.policy.allocator import Allocator, nodes
from tilework.policy.chunks import Choice, Lane, Slots, fill, open_lanes
from tilework.policy.demand import demand_at, usable_degree
from tilework.policy.registry import policy


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDegree:
    """Serve in order of arrival; a group of `degree` GPUs keeps a request until it is finished.

    Deadlines, weights and tenants are ignored.

    The GPUs of a node that is short of some are divided into groups as wide as they go. A request takes as many GPUs
    of its group as its pipeline was profiled for.
    """

    degree: int
    chunk_ns: int = 200 * NS_PER_MS

    def urgency_ns(self, request: Request, set_aside: bool, delay_ns: int = 0) -> int:
        return request.arrival_ns

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (usable_degree(StageId(request.pipeline, DIFFUSE), self.degree, costs),)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        (degree,) = self.degrees(request, costs)
        return demand_at(request, left, degree, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        groups = [group for gpus in nodes(view.gpus) for group in _groups(tuple(gpus), self.degree)]
        slots = Slots(view, open_lanes(view, groups), costs, self.chunk_ns)
        waiting = iter(view.waiting())

        def choose(lane: Lane) -> Choice | None:
            job, reason = slots.continued(lane), "keeps its group until it is finished"
            if job is None:
                job, reason = next(waiting, None), "has waited longest"
            return None if job is None else (job, reason + self._narrower(lane, job.request, costs))

        fill(slots, choose)
        return Plan(starts=tuple(slots.starts))

    def _narrower(self, lane: Lane, request: Request, costs: CostModel) -> str:
        """Why a request gets fewer GPUs than it should; empty if it gets them."""
        if len(lane.gpus) < self.degree:
            return f"; its node has only {len(lane.gpus)} GPUs left for a group"
        profiled = usable_degree(StageId(request.pipeline, DIFFUSE), self.degree, costs)
        return "" if profiled == self.degree else f"; its pipeline was profiled for {profiled} GPUs at most"


@lru_cache(maxsize=1024)
def _groups(gpus: Group, degree: int) -> tuple[Group, ...]:
    """The GPUs of a node in groups of `degree`, aligned ones first; then of half of that, and so on.

    Remembered, since every event asks for them and they seldom change.
    """
    allocator, groups, width = Allocator([gpus]), [], degree
    while width:
        while group := allocator.take(width):
            groups.append(group)
        width //= 2
    return tuple(groups)


for _degree in (1, 2, 4, 8):
    policy(f"fixed-sp{_degree}")(partial(FixedDegree, degree=_degree))
