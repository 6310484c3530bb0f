"""Many requests that cannot be on time, before those that can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilework.core.time import s_from_ns
from tilework.cost.degrees import fastest_latency_ns
from tilework.sim.workloads.family import Item, costs_of, parameter, stream
from tilework_lab.workloads.tetriserve import TetriServe


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable(TetriServe):
    """TetriServe's images, of which a share cannot be on time even alone, at the fastest degree.

    Their deadlines are a random part of that fastest latency, between `least` and 0.95; `scale` does not change them.
    A policy that serves the nearest deadline first gives them all devices, and has none left for the requests that
    could still be on time. All of it is ours.
    """

    name: ClassVar[str] = "unreachable"
    source: ClassVar[str] = "ours"
    about: ClassVar[str] = "half of the deadlines cannot be met even alone"

    rate_per_s: float = parameter(0.3, "Requests per second on average.", above=0)
    share: float = parameter(0.5, "Share of requests whose deadline cannot be met.", least=0, most=1)
    least: float = parameter(0.3, "Shortest such deadline over the fastest latency.", above=0, most=0.95)

    def slos_s(self, items: Sequence[Item], seed: int) -> Iterable[float | None]:
        whether, how = stream(seed, "unreachable"), stream(seed, "deadlines")
        for item in items:
            part = how.uniform(self.least, 0.95)
            yield part * self._fastest_s(item) / self.scale if whether.random() < self.share else self.slo_s(item)

    def _fastest_s(self, item: Item) -> float:
        return s_from_ns(fastest_latency_ns(costs_of(self.table), *item))
