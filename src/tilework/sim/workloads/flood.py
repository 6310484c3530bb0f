"""A few deadlines in a flood of requests without any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilework.sim.workloads.family import Item, stream
from tilework.sim.workloads.parameters import parameter
from tilework.sim.workloads.tetriserve import TetriServe


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood(TetriServe):
    """More best-effort work than the devices can do, and one request in ten with TetriServe's deadline.

    The deadlines alone are a light load: all can be kept by a policy that starts best effort only on devices that no
    urgent request will need. The best-effort requests must still make progress. All of it is ours.
    """

    name: ClassVar[str] = "flood"
    source: ClassVar[str] = "ours"
    about: ClassVar[str] = "few deadlines in a flood of best effort"

    rate_per_s: float = parameter(1.5, "Requests per second on average.", above=0)
    urgent: float = parameter(0.1, "The share of requests with a deadline.", least=0, most=1)

    def slos_s(self, items: Sequence[Item], seed: int) -> Iterable[float | None]:
        rng = stream(seed, "deadlines")
        return [self.slo_s(item) if rng.random() < self.urgent else None for item in items]
