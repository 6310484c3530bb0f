"""Deadlines for each of which one degree is right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilework.core.time import s_from_ns
from tilework.cost.degrees import latency_ns, useful_degrees
from tilework.sim.workloads.family import Item, costs_of, parameter, stream
from tilework_lab.workloads.tetriserve import TetriServe


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDegree(TetriServe):
    """TetriServe's images, each with a deadline that one degree just meets if it starts almost at once.

    The degree is drawn among those that are faster than all narrower ones; the deadline is its latency plus `margin`.
    A narrower degree is late; a wider one wastes devices that the next request needs. All of it is ours.
    """

    name: ClassVar[str] = "one-degree"
    source: ClassVar[str] = "ours"
    about: ClassVar[str] = "deadlines that only one number of devices meets"

    rate_per_s: float = parameter(0.15, "Requests per second on average.", above=0)
    margin: float = parameter(0.08, "Time to spare, as a share of the latency at that degree.", above=0, most=10)

    def slos_s(self, items: Sequence[Item], seed: int) -> Iterable[float | None]:
        rng = stream(seed, "deadlines")
        costs = costs_of(self.table)
        for item in items:
            (stage,) = costs.graph(item.pipeline).stepped
            degree = rng.choice(useful_degrees(costs, stage, item.shape))
            yield (1 + self.margin) * s_from_ns(latency_ns(costs, *item, degree))
