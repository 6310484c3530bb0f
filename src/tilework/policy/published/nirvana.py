"""NIRVANA with ORCA's batches: requests of one size together, first come, first served."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.interfaces import CostModel
from tilework.core.request import Request
from tilework.policy.registry import policy
from tilework.policy.toolkit.continuous_batching import Batching, Choice, Crowd, together
from tilework.policy.toolkit.order import by_urgency


@policy("nirvana")
@dataclass(slots=True, kw_only=True)
class Nirvana(Batching):
    """The oldest request of a device makes steps, together with the oldest others of its size.

    Source: PatchedServe §8, which adds ORCA's batches to NIRVANA (Agarwal et al., NSDI 2024); ORCA (Yu et al., OSDI
    2022) schedules each iteration first come, first served. Requests of another size pause meanwhile.

    NIRVANA begins a picture at a later step of a similar one that it drew before, which saves 21% of the steps on
    average. A policy cannot do that: here all steps are made, which is to its disadvantage. For workloads whose
    requests have fewer steps, see `skipped` of `patchedserve-sdxl` and `patchedserve-sd3`.
    """

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return request.arrival_ns

    def choose(self, crowd: Crowd, costs: CostModel, begin_ns: int) -> Choice:
        everybody = sorted(crowd.begun + crowd.waiting, key=by_urgency)
        shape = everybody[0].request.shape
        return Choice(together((job for job in everybody if job.request.shape == shape), costs))
