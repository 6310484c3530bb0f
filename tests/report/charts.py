"""Charts by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batching import batching  # noqa: F401
from tilework.core.request import Shape
from tilework.report.chart import Chart, ChartRequest, ChartWork


def small(**changes: Any) -> Chart:
    """Two works of one late request and one of another that has no deadline."""
    late = ChartRequest(
        id="late", arrival_s=0.0, finish_s=4.0, status="done", shape=Shape(64, 64), deadline_s=2.0, on_time=False
    )
    free = ChartRequest(id="free", arrival_s=0.5, finish_s=2.0, status="done", shape=Shape(96, 96))
    works = (
        ChartWork(work=0, stage="diffuse", requests=("late",), devices=(0,), start_s=0.0, end_s=1.0, steps=5),
        ChartWork(work=1, stage="diffuse", requests=("free",), devices=(1,), start_s=1.0, end_s=2.0, steps=5),
        ChartWork(work=2, stage="diffuse", requests=("late",), devices=(0, 1), start_s=2.0, end_s=4.0, steps=5),
    )
    return replace(Chart(works=works, requests=(late, free), nodes={0: 0, 1: 0}), **changes)
