"""NIRVANA with ORCA's batches: requests of one size together, first come, first served."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.interfaces import CostModel
from tilework.policy.toolkit.continuous_batching import BatchChoice, ContinuousBatching, DeviceQueue, first_batch
from tilework.policy.toolkit.order import ArrivalOrdered, by_urgency


@dataclass(slots=True, kw_only=True)
class Nirvana(ArrivalOrdered, ContinuousBatching):
    """The oldest request of a device makes steps, together with the oldest others of its size.

    Source: PatchedServe §8, which adds ORCA's batches to NIRVANA (Agarwal et al., NSDI 2024); ORCA (Yu et al., OSDI
    2022) schedules each iteration first come, first served. Requests of other sizes pause during that.

    Departure: NIRVANA begins a picture at a later step of a similar one that it drew before, which saves 21% of the
    steps on average. A policy cannot do that, so all steps are made here, which is to its disadvantage. For workloads
    whose requests have fewer steps, see `skipped` of `patchedserve-sdxl` and `patchedserve-sd3`.
    """

    def choose(self, queue: DeviceQueue, costs: CostModel, begin_ns: int) -> BatchChoice:
        jobs = sorted(queue.jobs, key=by_urgency)
        shape = jobs[0].request.shape
        return BatchChoice(first_batch((job for job in jobs if job.request.shape == shape), costs))
