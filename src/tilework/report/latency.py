"""A chart of latencies: how many images came within how long, by size, and over the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilework.report.palette import BAD, GOOD, NEUTRAL, class_hues, show_grid, size_classes
from tilework.report.tables import DONE, Served

WIDTH_INCHES, HEIGHT_INCHES = 13.0, 5.2


def draw_latency(path: Path | str, records: Sequence[Served], *, title: str = "") -> None:
    """Write a PNG of two panels: the share of requests answered within a time, and latency by arrival.

    On the left one line per size class, of all its requests: one that got no image never counts as answered, so its
    line ends below 100%; deadlines are ticks on the axis. On the right one mark per request; those without an image
    stand at the time at which that was known.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError("there are no requests whose latency to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1))
    FigureCanvasAgg(figure)
    shares, course = figure.subplots(1, 2)
    figure.suptitle(title or "Latency", x=0.01, ha="left", fontsize=13, fontweight="bold")
    _draw_shares(shares, records)
    _draw_course(course, records)
    figure.savefig(path)


def _draw_shares(axes: Any, records: Sequence[Served]) -> None:
    shapes = [record.shape for record in records]
    classes, hues = size_classes(shapes), class_hues(shapes)
    longest_s = max((_seconds(record) for record in records), default=0.0)
    for name, hue in hues.items():
        members = [record for record in records if classes[record.shape] == name]
        times_s = sorted(_seconds(record) for record in members if record.status == DONE)
        share = len(times_s) / len(members)
        heights = [0.0, *((index + 1) / len(members) for index in range(len(times_s))), share]
        axes.step([0.0, *times_s, longest_s], heights, where="post", color=hue, linewidth=2, label=name)
        for slo_s in {record.slo_s for record in members if record.slo_s is not None}:
            axes.plot(slo_s, 0, "|", color=hue, markersize=16, markeredgewidth=2, clip_on=False)
    axes.set(xlabel="seconds from the planned arrival (ticks below: deadlines)", ylabel="answered within")
    axes.set(ylim=(0, 1.01), xlim=(0, None))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    show_grid(axes)


def _draw_course(axes: Any, records: Sequence[Served]) -> None:
    groups = {
        "on time": (GOOD, "o", [r for r in records if r.status == DONE and r.on_time is True]),
        "done (no deadline)": (NEUTRAL, "D", [r for r in records if r.status == DONE and r.on_time is None]),
        "late": (BAD, "x", [r for r in records if r.status == DONE and r.on_time is False]),
        "not served": (BAD, "s", [r for r in records if r.status != DONE]),
    }
    for name, (colour, marker, members) in groups.items():
        if members:
            arrivals_s, times_s = [r.arrival_s for r in members], [_seconds(r) for r in members]
            axes.plot(arrivals_s, times_s, marker, color=colour, markersize=4, alpha=0.7, linestyle="", label=name)
    axes.set(xlabel="planned arrival in seconds", ylabel="latency in seconds", ylim=(0, None))
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    show_grid(axes)


def _seconds(record: Served) -> float:
    return record.latency_s or 0.0
