"""A wide urgent request right after all devices have begun long narrow ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilework.core.time import s_from_ns
from tilework.cost.degrees import latency_ns
from tilework.formats.workload import WorkloadRequest
from tilework.sim.workloads.family import WorkloadFamily, costs_of, numbered, parameter, request_of, scaled, stream
from tilework_lab.workloads.tetriserve import square

WIDEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WideAfterNarrow(WorkloadFamily):
    """Cycles of narrow long requests (1024 px, 40 steps), as many as devices, and then one of 2048 px in a hurry.

    The wide request can be on time only on all eight devices, and only if they are freed at once: its deadline is its
    latency there plus `margin`. The narrow ones can wait for it: their deadline is twice their latency on one device.
    A policy that does not preempt loses the wide one; one that preempts without need loses the others. All of it is
    ours.
    """

    name: ClassVar[str] = "wide-after-narrow"
    source: ClassVar[str] = "ours"
    about: ClassVar[str] = "a wide urgent image right after long narrow ones"
    table: ClassVar[str] = "flux1dev_h100_eager"
    num_devices: ClassVar[int] = 8

    cycles: int = parameter(20, "Number of cycles.", least=1)
    period_s: float = parameter(20.0, "Seconds from one cycle to the next.", above=0)
    narrow: int = parameter(8, "Narrow requests per cycle.", least=0)
    delay_s: float = parameter(1.0, "Most seconds between them and the wide one.", least=0)
    margin: float = parameter(0.15, "Time to spare, as a share of the wide one's fastest latency.", above=0)

    def requests(self, seed: int) -> tuple[WorkloadRequest, ...]:
        rng = stream(seed, "arrivals")
        costs = costs_of(self.table)
        narrow, wide = square(1024, steps=40), square(2048)
        narrow_s = 2 * s_from_ns(latency_ns(costs, *narrow, 1))
        wide_s = (1 + self.margin) * s_from_ns(latency_ns(costs, *wide, WIDEST))
        made = []
        for cycle in range(self.cycles):
            at_s = cycle * self.period_s
            made += [request_of(at_s, narrow, scaled(narrow_s, self.scale)) for _ in range(self.narrow)]
            made.append(request_of(at_s + rng.random() * self.delay_s, wide, scaled(wide_s, self.scale)))
        return numbered(made)
