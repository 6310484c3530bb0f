"""GF-DiT's deadline policy: for each chunk the narrowest group that still meets the deadline, then wider ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tilework.core.interfaces import ClusterView, CostModel
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework.policy.registry import policy
from tilework.policy.toolkit.demand import Speed
from tilework.policy.toolkit.elastic import Elastic
from tilework.policy.toolkit.elastic_groups import ONE_DEVICE, Placed, Pool
from tilework.policy.toolkit.order import doom, explain
from tilework.policy.toolkit.tasks import Task


@dataclass(slots=True, kw_only=True)
class BestFit(Elastic):
    """Maximise the share of requests on time: at each end of a chunk, for the jobs and devices that stand there,

    1. earliest deadline first, each job takes the narrowest group with which all that is left of it meets the deadline;
       the quickest for which there is room, if none does or if it has no deadline;
    2. what is left goes to the most urgent for which the next wider group is quicker, again and again;
    3. jobs keep their devices where the widths allow it.

    Source: GF-DiT (arXiv 2606.13501), policy `edf_best_fit` of its published code. It serves hopeless requests in the
    order of their deadlines, before those that it could save, and so does this one unless `drops_to_best_effort`: then
    they come after those that can be on time. Departures: a chunk is as many steps as fit into `chunk_ns`, at least
    one, where theirs is a number of steps; best effort has the patience of `DeadlineOrder`, where it came after all
    that have a deadline, and could starve; groups do not span nodes.
    """

    drops_to_best_effort: bool
    chunk_ns: int = 50 * NS_PER_MS

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """A plan that sets jobs aside starts nothing, and is asked for again in the new order."""
        pool = Pool(view, costs, now_ns, self.chunk_ns)
        if not pool.allocator.num_free():
            return pool.plan(())
        tasks = pool.tasks()
        if self.drops_to_best_effort:
            doomed = tuple(
                (task.job.job_id, why) for task in tasks if (why := doom(task.job, task.earliest_ns)) is not None
            )
            if doomed:
                return Plan(dropped_to_best_effort=doomed)
        placed = [one for task in tasks if pool.is_ready(task) and (one := _narrowest(pool, task)) is not None]
        while pool.allocator.num_free() and any(_grows(pool, one) for one in placed):
            pass
        return pool.plan(placed)


def _narrowest(pool: Pool, task: Task) -> Placed | None:
    """Place a task on the narrowest group that meets its deadline; None if there is no room for any."""
    room = pool.allocator.widest()
    speeds = [speed for speed in task.speeds or (ONE_DEVICE,) if speed.degree <= room]
    if not speeds:
        return None
    in_time = (speed for speed in speeds if _finish_ns(task, speed) <= task.due_ns)
    fit = next(in_time, None) if task.job.request.deadline_ns is not None else None
    speed = fit or min(speeds, key=lambda speed: (speed.step_ns, speed.degree))
    group = pool.allocator.take(speed.degree, task.job.last_devices)
    assert group is not None, "there was room"
    verb = "is quickest so" if fit is None else "meets its deadline so"
    return Placed(task, group, explain(task.job, verb, pool.now_ns))


def _finish_ns(task: Task, speed: Speed) -> int:
    return task.ready_ns + task.encode_ns + task.num_steps * speed.step_ns + task.decode_ns


def _grows(pool: Pool, placed: Placed) -> bool:
    """Give a job the next wider group that is quicker, if there is room."""
    spare = pool.allocator.num_free()
    for speed in placed.task.speeds:
        is_quicker = speed.degree > placed.degree and speed.step_ns < placed.speed.step_ns
        if is_quicker and speed.degree - placed.degree <= spare and pool.widen(placed, speed.degree):
            placed.why = explain(placed.task.job, "is quicker so, on devices that would idle", pool.now_ns)
            return True
    return False


policy("gf-dit-edf-best-fit")(partial(BestFit, drops_to_best_effort=False))
policy("gf-dit-edf-best-fit-drop")(partial(BestFit, drops_to_best_effort=True))
