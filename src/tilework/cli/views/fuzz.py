"""What `tilework fuzz` prints: the faults there are, and what scenarios came to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from tilework.cli.console import out, print_json
from tilework.sim.faults import FAULTS
from tilework.sim.fuzz import ScenarioResult


@dataclass(slots=True, kw_only=True)
class Tally:
    """The verdicts so far, added up. `bad` has those with a violation."""

    num_seeds: int = 0
    num_events: int = 0
    seconds: float = 0.0
    fault_counts: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    num_promised: int = 0
    num_kept: int = 0
    bad: list[ScenarioResult] = field(default_factory=list)

    def add(self, verdict: ScenarioResult) -> None:
        self.num_seeds += 1
        self.num_events += verdict.num_events
        self.fault_counts.update(verdict.fault_counts)
        self.endings.update(verdict.endings)
        self.num_promised += verdict.num_promised
        self.num_kept += verdict.num_kept
        if verdict.violation:
            self.bad.append(verdict)

    def document(self, commands: list[str]) -> dict[str, Any]:
        """The tally as plain JSON, with the commands that run the violations again."""
        return {
            "simulated": True,
            "seeds": self.num_seeds,
            "events": self.num_events,
            "seconds": round(self.seconds, 3),
            "requests": self.endings,
            "promises": {"accepted": self.num_promised, "kept": self.num_kept},
            "faults": self.fault_counts,
            "violations": [{"seed": bad.seed, "where": bad.where, "violation": bad.violation} for bad in self.bad],
            "commands": commands,
        }


def print_tally(tally: Tally) -> None:
    """How requests ended, how many promises were kept, and how often each fault happened, a line each."""
    for title, counts in (("requests", tally.endings), ("faults", tally.fault_counts)):
        if counts:
            listed = ", ".join(f"{number} {name}" for name, number in counts.most_common())
            out.print(f"{title}: {listed}", soft_wrap=True)
        if title == "requests" and tally.num_promised:
            out.print(f"promises: {tally.num_kept} of {tally.num_promised} kept")


def print_many(tally: Tally, first: int, failures: list[tuple[ScenarioResult, str]]) -> None:
    """What many seeds came to; `failures` are violations that were made smaller, with the commands to run them."""
    rate = f"{tally.num_events / max(tally.seconds, 1e-9):.0f} per second"
    last = first + tally.num_seeds - 1
    out.print(f"seeds {first} to {last}: {tally.num_events} events in {tally.seconds:.0f} s ({rate})")
    print_tally(tally)
    if not tally.bad:
        out.print("No invariant was violated.")
        return
    out.print(f"[red]{len(tally.bad)} scenarios fail[/red]: {', '.join(str(bad.seed) for bad in tally.bad[:20])}")
    for verdict, command in failures:
        out.print(f"{verdict.where}: {verdict.violation}", markup=False, soft_wrap=True)
        out.print(f"  {command}", markup=False, soft_wrap=True)


def print_faults(json: bool) -> None:
    """The faults by name, with their meaning, unit and defaults."""
    if json:
        print_json(
            {
                name: {
                    "text": fault.text,
                    "per": fault.per,
                    "size": fault.size,
                    "default": [fault.probability, fault.usual_size],
                }
                for name, fault in FAULTS.items()
            }
        )
        return
    table = Table("fault", "what happens", "probability per", "size", "default")
    for name, fault in FAULTS.items():
        table.add_row(name, fault.text, fault.per, fault.size, f"{fault.probability:g}:{fault.usual_size:g}")
    out.print(table)
