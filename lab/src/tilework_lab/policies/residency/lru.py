"""Shortest load first, with the least recently used weights dropped: what a cache of models does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilework.core.interfaces import DeviceView, JobView
from tilework.core.time import NS_PER_S, s_from_ns
from tilework_lab.policies.residency.to_the_end import Choice, Moment, OneToTheEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastRecentlyUsed(OneToTheEnd):
    """The request that some free device can begin with the shortest load goes first, the older of equals.

    One that has waited `patience_ns` goes before all that have not, the oldest first, to the device that loads least.

    Source: "LRU + shortest load first (300 s patience)" of our reference simulation of GenTD26 (lab/docs/workloads.md).
    """

    patience_ns: int = 300 * NS_PER_S

    def choose(self, moment: Moment, waiting: Sequence[JobView], idle: Sequence[DeviceView]) -> Choice | None:
        first = waiting[0]
        if moment.now_ns - first.request.arrival_ns >= self.patience_ns:
            return first, moment.least_load(first, idle)[1], "has waited longer than any should"
        options = [(*moment.least_load(job, idle), job) for job in waiting]
        load_ns, device, job = min(options, key=lambda option: option[0])
        return job, device, f"loads least, {s_from_ns(load_ns):.1f} s"
