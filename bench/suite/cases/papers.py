"""The published figures, remade in simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from suite.case import Finding, Note, Picture
from suite.papers import (
    ddit,
    onepiece,
    patchedserve,
    patchedserve_steps,
    tetriserve,
    tridentserve,
    tridentserve_placement,
)
from suite.papers.cached_runs import CachedRuns, RemadeFigure
from tilework.sim.compare.records import Records

FIGURES: dict[str, Callable[[CachedRuns], RemadeFigure]] = {
    **tetriserve.FIGURES,
    **ddit.FIGURES,
    **patchedserve_steps.FIGURES,
    **patchedserve.FIGURES,
    **tridentserve.FIGURES,
    **tridentserve_placement.FIGURES,
    **onepiece.FIGURES,
}
_CHECKOUT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Papers:
    """`out`: where each run is kept as soon as it is done, with those of `tilework compare --out`; "" for nowhere. A
    folder in the checkout: results show the configuration, and should name no folder of a machine.

    `requests` None leaves each workload's own number; `brief` leaves out most points of every sweep.
    """

    figures: tuple[str, ...] = tuple(FIGURES)
    seeds: int = 2
    processes: int = 2
    out: str = "out/papers"
    requests: int | None = None
    brief: bool = False

    @classmethod
    def make(cls, quick: bool) -> Papers:
        return cls(seeds=1, processes=1, out="", requests=24, brief=True) if quick else cls()

    def measure(self, note: Note) -> Finding:
        cached = CachedRuns(
            records=Records(_CHECKOUT / self.out / "results.jsonl" if self.out else None),
            num_seeds=self.seeds,
            num_processes=self.processes,
            note=note,
            num_requests=self.requests,
            brief=self.brief,
        )
        remade = {}
        for name in self.figures:
            note(name)
            remade[name] = FIGURES[name](cached)
        return Finding(
            checks=tuple(
                replace(check, what=f"{name} {check.what}") for name, one in remade.items() for check in one.checks
            ),
            method=(
                "Simulated by the cost tables that ship, with the controller that serves; docs/reproduction.md tells "
                "what these tables rest on.",
                "A check is what the paper says of its figure; a miss is a difference to the paper.",
                "Values are means over the seeds. Intervals: extremes over seeds, or over the points of a sweep.",
            ),
            tables=tuple(
                replace(table, title=f"{name}: {table.title}") for name, one in remade.items() for table in one.tables
            ),
            pictures=tuple(Picture(name=name, png=one.png) for name, one in remade.items()),
        )
