"""PatchedServe's workloads: many small images with loose deadlines, which gain from batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilework.core.request import Shape
from tilework.core.shares import dealt
from tilework.sim.workloads.family import Item, RatedFamily, parameter, steps_of, stream, table_of

SIDES = {"low": 512, "medium": 768, "high": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedServe(RatedFamily):
    """PatchedServe §8: 50 steps, 512, 768 and 1024 px; deadlines 5 times the latency alone; Poisson arrivals.

    `equal` has equally many of each size; under `low`, `medium` and `high` that size is half of the requests. The
    default rate is that of its workflow study on 8 H100.

    Ours: the number of requests; and `skipped`, for systems that begin an image from a stored step of a similar
    one (NIRVANA saves 21% of its steps so): how many steps a request skips is drawn evenly from none to twice
    that share. Deadlines stay.
    """

    pipeline: ClassVar[str]
    source: ClassVar[str] = "PatchedServe §8"
    num_devices: ClassVar[int] = 8

    num_requests: int = parameter(1000, "Number of requests.", least=1)
    mix: str = parameter("equal", "Equal shares, or the size that has half.", choices=("equal", *SIDES))
    skipped: float = parameter(0.0, "Share of the steps that are skipped, on average.", least=0, most=0.45)

    def items(self, arrivals_s: Sequence[float], seed: int) -> Iterable[Item]:
        steps = steps_of(self.table)
        rng = stream(seed, "skipped")
        shares = {
            Item(self.pipeline, Shape(side, side), steps): 2.0 if name == self.mix else 1.0
            for name, side in SIDES.items()
        }
        most = round(2 * self.skipped * steps)
        for item in dealt(shares, len(arrivals_s), stream(seed, "items")):
            yield item._replace(steps=steps - rng.randint(0, most))

    def slo_s(self, item: Item) -> float:
        return table_of(self.table).slo_s[str(item.shape)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedServeSd3(PatchedServe):
    """Stable Diffusion 3: 3.2 per second."""

    name: ClassVar[str] = "patchedserve-sd3"
    about: ClassVar[str] = "images of three sizes with loose deadlines"
    table: ClassVar[str] = "sd3_h100"
    pipeline: ClassVar[str] = "sd3"

    rate_per_s: float = parameter(3.2, "Requests per second on average.", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedServeSdxl(PatchedServe):
    """Stable Diffusion XL: 8.8 per second."""

    name: ClassVar[str] = "patchedserve-sdxl"
    about: ClassVar[str] = "images of three sizes; batches gain more than with sd3"
    table: ClassVar[str] = "sdxl_h100"
    pipeline: ClassVar[str] = "sdxl"

    rate_per_s: float = parameter(8.8, "Requests per second on average.", above=0)
