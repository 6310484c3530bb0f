"""The baselines of PatchedServe §8: NIRVANA, Mixed-Cache and DistriFusion."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.policy import CostModel
from tilework.policy.published.fixed import FixedDegree
from tilework.policy.toolkit.continuous_batching import BatchChoice, ContinuousBatching, DeviceQueue, first_batch
from tilework.policy.toolkit.order import ArrivalOrdered, by_urgency


@dataclass(slots=True, kw_only=True)
class Nirvana(ArrivalOrdered, ContinuousBatching):
    """The oldest request of a device makes steps, together with the oldest others of its size.

    Source: PatchedServe §8, which adds ORCA's batches to NIRVANA (Agarwal et al., NSDI 2024); ORCA (Yu et al., OSDI
    2022) schedules each iteration first come, first served. Requests of other sizes pause during that.

    Departure: NIRVANA begins an image at a later step of a similar one that it drew before, which saves 21% of the
    steps on average. A policy cannot do that, so all steps are made here, which is to its disadvantage. For workloads
    whose requests have fewer steps, see `skipped` of `patchedserve-sdxl` and `patchedserve-sd3`.
    """

    def choose(self, queue: DeviceQueue, costs: CostModel, begin_ns: int) -> BatchChoice:
        jobs = sorted(queue.jobs, key=by_urgency)
        shape = jobs[0].request.shape
        return BatchChoice(first_batch((job for job in jobs if job.request.shape == shape), costs))


@dataclass(slots=True, kw_only=True)
class MixedCache(ArrivalOrdered, ContinuousBatching):
    """The request that has waited longest joins the batch of its device as soon as there is room, whatever its size.

    Deadlines, weights and tenants are ignored.

    Source: PatchedServe §8, Mixed-Cache. Its cache of patches is that of the requests, if they have one, and saves what
    the cost table says.
    """

    def choose(self, queue: DeviceQueue, costs: CostModel, begin_ns: int) -> BatchChoice:
        return BatchChoice(first_batch(queue.jobs, costs))


def distrifusion() -> FixedDegree:
    """Build DistriFusion: each request alone on eight devices, or on those that its node has, first come, first served.

    As a schedule this is `fixed-sp8`. DistriFusion's own part, displaced patches, is in the cost table, as step times
    at each degree, as far as they are known. It does not batch.

    Source: PatchedServe §8, §8.2; DistriFusion (Li et al., CVPR 2024).
    """
    return FixedDegree(degree=8)
