"""PatchedServe's batches without its scheduler: first come, first served."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.interfaces import CostModel
from tilework.core.request import Request
from tilework.policy.registry import policy
from tilework.policy.toolkit.continuous_batching import Batching, Choice, Crowd, together


@policy("mixed-cache")
@dataclass(slots=True, kw_only=True)
class MixedCache(Batching):
    """Whoever has waited longest joins the batch of its device as soon as that has room; sizes do not matter.

    Deadlines, weights and tenants are ignored.

    Source: PatchedServe §8, Mixed-Cache. Its cache of patches is not modelled.
    """

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return request.arrival_ns

    def choose(self, crowd: Crowd, costs: CostModel, begin_ns: int) -> Choice:
        return Choice(together(crowd.begun + crowd.waiting, costs))
