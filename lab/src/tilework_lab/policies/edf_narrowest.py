"""Earliest deadline first, each request from beginning to end on the narrowest group that is in time."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.policy import ClusterView, CostModel
from tilework.core.time import NEVER_NS
from tilework.core.work import Plan
from tilework.policy.toolkit.elastic_groups import DevicePool, Placement
from tilework.policy.toolkit.order import DeadlinePolicy, late_jobs
from tilework.policy.toolkit.starts import explain
from tilework.policy.toolkit.tasks import Task


@dataclass(slots=True, kw_only=True)
class NarrowestFirst(DeadlinePolicy):
    """The simplest policy with degrees and deadlines: no request is stopped, narrowed or widened once it has begun.

    In order of the deadlines each takes the narrowest group with which it is on time from now on; if that is not free,
    it waits, and others go before it. Requests that can no longer be on time are dropped to best effort. It loses on a
    few devices, where a wide request cannot wait until enough of them are free. On many devices it is hard to beat.
    """

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """Return the next starts.

        A plan that drops jobs to best effort starts nothing, and is asked for again in the new order.
        """
        pool = DevicePool(view, costs, now_ns, chunk_ns=NEVER_NS)
        if not pool.allocator.num_free():
            return pool.plan(())
        tasks = [task for task in pool.tasks() if not task.job.works]
        if late := late_jobs([(task.job, task.earliest_ns) for task in tasks]):
            return Plan(dropped_to_best_effort=late)
        placements: list[Placement] = []
        for task in tasks:
            group = pool.allocator.take(_width(task), task.job.last_devices)
            if group is None:
                pool.hold(_width(task), task.job.last_devices)
            else:
                placements.append(Placement(task, group, explain(task.job, "is on time so", now_ns)))
        return pool.plan(placements)


def _width(task: Task) -> int:
    """Return the narrowest degree that is in time; without a deadline, or past it, the narrowest of all."""
    speeds = task.group_speeds
    if task.job.request.deadline_ns is None or task.job.dropped_to_best_effort:
        return speeds[0].degree
    in_time = (speed.degree for speed in speeds if task.finish_ns(speed) <= task.due_ns)
    return next(in_time, speeds[-1].degree)
