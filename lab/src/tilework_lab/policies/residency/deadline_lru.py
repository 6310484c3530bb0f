"""Earliest deadline first among the requests that can be on time, loads included; then shortest load first."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.core.interfaces import DeviceView, JobView
from tilework.core.time import s_from_ns
from tilework_lab.policies.residency.to_the_end import Choice, Moment, OneToTheEnd


class DeadlineLeastRecentlyUsed(OneToTheEnd):
    """The request with the earliest deadline of those that would be on time if they began now goes first.

    Each is tried on the free device that loads least for it: its load and its run must end by the deadline. If none can
    be on time, the one with the shortest load goes first, the older of equals; so do requests without a deadline.

    Source: "deadline-aware + shortest load" of our reference simulation of GenTD26 (lab/docs/workloads.md), which does
    not say how it orders those that can be on time. Of six orders that we tried (deadline, slack, load, load and run,
    load and then slack, slack below 30 s and then load), this one is on time most often at loads of .5 and more.
    """

    __slots__ = ()

    def choose(self, moment: Moment, waiting: Sequence[JobView], idle: Sequence[DeviceView]) -> Choice | None:
        tried = [(*moment.least_load(job, idle), job) for job in waiting]
        in_time: list[tuple[int, int, JobView, DeviceView]] = []
        for load_ns, device, job in tried:
            deadline_ns = job.request.deadline_ns
            if deadline_ns is not None and moment.now_ns + load_ns + job.demand.run_ns <= deadline_ns:
                in_time.append((deadline_ns, load_ns, job, device))
        if in_time:
            _, load_ns, job, device = min(in_time, key=lambda option: option[0])
            return job, device, f"is due first of those that can be on time, and loads {s_from_ns(load_ns):.1f} s"
        load_ns, device, job = min(tried, key=lambda option: option[0])
        return job, device, f"no request can be on time; this one loads least, {s_from_ns(load_ns):.1f} s"
