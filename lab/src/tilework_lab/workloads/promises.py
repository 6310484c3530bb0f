"""Deadlines from tight to loose, some of which promises can keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilework.core.time import s_from_ns
from tilework.cost.degrees import fastest_latency_ns
from tilework.sim.workloads.family import Item, costs_of, parameter, stream
from tilework_lab.workloads.tetriserve import TetriServe


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises(TetriServe):
    """TetriServe's images with deadlines that are drawn evenly from `least` to `most` times the best latency.

    A share of them has no deadline. The costs are those of TetriServe, `speed` times as fast, as if the model were
    compiled; with `last`, a decode takes as long as that number of steps on one device. All requests are best effort:
    `tilework compare --promises` asks for promises. All of it is ours.
    """

    name: ClassVar[str] = "promises"
    source: ClassVar[str] = "ours"
    about: ClassVar[str] = "deadlines from tight to loose, for compare --promises"

    rate_per_s: float = parameter(0.7, "Requests per second on average.", above=0)
    num_requests: int = parameter(250, "Number of requests.", least=1)
    steps: int = parameter(28, "Denoising steps.", least=1)
    speed: float = parameter(1.5, "Speed of the devices, as a multiple of the table's.", above=0)
    last: float = parameter(0.0, "Time of the decode, in steps.", least=0)
    least: float = parameter(1.4, "Shortest deadline over the best latency.", above=0)
    most: float = parameter(4.5, "Longest deadline over the best latency.", above=0)
    no_deadline: float = parameter(0.1, "Share of requests without a deadline.", least=0, most=1)

    def __post_init__(self) -> None:
        TetriServe.__post_init__(self)  # Dataclasses with slots know no super().
        if self.most < self.least:
            raise self.refuse("most", f"use at least {self.least:g}, or a smaller least")

    @property
    def cost_table(self) -> str:
        return f"{self.table},speed={self.speed:g}" + (f",last={self.last:g}" if self.last else "")

    def slos_s(self, items: Sequence[Item], seed: int) -> Iterable[float | None]:
        whether, how = stream(seed, "no deadline"), stream(seed, "deadlines")
        for item in items:
            slo_s = how.uniform(self.least, self.most) * self._best_s(item)
            yield None if whether.random() < self.no_deadline else slo_s

    def _best_s(self, item: Item) -> float:
        return s_from_ns(fastest_latency_ns(costs_of(self.cost_table), *item))
