"""The published figures, remade in simulation: a case for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from suite.case import Finding, Note, Picture

from figures import (
    ddit,
    onepiece,
    patchedserve,
    patchedserve_steps,
    tetriserve,
    tridentserve,
    tridentserve_placement,
)
from figures.cached_runs import CachedRuns, RemadeFigure
from tilework_lab.compare.records import Records

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
class Paper:
    """One figure. `out`: where each run is kept as soon as it is done, with those of `tilework compare --out`; "" for
    nowhere. A folder in the checkout: results show the configuration, and should name no folder of a machine.

    `requests` None leaves each workload's own number; `brief` leaves out most points of every sweep.
    """

    figure: str
    seeds: int = 2
    processes: int = 2
    out: str = "out/papers"
    requests: int | None = None
    brief: bool = False

    def measure(self, note: Note) -> Finding:
        cached = CachedRuns(
            records=Records(_CHECKOUT / self.out / "results.jsonl" if self.out else None),
            num_seeds=self.seeds,
            num_processes=self.processes,
            note=note,
            num_requests=self.requests,
            brief=self.brief,
        )
        remade = FIGURES[self.figure](cached)
        return Finding(
            checks=remade.checks,
            method=(
                "Simulated by the cost tables that ship, with the controller that serves; lab/docs/reproduction.md "
                "says what these tables rest on.",
                "A check is what the paper says of its figure; a miss is a difference to the paper.",
                "Values are means over the seeds. Intervals: extremes over seeds, or over the points of a sweep.",
            ),
            tables=remade.tables,
            pictures=(Picture(name="figure", png=remade.png),),
        )


@dataclass(frozen=True, slots=True)
class PaperMaker:
    """Makes the case of one figure."""

    figure: str

    def make(self, quick: bool) -> Paper:
        if quick:
            return Paper(figure=self.figure, seeds=1, processes=1, out="", requests=24, brief=True)
        return Paper(figure=self.figure)
