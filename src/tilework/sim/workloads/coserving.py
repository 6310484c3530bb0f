"""Pictures and videos on the same devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilework.core.request import Shape
from tilework.core.shares import dealt
from tilework.sim.workloads.family import Item, RatedFamily, stream
from tilework.sim.workloads.parameters import parameter

IMAGES = tuple(Item("flux.1", Shape(side, side), 4) for side in (512, 1024, 1536, 2048))
VIDEOS = tuple(Item("hunyuanvideo", Shape(544, 960, frames), 6) for frames in (17, 33, 65))


@dataclass(frozen=True, slots=True, kw_only=True)
class CoServing(RatedFamily):
    """Pictures with deadlines of seconds beside videos that hold devices for minutes, after GENSERVE (2604.04335).

    A share of the requests are videos; pictures and videos are each equally often of every size, and their deadlines
    are 2.5 times the latency at the optimal degree (TridentServe's rule).

    All but the idea is ours: we have neither the paper's models nor its figures. The devices are L20, whose tables of
    FLUX.1 and HunyuanVideo are joined.
    """

    name: ClassVar[str] = "coserving"
    source: ClassVar[str] = "ours, after GENSERVE"
    about: ClassVar[str] = "pictures and videos side by side"
    table: ClassVar[str] = "flux1_l20+hunyuanvideo_l20"
    num_devices: ClassVar[int] = 16

    rate_per_s: float = parameter(0.5, "Requests per second on average.", above=0)
    videos: float = parameter(0.2, "The share of videos.", least=0, most=1)
    slo_factor: float = parameter(2.5, "Deadline over the latency at the optimal degree.", above=0)

    def items(self, arrivals_s: Sequence[float], seed: int) -> Iterable[Item]:
        shares = dict.fromkeys(IMAGES, (1 - self.videos) / len(IMAGES))
        shares |= dict.fromkeys(VIDEOS, self.videos / len(VIDEOS))
        return dealt(shares, len(arrivals_s), stream(seed, "items"))

    def slo_s(self, item: Item) -> float:
        return self.slo_factor * self.optimal_s(item)
