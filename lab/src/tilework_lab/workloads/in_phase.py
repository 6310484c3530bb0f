"""Bursts that come just after a round has been decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilework.formats.workload import WorkloadRequest
from tilework.sim.workloads.family import WorkloadFamily, numbered, parameter, request_of, scaled, stream, table_of
from tilework_lab.workloads.tetriserve import SIDES, square


@dataclass(frozen=True, slots=True, kw_only=True)
class InPhase(WorkloadFamily):
    """Bursts of TetriServe's images, a whole number of rounds apart, each `offset_s` after a round's beginning.

    A policy that decides at fixed times makes each of these requests wait for nearly a whole round. All of it is ours.
    """

    name: ClassVar[str] = "in-phase"
    source: ClassVar[str] = "ours"
    about: ClassVar[str] = "bursts just after a round has been decided"
    table: ClassVar[str] = "flux1dev_h100_eager"
    num_devices: ClassVar[int] = 8

    round_s: float = parameter(1.0, "Length of a round, in seconds.", above=0)
    rounds: int = parameter(12, "From one burst to the next.", least=1)
    offset_s: float = parameter(0.001, "Seconds after the beginning of a round.", least=0)
    bursts: int = parameter(30, "Number of bursts.", least=1)
    size: int = parameter(4, "Requests per burst; their sizes are drawn.", least=1)

    def requests(self, seed: int) -> tuple[WorkloadRequest, ...]:
        rng = stream(seed, "items")
        slos_s = table_of(self.table).slo_s
        made = []
        for burst in range(self.bursts):
            at_s = burst * self.rounds * self.round_s + self.offset_s
            items = [square(rng.choice(SIDES)) for _ in range(self.size)]
            made += [request_of(at_s, item, scaled(slos_s[str(item.shape)], self.scale)) for item in items]
        return numbered(made)
