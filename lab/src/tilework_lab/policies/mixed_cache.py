"""PatchedServe's batches without its scheduler: first come, first served."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.interfaces import CostModel
from tilework.policy.toolkit.continuous_batching import BatchChoice, ContinuousBatching, DeviceQueue, first_batch
from tilework.policy.toolkit.order import ArrivalOrdered


@dataclass(slots=True, kw_only=True)
class MixedCache(ArrivalOrdered, ContinuousBatching):
    """The request that has waited longest joins the batch of its device as soon as there is room, whatever its size.

    Deadlines, weights and tenants are ignored.

    Source: PatchedServe §8, Mixed-Cache. Its cache of patches is that of the requests, if they have one, and saves what
    the cost table says.
    """

    def choose(self, queue: DeviceQueue, costs: CostModel, begin_ns: int) -> BatchChoice:
        return BatchChoice(first_batch(queue.jobs, costs))
