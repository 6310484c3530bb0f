"""Shortest remaining time first, with aging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from tilework.core.block import Demand
from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Request, RequestClass, cost_key
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework.cost.demand import Speed, demand_at, step_speeds
from tilework.policy.toolkit.degrees import efficient_degree
from tilework.policy.toolkit.elastic_groups import DevicePool, Placement
from tilework.policy.toolkit.known_demands import ByClass
from tilework.policy.toolkit.starts import needs
from tilework.policy.toolkit.tasks import Task

_MOST_CLASSES = 256


@dataclass(slots=True, kw_only=True)
class ShortestFirst:
    """Keeps the mean latency low: the job with the least remaining time is next, and takes over at the end of a chunk.

    Each job runs at the widest degree that is efficient (see `efficient_degree`), as the systems describe it that are
    compared with SRTF. Deadlines and tenants are ignored.

    Aging: a job is passed by later ones that come within `patience` times the difference of both jobs' remaining times,
    divided by the weight. So there is a fixed point in time at which a job becomes the first, and no job starves. A
    stream of short jobs that fills all devices keeps a long one waiting until then.

    A job that needs more devices than are free holds those, while shorter jobs continue and longer ones make room.
    """

    chunk_ns: int = 200 * NS_PER_MS
    patience: int = 20
    _run_ns: ByClass[RequestClass, int] = field(default_factory=partial(ByClass, _MOST_CLASSES), init=False)

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        """Return the arrival, aged by the time that a request takes.

        It is known from `demand`, which admission asks for first.
        """
        return request.arrival_ns + self._aged_ns(request, self._run_ns.get(cost_key(request), 0))

    def _aged_ns(self, request: Request, run_ns: int) -> int:
        return int(self.patience * run_ns / request.weight)

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (self.degree_of(step_speeds(request, costs)),)

    def degree_of(self, speeds: Sequence[Speed]) -> int:
        return efficient_degree(speeds)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        (degree,) = self.degrees(request, costs)
        demand = demand_at(request, left, degree if left.num_steps_left else 1, costs)
        if not left.position:
            self._run_ns.renew(cost_key(request), demand.run_ns)
        return demand

    def forget(self, pipeline: str, costs: CostModel) -> None:
        self._run_ns.forget(pipeline)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        pool = DevicePool(view, costs, now_ns, self.chunk_ns)
        if not pool.allocator.num_free():
            return pool.plan(())
        placements: list[Placement] = []
        for task in sorted(pool.tasks(), key=self._order):
            if not pool.is_ready(task):
                pool.keep(task.job.last_devices)
                continue
            degree = self.degree_of(task.group_speeds)
            if (group := pool.allocator.take(degree, task.job.last_devices)) is not None:
                placements.append(Placement(task, group, self._why(task)))
            else:
                pool.hold(degree, task.job.last_devices)
        return pool.plan(placements)

    def _order(self, task: Task) -> tuple[int, int]:
        """Return the urgency as of now: steps that a job has made no longer count."""
        job = task.job
        done_ns = self._run_ns.get(cost_key(job.request), job.demand.run_ns) - job.demand.run_ns
        return job.urgency_ns - self._aged_ns(job.request, max(0, done_ns)), job.job_id

    def _why(self, task: Task) -> str:
        verb = "continues" if task.job.last_devices else "is next"
        return f"{verb}: of the waiting jobs it has the least remaining time for its age, {needs(task.job.demand)}"
