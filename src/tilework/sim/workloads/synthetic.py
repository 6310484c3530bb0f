"""Our own workloads: images beside videos, and a few huge images among many small ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilework.core.request import Shape
from tilework.core.shares import dealt
from tilework.core.time import s_from_ns
from tilework.cost.degrees import least_device_ns
from tilework.sim.workloads.family import Item, RatedFamily, costs_of, parameter, steps_of, stream, table_of

IMAGES = tuple(Item("flux.1", Shape(side, side), 4) for side in (512, 1024, 1536, 2048))
VIDEOS = tuple(Item("hunyuanvideo", Shape(544, 960, frames), 6) for frames in (17, 33, 65))


@dataclass(frozen=True, slots=True, kw_only=True)
class CoServing(RatedFamily):
    """Images with deadlines of seconds beside videos that hold devices for minutes, after GENSERVE (2604.04335).

    A share of the requests are videos; images and videos are each equally often of every size, and their deadlines
    are 2.5 times the latency at the optimal degree (TridentServe's rule).

    All but the idea is ours: we have neither the paper's models nor its figures. The devices are L20, whose tables of
    FLUX.1 and HunyuanVideo are joined.
    """

    name: ClassVar[str] = "coserving"
    source: ClassVar[str] = "ours, after GENSERVE"
    about: ClassVar[str] = "images and videos side by side"
    table: ClassVar[str] = "flux1_l20+hunyuanvideo_l20"
    num_devices: ClassVar[int] = 16

    rate_per_s: float = parameter(0.5, "Requests per second on average.", above=0)
    videos: float = parameter(0.2, "Share of videos.", least=0, most=1)
    slo_factor: float = parameter(2.5, "Deadline over the latency at the optimal degree.", above=0)

    def items(self, arrivals_s: Sequence[float], seed: int) -> Iterable[Item]:
        shares = dict.fromkeys(IMAGES, (1 - self.videos) / len(IMAGES))
        shares |= dict.fromkeys(VIDEOS, self.videos / len(VIDEOS))
        return dealt(shares, len(arrivals_s), stream(seed, "items"))

    def slo_s(self, item: Item) -> float:
        return self.slo_factor * self.optimal_s(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyTail(RatedFamily):
    """Device times of a Pareto distribution: an image of 4096 px takes 440 times as long as most.

    Each request draws its device time, at least that of the smallest size, and gets the largest size that takes no
    more. Deadlines are 2.5 times the latency at the optimal degree. Small requests behind a huge one are the test: a
    policy must neither let them wait for it nor starve it.

    All of it is ours; sizes and costs are those of TridentServe's FLUX.1.
    """

    name: ClassVar[str] = "heavy-tail"
    source: ClassVar[str] = "ours"
    about: ClassVar[str] = "a few huge images among many small ones"
    table: ClassVar[str] = "flux1_l20"
    num_devices: ClassVar[int] = 16

    rate_per_s: float = parameter(1.0, "Requests per second on average.", above=0)
    num_requests: int = parameter(500, "Number of requests.", least=1)
    tail: float = parameter(0.6, "Exponent of the Pareto distribution; the smaller, the heavier.", above=0)
    slo_factor: float = parameter(2.5, "Deadline over the latency at the optimal degree.", above=0)

    def items(self, arrivals_s: Sequence[float], seed: int) -> Iterable[Item]:
        rng = stream(seed, "items")
        sizes = self._sizes()
        least_s = sizes[0][0]
        for _ in arrivals_s:
            drawn_s = least_s * rng.paretovariate(self.tail)
            yield max((size for size in sizes if size[0] <= drawn_s), key=lambda size: size[0])[1]

    def slo_s(self, item: Item) -> float:
        return self.slo_factor * self.optimal_s(item)

    def _sizes(self) -> list[tuple[float, Item]]:
        """Return every size of the table with its least device time, smallest first."""
        table = table_of(self.table)
        costs = costs_of(self.table)
        shapes = {row.shape for row in table.rows}
        items = [Item("flux.1", shape, steps_of(self.table)) for shape in shapes]
        return sorted((s_from_ns(least_device_ns(costs, *item)), item) for item in items)
