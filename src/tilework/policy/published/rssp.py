"""The best static degree of each resolution, first come first served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilework.core.interfaces import ClusterView, CostModel, Demand
from tilework.core.progress import Cursor
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework.policy.registry import policy
from tilework.policy.toolkit.degrees import all_speeds, efficient_degree
from tilework.policy.toolkit.demand import demand_at
from tilework.policy.toolkit.elastic_groups import Placed, Pool


@policy("rssp")
@dataclass(frozen=True, slots=True, kw_only=True)
class ResolutionDegrees:
    """Serve in order of arrival, each request at the degree that the profile says is best for its resolution.

    A job keeps its group until its steps are done. The first that waits holds the devices that are free until there are
    enough for it, and nobody goes before it. Deadlines, weights and tenants are ignored.

    Source: RSSP in GF-DiT's comparisons, a fixed degree for each class of sizes, set by hand there, in groups that are
    cut beforehand. Here the profile decides (the widest degree that is efficient, see `efficient_degree`), and groups
    form on demand, so that no device idles only since it belongs to the wrong group.
    """

    chunk_ns: int = 200 * NS_PER_MS

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return request.arrival_ns

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (efficient_degree(all_speeds(request, costs)),)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        (degree,) = self.degrees(request, costs)
        return demand_at(request, left, degree if left.num_steps_left else 1, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        pool = Pool(view, costs, now_ns, self.chunk_ns)
        if not pool.allocator.num_free():
            return pool.plan(())
        placed: list[Placed] = []
        for task in sorted(pool.tasks(), key=lambda task: not task.job.last_devices):  # Whoever has a group keeps it.
            if not pool.is_ready(task):
                continue
            degree = efficient_degree(task.speeds) if task.speeds else 1
            group = pool.allocator.take(degree, task.job.last_devices)
            if group is None:
                break
            why = (
                f"keeps its {degree} GPUs"
                if task.job.last_devices
                else f"has waited longest; {degree} GPUs are its best"
            )
            placed.append(Placed(task, group, why))
        return pool.plan(placed)
