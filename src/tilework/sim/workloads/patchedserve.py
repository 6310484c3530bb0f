"""PatchedServe's workload: many small pictures with loose deadlines, one device each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilework.core.request import Shape
from tilework.core.shares import dealt
from tilework.sim.workloads.family import Item, RatedFamily, steps_of, stream, table_of
from tilework.sim.workloads.parameters import parameter

SIDES = {"low": 512, "medium": 768, "high": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedServe(RatedFamily):
    """PatchedServe §8: Stable Diffusion 3, 50 steps, 512, 768 and 1024 px; deadlines 5 times the latency alone.

    `equal` has equally many of each size; under `low`, `medium` and `high` that size is half of the requests (its
    workflow study, 3.2 per second on 8 H100, which is our default rate, too).

    Ours: the number of requests. Its SDXL workload (8.8 per second) is missing: it lives on batches, whose cost is in
    figures only.
    """

    name: ClassVar[str] = "patchedserve"
    source: ClassVar[str] = "PatchedServe §8"
    about: ClassVar[str] = "pictures of three sizes with loose deadlines"
    table: ClassVar[str] = "sd3_h100"
    num_gpus: ClassVar[int] = 8

    rate_per_s: float = parameter(3.2, "Requests per second on average.", above=0)
    num_requests: int = parameter(1000, "How many requests.", least=1)
    mix: str = parameter("equal", "Equal shares, or the size that has half.", choices=("equal", *SIDES))

    def items(self, arrivals_s: Sequence[float], seed: int) -> Iterable[Item]:
        steps = steps_of(self.table)
        shares = {
            Item("sd3", Shape(side, side), steps): 2.0 if name == self.mix else 1.0 for name, side in SIDES.items()
        }
        return dealt(shares, len(arrivals_s), stream(seed, "items"))

    def slo_s(self, item: Item) -> float:
        return table_of(self.table).slo_s[str(item.shape)]
