"""Measurements from the history of a run: its own cost table, and the gaps between works."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, median

from tilework.control.history import History
from tilework.core.component import LoadSource
from tilework.core.cost_row import Batch, CostRow
from tilework.core.time import s_from_ns
from tilework.cost.rows import ShapeKey, batch_key
from tilework.cost.table import CostTable


def profiled_table(history: History) -> CostTable:
    """Return the cost table that a run measured: median seconds per stage, batch and degree.

    Requests without guidance do not count, nor works with LoRAs or a cache. Stages and batches that did not run keep
    their rows of the table that the run started from; sources without loads keep their speeds.
    """
    requests = {past.job_id: past.request for past in history.requests}
    seconds: dict[tuple[str, str, Batch, int], list[float]] = {}
    for past in history.works:
        members = [requests[job_id] for job_id in past.work.job_ids if job_id in requests]
        is_whole = len(members) == len(past.work.job_ids) and all(member.guided for member in members)
        if is_whole and past.run_ns is not None and not (past.work.stage.loras or past.work.stage.caches):
            batch = tuple(sorted(member.shape for member in members))
            place = (members[0].pipeline, past.work.stage.name, batch, len(past.work.devices))
            seconds.setdefault(place, []).append(s_from_ns(past.run_ns) / past.steps)
    rows = tuple(
        CostRow.of(batch, pipeline=pipeline, stage=stage, degree=degree, seconds=median(values))
        for (pipeline, stage, batch, degree), values in sorted(seconds.items())
    )
    measured = {_profiled(row) for row in rows}
    kept = tuple(row for row in history.header.table.rows if _profiled(row) not in measured)
    speeds = {**history.header.table.load_bytes_per_s, **_load_speeds(history)}
    return replace(history.header.table, rows=rows + kept, load_bytes_per_s=speeds)


def _load_speeds(history: History) -> dict[LoadSource, float]:
    """Return the bytes per second of all loads from a source together, by source."""
    speeds: dict[LoadSource, float] = {}
    for source in {past.load.source for past in history.loads}:
        loads = [past for past in history.loads if past.load.source is source]
        total_ns = sum(past.end_ns - past.start_ns for past in loads)
        speeds[source] = sum(past.load.num_bytes for past in loads) / s_from_ns(max(1, total_ns))
    return speeds


def _profiled(row: CostRow) -> tuple[str, str, int, tuple[ShapeKey, ...] | int]:
    """Return the key of a row in a table; rows with equal keys would be averaged."""
    members = batch_key(row.shapes) if row.batch != 1 else row.shape.pixels
    return row.pipeline, row.stage, row.degree, members


def dispatch_ns(history: History) -> dict[int, int]:
    """Return the mean gap between a work and the last of the works after which it was queued, by degree.

    The largest hundredth of each degree's gaps is left out, since the machine may have been busy otherwise. Degrees
    without queued works are not listed.
    """
    ends = {past.work.work_id: past.end_ns for past in history.works}
    gaps: dict[int, list[int]] = {}
    for past in history.works:
        if past.work.after and past.run_ns is not None and ends.keys() >= set(past.work.after):
            gap_ns = past.start_ns - max(ends[before] for before in past.work.after)
            gaps.setdefault(len(past.work.devices), []).append(gap_ns)
    return {degree: max(0, round(_trimmed_mean(values))) for degree, values in sorted(gaps.items())}


def _trimmed_mean(values: list[int]) -> float:
    """Return the mean of all but the largest hundredth; of fewer than a hundred values, of all."""
    return fmean(sorted(values)[: len(values) - len(values) // 100])
