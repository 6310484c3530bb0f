"""DDiT's workload: videos of three sizes, without deadlines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilework.core.request import Shape
from tilework.core.shares import dealt
from tilework.sim.workloads.family import Item, RatedFamily, parameter, steps_of, stream, table_of

SHAPES = (Shape(144, 256, 51), Shape(240, 426, 51), Shape(360, 640, 51))
MIXES = ("1:1:1", "2:1:1", "1:2:1", "1:1:2", "4:1:1", "1:4:1", "1:1:4", "2:2:1", "2:1:2", "1:2:2")


@dataclass(frozen=True, slots=True, kw_only=True)
class DDiT(RatedFamily):
    """DDiT §6.1: videos of 144p, 240p and 360p, 51 frames, 30 steps, at 0.25 to 1 per second, or all at once.

    Without deadlines: the paper measures mean and p99 latency. Its burst is `arrivals=at_once`.

    Ours: the proportions, which are in its figures only; the number of requests; and `deadlines`, which are those of
    the cost table, 2.5 times the latency at the optimal degree.
    """

    name: ClassVar[str] = "ddit"
    source: ClassVar[str] = "DDiT §6.1"
    about: ClassVar[str] = "videos of three sizes without deadlines"
    table: ClassVar[str] = "opensora_h800"
    num_devices: ClassVar[int] = 8

    rate_per_s: float = parameter(0.5, "Requests per second on average; the paper has 0.25 to 1.", above=0)
    num_requests: int = parameter(200, "Number of requests.", least=1)
    mix: str = parameter("1:1:1", "144p to 240p to 360p.", choices=MIXES)
    deadlines: bool = parameter(False, "Whether requests have those of the cost table.")

    def items(self, arrivals_s: Sequence[float], seed: int) -> Iterable[Item]:
        items = [Item("opensora", shape, steps_of(self.table)) for shape in SHAPES]
        shares = dict(zip(items, map(float, self.mix.split(":")), strict=True))
        return dealt(shares, len(arrivals_s), stream(seed, "items"))

    def slo_s(self, item: Item) -> float | None:
        return table_of(self.table).slo_s[str(item.shape)] if self.deadlines else None
