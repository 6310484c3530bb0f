"""DDiT: first come, first served on the devices that are free, and wider later; the most starved job comes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilework.core.block import Demand
from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS, NS_PER_S, s_from_ns
from tilework.core.work import Plan
from tilework.cost.demand import Speed, demand_at, step_speeds
from tilework.policy.toolkit.degrees import best_doubling
from tilework.policy.toolkit.elastic_groups import DevicePool, Placement
from tilework.policy.toolkit.order import late_jobs
from tilework.policy.toolkit.starts import devices_text
from tilework.policy.toolkit.tasks import Task


@dataclass(frozen=True, slots=True)
class _Grant:
    """A job has had `degree` devices since it had `num_steps_left` steps left."""

    degree: int
    num_steps_left: int


@dataclass(slots=True, kw_only=True)
class DDiT:
    """Keeps devices busy and latency low: a request takes up to B devices, the degree that suits its size.

    At each end of a chunk, and whenever devices come free:

    1. a job that has a group keeps it;
    2. of the *hungry* jobs, those with fewer than B devices, the one that has starved longest gets more first. Devices
       are held for one in the middle of a chunk;
    3. then waiting jobs, in order of arrival, take B devices, or as many as there are.

    Encode and decode run on one device; the others of the group are free by then. Deadlines are ignored, unless
    `drops_to_best_effort`: then a request that can no longer be on time comes ten minutes later in the order of
    arrival.

    Source: DDiT §4.2.3 and appendix B, Algorithm 2. B is eq. 4 without its trap (see `best_doubling`), the starvation
    time eq. 5: the steps since the job last got devices, times what each takes longer than at B.

    Departures:

    - Devices that a hungry job cannot have before its step ends are held for it; the paper leaves this open.
    - The paper promotes to any number up to B; here the degree is one that was profiled.
    - It promotes after any step, this policy after a chunk.
    """

    drops_to_best_effort: bool = False
    chunk_ns: int = 100 * NS_PER_MS
    late_patience_ns: int = 600 * NS_PER_S
    _grants: dict[int, _Grant] = field(default_factory=dict, init=False)

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return request.arrival_ns + self.late_patience_ns * dropped_to_best_effort

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        speeds = step_speeds(request, costs)
        best = best_doubling(speeds)
        return [speed.degree for speed in speeds if speed.degree <= best]

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        """Return the work at the degree that suits the request. It may begin narrower; `eta_correction` learns that."""
        degree = best_doubling(step_speeds(request, costs)) if left.num_steps_left else 1
        return demand_at(request, left, degree, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """Return the next starts.

        A plan that drops jobs to best effort starts nothing, and is asked for again in the new order.
        """
        pool = DevicePool(view, costs, now_ns, self.chunk_ns)
        if not pool.allocator.num_free():
            return pool.plan(())
        tasks = pool.tasks()
        if self.drops_to_best_effort and (late := late_jobs([(task.job, task.earliest_ns) for task in tasks])):
            return Plan(dropped_to_best_effort=late)
        running = [task for task in tasks if task.job.last_devices]
        placed = self._keep(pool, running)
        hungry = [task for task in running if self._starved_ns(task) is not None]
        for task in sorted(hungry, key=lambda task: -(self._starved_ns(task) or 0)):
            self._promote(pool, task, placed.get(task.job.job_id))
        for task in tasks:
            if task.job.job_id not in placed and pool.is_ready(task):
                if (one := self._admit(pool, task)) is None:
                    break
                placed[task.job.job_id] = one
        self._remember(tasks, placed)
        return pool.plan(placed.values())

    # 1. A job that has a group keeps it.

    def _keep(self, pool: DevicePool, running: Sequence[Task]) -> dict[int, Placement]:
        """Place jobs at the end of a chunk on as many devices as they had, if these are still there."""
        placed = {}
        for task in running:
            width = len(task.job.last_devices)
            best = _best(task)
            widths = [speed.degree for speed in task.group_speeds if speed.degree <= min(width, best.degree)]
            if widths and pool.is_ready(task) and (group := pool.allocator.take(widths[-1], task.job.last_devices)):
                placed[task.job.job_id] = Placement(task, group, "keeps its group")
        return placed

    # 2. The job that has starved longest gets more devices.

    def _starved_ns(self, task: Task) -> int | None:
        """Return the starvation time, eq. 5; None for a job that has enough devices."""
        speeds = {speed.degree: speed for speed in task.speeds}
        best = _best(task)
        grant = self._grants.get(task.job.job_id)
        width = len(task.job.last_devices)
        if width >= best.degree or width not in speeds:
            return None if width >= best.degree else 0
        since = grant.num_steps_left if grant is not None and grant.degree == width else task.num_steps
        return (since - task.num_steps) * (speeds[width].step_ns - best.step_ns)

    def _promote(self, pool: DevicePool, task: Task, placed: Placement | None) -> None:
        """Widen a group; if the job is in the middle of a chunk, hold the devices by which it could be widened."""
        starved_s = s_from_ns(self._starved_ns(task) or 0)
        width = len(task.job.last_devices) if placed is None else placed.degree
        for degree in [speed.degree for speed in reversed(task.speeds) if width < speed.degree <= _best(task).degree]:
            if placed is None:
                if not pool.is_ready(task) and pool.take_beside(task.job.last_devices, degree - width):
                    return
            elif pool.widen(placed, degree):
                placed.why = f"is promoted from {devices_text(width)}, since it has starved for {starved_s:.2f} s"
                return

    # 3. Waiting jobs.

    def _admit(self, pool: DevicePool, task: Task) -> Placement | None:
        """Place a new job on B devices or as many as there are; None if there are not enough for any degree."""
        best = _best(task)
        for speed in reversed(task.group_speeds):
            if speed.degree <= best.degree and (group := pool.allocator.take(speed.degree, ())) is not None:
                fewer = "" if speed.degree == best.degree else f"; {best.degree} would suit it, but fewer are free"
                return Placement(task, group, f"has waited longest; begins on {devices_text(speed.degree)}{fewer}")
        return None

    def _remember(self, tasks: Sequence[Task], placed: dict[int, Placement]) -> None:
        """Remember since when each job has had its devices."""
        grants = {}
        for task in tasks:
            job_id = task.job.job_id
            one = placed.get(job_id)
            degree = one.degree if one else len(task.job.last_devices)
            known = self._grants.get(job_id)
            if degree:
                is_same = known is not None and known.degree == degree
                grants[job_id] = known if known and is_same else _Grant(degree, task.num_steps)
        self._grants = grants


def _best(task: Task) -> Speed:
    """Return the speed at B; of a job without steps, that of one device."""
    degree = best_doubling(task.group_speeds)
    return next(speed for speed in task.group_speeds if speed.degree == degree)
