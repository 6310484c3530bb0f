"""The picture of `tilework compare --promises`: requests as best effort, and with promises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tilework.report.panels import Pair, PairPanel, draw_pairs
from tilework.server.text import counted
from tilework_lab.compare.promises import PromiseCell, PromiseCounts, promise_overall, total

PARTS = {
    "asks, on time": "#0072B2",
    "does not ask, on time": "#56B4E9",
    "promise broken": "#C00000",
    "refused, on time as best effort": "#E69F00",
    "refused, late as best effort": "#F6DDA8",
    "late": "#D5D7DA",
}
_NUM_ON_TIME = 2


def plot_promises(path: Path, cells: Sequence[PromiseCell], asking: float) -> None:
    """Write a PNG with a pair of bars per policy and cell, and one per policy of all cells.

    Raises:
        OSError: the file cannot be written.
    """
    lines = promise_overall(cells)
    panels = []
    if len(cells) > 1:
        overall = tuple(pair_of(one.policy, one.counts) for one in lines)
        panels.append(PairPanel(title=f"all {len(cells)} cells", pairs=overall))
    panels += [
        PairPanel(
            title=cell.cell.name,
            pairs=tuple(pair_of(policy, total(counts)) for policy, counts in cell.policies.items()),
        )
        for cell in cells
    ]
    seeds = counted(max(cell.num_seeds for cell in cells), "seed")
    draw_pairs(
        path,
        panels,
        PARTS,
        num_good=_NUM_ON_TIME,
        title=f"What promises cost: {100 * asking:g}% of the requests with a deadline ask, {seeds}, simulated",
        foot="Upper bar of a pair: all requests as best effort. Lower bar: with promises. Numbers: on time, in %.",
    )


def pair_of(label: str, counts: PromiseCounts) -> Pair:
    """The parts of both runs, in the order of PARTS, as shares of the requests with a deadline."""
    whole, refused_fitting = max(1, counts.num_due), counts.fitting - counts.fitting_accepted
    before = counts.before - counts.others_before, counts.others_before, 0, 0, 0, counts.num_due - counts.before
    after = (
        counts.kept,
        counts.others_after,
        counts.broken,
        refused_fitting,
        counts.refused - refused_fitting,
        counts.others - counts.others_after,
    )
    return Pair(label=label, before=tuple(one / whole for one in before), after=tuple(one / whole for one in after))
