"""A few deadlines in a flood of requests without any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilework.core.time import s_from_ns
from tilework.cost.degrees import fastest_latency_ns
from tilework.sim.workloads.family import Item, costs_of, parameter, stream
from tilework_lab.workloads.tetriserve import TetriServe


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood(TetriServe):
    """More best-effort work than the devices can do, and one request in ten with TetriServe's deadline.

    The deadlines alone are a light load: all can be kept by a policy that starts best effort only on devices that no
    urgent request will need. The best-effort requests must still make progress. All of it is ours.

    With a `slo_factor` near 1 a deadline is kept only if the fastest group is free at once.
    """

    name: ClassVar[str] = "flood"
    source: ClassVar[str] = "ours"
    about: ClassVar[str] = "few deadlines in a flood of best effort"

    rate_per_s: float = parameter(1.5, "Requests per second on average.", above=0)
    urgent: float = parameter(0.1, "Share of requests with a deadline.", least=0, most=1)
    slo_factor: float | None = parameter(
        None, "Deadline over the latency at the fastest degree, instead of TetriServe's.", type_=float, above=0
    )

    def slo_s(self, item: Item) -> float:
        if self.slo_factor is None:
            return TetriServe.slo_s(self, item)  # Dataclasses with slots know no super().
        return self.slo_factor * s_from_ns(fastest_latency_ns(costs_of(self.table), *item))

    def slos_s(self, items: Sequence[Item], seed: int) -> Iterable[float | None]:
        rng = stream(seed, "deadlines")
        return [self.slo_s(item) if rng.random() < self.urgent else None for item in items]
