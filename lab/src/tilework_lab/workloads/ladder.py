"""Each request more urgent than all before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilework.formats.workload import WorkloadRequest
from tilework.sim.workloads.family import WorkloadFamily, numbered, parameter, request_of, scaled, stream
from tilework_lab.workloads.tetriserve import square


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder(WorkloadFamily):
    """Runs of 1024 px requests, each with an earlier deadline than the one before it.

    The last of a run is due `last_s` after its arrival, the one before it `rung_s` later, and so on. A policy that
    always runs the nearest deadline preempts at every arrival, and pays for each change. All of it is ours.
    """

    name: ClassVar[str] = "ladder"
    source: ClassVar[str] = "ours"
    about: ClassVar[str] = "each image more urgent than all before it"
    table: ClassVar[str] = "flux1dev_h100_eager"
    num_devices: ClassVar[int] = 8

    runs: int = parameter(20, "Number of runs.", least=1)
    length: int = parameter(12, "Requests per run.", least=1)
    period_s: float = parameter(12.0, "Seconds from one run to the next.", above=0)
    gap_s: float = parameter(0.2, "Between the requests of a run, on average.", above=0)
    rung_s: float = parameter(0.3, "Between their deadlines.", least=0)
    last_s: float = parameter(3.0, "Deadline of the last, in seconds.", above=0)

    def requests(self, seed: int) -> tuple[WorkloadRequest, ...]:
        rng = stream(seed, "arrivals")
        item = square(1024)
        made = []
        for run in range(self.runs):
            gaps_s = [rng.uniform(0.5, 1.5) * self.gap_s for _ in range(self.length)]
            arrivals_s = [run * self.period_s + sum(gaps_s[:place]) for place in range(self.length)]
            for place, at_s in enumerate(arrivals_s):
                above = self.length - 1 - place
                slo_s = arrivals_s[-1] - at_s + self.last_s + above * self.rung_s
                made.append(request_of(at_s, item, scaled(slo_s, self.scale)))
        return numbered(made)
