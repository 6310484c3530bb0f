"""What work cost in a run, from its history: a cost table of its own, and what passes between two works."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, median

from tilework.control.history import History
from tilework.core.time import s_from_ns
from tilework.core.wire import CostRow
from tilework.cost.rows import Member, members_of
from tilework.cost.table import CostTable


def profiled_table(history: History) -> CostTable:
    """The cost table that this very run measured: median seconds per stage, shape and degree, guided requests that ran
    alone only.

    Stages and shapes that did not run keep the row that the run started from.
    """
    requests = {past.job_id: past.request for past in history.requests}
    seconds: dict[tuple[str, str, int, int, int, int], list[float]] = {}
    for past in history.works:
        request = requests.get(past.work.job_ids[0])
        if request is not None and request.guided and past.run_ns is not None and len(past.work.job_ids) == 1:
            shape, degree = request.shape, len(past.work.gpus)
            key = (request.pipeline, past.work.stage.name, shape.height, shape.width, shape.frames, degree)
            seconds.setdefault(key, []).append(s_from_ns(past.run_ns) / past.steps)
    rows = tuple(
        CostRow(
            pipeline=pipeline,
            stage=stage,
            height=height,
            width=width,
            frames=frames,
            degree=degree,
            seconds=median(values),
        )
        for (pipeline, stage, height, width, frames, degree), values in sorted(seconds.items())
    )
    measured = {_profiled(row) for row in rows}
    kept = tuple(row for row in history.header.table.rows if _profiled(row) not in measured)
    return replace(history.header.table, rows=rows + kept)


def _profiled(row: CostRow) -> tuple[str, str, int, tuple[Member, ...] | int]:
    """What a table tells apart; rows that agree in it would be averaged."""
    members = members_of(row.shapes) if row.batch != 1 else row.shape.pixels
    return row.pipeline, row.stage, row.degree, members


def dispatch_ns(history: History) -> dict[int, int]:
    """Mean gap, by degree, between the last of the works that another was queued behind and that one.

    The largest hundredth of each degree's gaps is left out: a moment in which the machine did something else. Degrees
    without such works are not listed.
    """
    ends = {past.work.work_id: past.end_ns for past in history.works}
    gaps: dict[int, list[int]] = {}
    for past in history.works:
        if past.work.after and past.run_ns is not None and ends.keys() >= set(past.work.after):
            gap_ns = past.start_ns - max(ends[before] for before in past.work.after)
            gaps.setdefault(len(past.work.gpus), []).append(gap_ns)
    return {degree: max(0, round(_trimmed_mean(values))) for degree, values in sorted(gaps.items())}


def _trimmed_mean(values: list[int]) -> float:
    """The mean of all but the largest hundredth; of fewer than a hundred values, of all."""
    return fmean(sorted(values)[: len(values) - len(values) // 100])
