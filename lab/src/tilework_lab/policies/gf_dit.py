"""GF-DiT's deadline policy: for each chunk the narrowest group that still meets the deadline, then wider ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tilework.core.policy import ClusterView, CostModel
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework.cost.demand import Speed
from tilework.policy.toolkit.elastic_groups import DevicePool, Placement
from tilework.policy.toolkit.order import DeadlinePolicy, late_jobs
from tilework.policy.toolkit.starts import explain
from tilework.policy.toolkit.tasks import Task
from tilework_lab.policies.srtf import ShortestFirst


@dataclass(slots=True, kw_only=True)
class BestFit(DeadlinePolicy):
    """Maximises the share of requests on time. At each end of a chunk, for the jobs and devices that are ready then:

    1. earliest deadline first, each job takes the narrowest group with which all its remaining work meets the deadline;
       the quickest for which there is room, if none does or if it has no deadline;
    2. remaining devices go to the most urgent job for which the next wider group is quicker, again and again;
    3. jobs keep their devices where the widths allow it.

    Source: GF-DiT (arXiv 2606.13501), policy `edf_best_fit` of its published code. It serves requests that can no
    longer be on time in the order of their deadlines, before those that it could save. So does this one unless
    `drops_to_best_effort`: then they come after those that can be on time.

    Departures:

    - A chunk is as many steps as fit into `chunk_ns`, at least one; theirs is a number of steps.
    - Best effort has the patience of `DeadlineOrder`; theirs comes after all that have a deadline, and can starve.
    - Groups do not span nodes.
    """

    drops_to_best_effort: bool
    chunk_ns: int = 50 * NS_PER_MS

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
        placements = [one for task in tasks if pool.is_ready(task) and (one := _narrowest(pool, task)) is not None]
        while pool.allocator.num_free() and any(_grows(pool, one) for one in placements):
            pass
        return pool.plan(placements)


def _narrowest(pool: DevicePool, task: Task) -> Placement | None:
    """Place a task on the narrowest group that meets its deadline; None if there is no room for any."""
    room = pool.allocator.widest()
    speeds = [speed for speed in task.group_speeds if speed.degree <= room]
    if not speeds:
        return None
    in_time = (speed for speed in speeds if task.finish_ns(speed) <= task.due_ns)
    fit = next(in_time, None) if task.job.request.deadline_ns is not None else None
    speed = fit or min(speeds, key=lambda speed: (speed.step_ns, speed.degree))
    group = pool.allocator.take(speed.degree, task.job.last_devices)
    assert group is not None, "there was room"
    verb = "is quickest so" if fit is None else "meets its deadline so"
    return Placement(task, group, explain(task.job, verb, pool.now_ns))


def _grows(pool: DevicePool, placement: Placement) -> bool:
    """Give a job the next wider group that is quicker; returns whether there was room."""
    spare = pool.allocator.num_free()
    for speed in placement.task.speeds:
        is_quicker = speed.degree > placement.degree and speed.step_ns < placement.speed.step_ns
        if is_quicker and speed.degree - placement.degree <= spare and pool.widen(placement, speed.degree):
            placement.why = explain(placement.task.job, "is quicker so, on devices that would idle", pool.now_ns)
            return True
    return False


KEEPS_ORDER = partial(BestFit, drops_to_best_effort=False)
DROPS_LATE = partial(BestFit, drops_to_best_effort=True)


@dataclass(slots=True, kw_only=True)
class StaticShortestFirst(ShortestFirst):
    """`srtf` at the widest degree that a node has.

    Source: GF-DiT (arXiv 2606.13501), policy `srtf` of its published code, which by default runs on one group of all
    devices, whatever it gains by it. Departures: aging, without which a long request can starve; where there are
    several groups, a request goes to the one that is free, not to one that was chosen at its arrival.
    """

    def degree_of(self, speeds: Sequence[Speed]) -> int:
        return speeds[-1].degree
