"""Traces, records and summaries of a comparison, made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from builders import request
from tilework.core.request import Request, Status
from tilework.core.time import ns_from_s
from tilework.sim.runs import Run
from tilework.sim.trace import Trace, TraceEnding
from tilework.sim.workloads.cells import Cell
from tilework_lab.compare.figures import figures_of
from tilework_lab.compare.records import BoundFigures, Record
from tilework_lab.compare.summary import CellSummary, summary_of
from tilework_lab.workloads.tetriserve import TetriServe


def ended(asked: Request, finish_s: float, status: Status = Status.DONE) -> TraceEnding:
    return TraceEnding(request=asked, status=status, finish_ns=ns_from_s(finish_s), job_id=0, eta_ns=None, reason="")


def trace(*endings: TraceEnding, runs: tuple[Run, ...] = (), num_events: int = 0) -> Trace:
    return Trace(runs=runs, endings=endings, num_events=num_events)


def record_of(on_time: float, due: int = 100, mean_s: float = 1.0) -> Record:
    """A run in which so many were on time, or one without deadlines."""
    blank = figures_of(trace(ended(request("a"), 1.0)))
    figures = replace(blank, num_requests=100, num_due=due, num_on_time=round(on_time), mean_s=mean_s)
    return Record(config={}, result=figures)


def summary(counts: dict[str, list[float]], bounds: list[float] | None = None, **more: Any) -> CellSummary:
    cell = more.pop("cell", Cell(name="c", workload=TetriServe(), table="flux1dev_h100_eager", num_devices=8))
    records = {policy: [record_of(count, **more) for count in values] for policy, values in counts.items()}
    num_seeds = max(map(len, counts.values()))
    found = bounds or [None] * num_seeds
    known = [None if one is None else BoundFigures(num_due=100, most_on_time=one, wall_s=0.0) for one in found]
    return summary_of(cell, records, known, {})
