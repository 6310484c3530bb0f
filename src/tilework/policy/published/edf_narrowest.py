"""Earliest deadline first, each request from beginning to end on the narrowest group that is in time."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.interfaces import ClusterView, CostModel
from tilework.core.work import Plan
from tilework.policy.registry import policy
from tilework.policy.toolkit.elastic import Elastic
from tilework.policy.toolkit.elastic_groups import ONE_DEVICE, Placed, Pool
from tilework.policy.toolkit.order import doom, explain
from tilework.policy.toolkit.tasks import Task

_TO_THE_END_NS = 1 << 62


@policy("edf-narrowest")
@dataclass(slots=True, kw_only=True)
class NarrowestFirst(Elastic):
    """The simplest policy with degrees and deadlines: nobody is stopped, narrowed or widened once he has begun.

    In order of the deadlines each takes the narrowest group with which it is on time from now on; if that is not free,
    it waits, and others go before it. Hopeless requests are set aside. What it loses on a few devices, where a wide
    request cannot wait until enough of them are free, it does not lose on many; there it is hard to beat.
    """

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """A plan that sets jobs aside starts nothing, and is asked for again in the new order."""
        pool = Pool(view, costs, now_ns, _TO_THE_END_NS)
        if not pool.allocator.num_free():
            return pool.plan(())
        tasks = [task for task in pool.tasks() if not task.job.works]
        doomed = tuple(
            (task.job.job_id, why) for task in tasks if (why := doom(task.job, task.earliest_ns)) is not None
        )
        if doomed:
            return Plan(dropped_to_best_effort=doomed)
        placed: list[Placed] = []
        for task in tasks:
            group = pool.allocator.take(_width(task), task.job.last_devices)
            if group is None:
                pool.hold(_width(task), task.job.last_devices)
            if group is not None:
                placed.append(Placed(task, group, explain(task.job, "is on time so", now_ns)))
        return pool.plan(placed)


def _width(task: Task) -> int:
    """The narrowest degree that is in time; without a deadline, or past it, the narrowest of all."""
    speeds = task.speeds or (ONE_DEVICE,)
    rest_ns = task.ready_ns + task.encode_ns + task.decode_ns
    in_time = (speed.degree for speed in speeds if rest_ns + task.num_steps * speed.step_ns <= task.due_ns)
    if task.job.request.deadline_ns is None or task.job.dropped_to_best_effort:
        return speeds[0].degree
    return next(in_time, speeds[-1].degree)
