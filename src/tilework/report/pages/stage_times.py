"""How long the runs of each stage took, over the time that was measured for them before: a sentence and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """The median of runs, over the measured time; `is_off`: it is off by more than half, and the runs are not too few
    to say it.
    """

    model: str
    stage: str
    num_runs: int
    ratio: float
    is_off: bool


def stage_times_sentence(times: Sequence[StageTime]) -> str:
    """Whether runs took as long as measured, and which differ the most."""
    off = [one for one in times if one.is_off]
    if not off:
        return "runs took about as long as measured"
    longer, shorter = (any((one.ratio > 1) is is_longer for one in off) for is_longer in (True, False))
    what = "another time than" if longer and shorter else "longer than" if longer else "less time than"
    most = max(off, key=lambda one: abs(log(one.ratio)))
    return (
        f"runs took {what} measured: {len(off)} of {len(times)} stages by more than half, {most.stage} of {most.model} "
        f"{most.ratio:.2g} times as long. Other work has probably disturbed them, or the measuring, and deadlines are "
        "missed by that; run it again when the machine is idle"
    )


def stage_times_table(times: Sequence[StageTime]) -> str:
    """A table of all of them in HTML if any is off, else nothing."""
    if not any(one.is_off for one in times):
        return ""
    rows = ["<tr><th>model</th><th>stage</th><th>runs</th><th>time, over measured</th></tr>", *map(_row, times)]
    return "\n".join(["<table>", *rows, "</table>"])


def _row(one: StageTime) -> str:
    cells = (one.model, one.stage, str(one.num_runs), f"{one.ratio:.2g}")
    marked = ' class="bad"' if one.is_off else ""
    return f"<tr{marked}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
