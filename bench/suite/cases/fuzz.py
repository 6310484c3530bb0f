"""Whether an invariant is violated in many simulated scenarios with faults."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field

from suite.case import Check, Finding, Note, Table
from suite.stats import exact
from tilework.sim.faults import FAULTS
from tilework.sim.fuzz import Choice, ScenarioResult, run_seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzz:
    """`num_seeds` scenarios from `first` on; each seed chooses cluster, policy, workload and faults."""

    num_seeds: int = 20_000
    first: int = 0
    least_events: int = 5_000_000
    num_processes: int = field(default_factory=lambda: os.cpu_count() or 1)

    @classmethod
    def make(cls, quick: bool) -> Fuzz:
        return cls(num_seeds=40, least_events=5_000) if quick else cls()

    def measure(self, note: Note) -> Finding:
        started_s = time.monotonic()
        fault_counts, endings, num_events, bad = Counter[str](), Counter[str](), 0, list[ScenarioResult]()
        seeds = range(self.first, self.first + self.num_seeds)
        for number, verdict in enumerate(run_seeds(seeds, Choice(), self.num_processes), start=1):
            fault_counts.update(verdict.fault_counts)
            endings.update(verdict.endings)
            num_events += verdict.num_events
            bad += [verdict] if verdict.violation else []
            if number % 100 == 0:
                note(f"{number} of {self.num_seeds} scenarios, {num_events} events, {len(bad)} violations")
        seconds = time.monotonic() - started_s
        checks = (
            Check(what="violated invariants", measured=exact(len(bad)), high=0.0),
            Check(what="events", measured=exact(num_events), low=self.least_events),
        )
        struck = tuple((name, FAULTS[name].text, str(fault_counts[name])) for name in FAULTS)
        failed = tuple((str(one.seed), one.where, one.violation) for one in bad[:20])
        return Finding(
            checks=checks,
            method=(
                "Simulated: the controller that serves, on simulated devices in virtual time, as in `tilework fuzz`.",
                "After every event the invariants of `sim/invariants.py` are checked, and more at the end.",
            ),
            facts={
                "scenarios": self.num_seeds,
                "events per second": round(num_events / seconds),
                "requests": dict(endings.most_common()),
            },
            tables=(
                Table(title="Faults", columns=("fault", "what happens", "times"), rows=struck),
                *([Table(title="Violations", columns=("seed", "where", "what"), rows=failed)] if failed else []),
            ),
        )
