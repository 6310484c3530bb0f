"""The best static degree of each resolution, first come first served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilework.core.block import Demand
from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework.cost.demand import Speed, demand_at, step_speeds
from tilework.policy.toolkit.degrees import efficient_degree
from tilework.policy.toolkit.elastic_groups import DevicePool, Placement
from tilework.policy.toolkit.order import ArrivalOrdered
from tilework.policy.toolkit.starts import devices_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolutionDegrees(ArrivalOrdered):
    """Serves in order of arrival, each request at the degree that the profile says is best for its resolution.

    A job keeps its group until its steps are done. The first that waits holds the free devices until there are enough
    for it, and no other goes before it. Deadlines, weights and tenants are ignored.

    Source: RSSP in GF-DiT's comparisons: a fixed degree for each class of sizes, set by hand, in groups that are cut
    beforehand. Departures: here the profile decides (the widest degree that is efficient, see `efficient_degree`), and
    groups form on demand, so that no device idles only because it belongs to the wrong group.
    """

    chunk_ns: int = 200 * NS_PER_MS

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (self._degree(step_speeds(request, costs)),)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        (degree,) = self.degrees(request, costs)
        return demand_at(request, left, degree if left.num_steps_left else 1, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        pool = DevicePool(view, costs, now_ns, self.chunk_ns)
        if not pool.allocator.num_free():
            return pool.plan(())
        placements: list[Placement] = []
        for task in sorted(pool.tasks(), key=lambda task: not task.job.last_devices):  # A job keeps the group it has.
            if not pool.is_ready(task):
                continue
            degree = self._degree(task.group_speeds)
            group = pool.allocator.take(degree, task.job.last_devices)
            if group is None:
                break
            why = f"has waited longest; its best degree is {degree}"
            if task.job.last_devices:
                why = f"keeps its {devices_text(degree)}"
            placements.append(Placement(task, group, why))
        return pool.plan(placements)

    def _degree(self, speeds: Sequence[Speed]) -> int:
        return efficient_degree(speeds)
