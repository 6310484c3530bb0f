"""The panel of a timeline that shows requests: from arrival to end, when the work began, and how it ended."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilework.report.palette import BAD, Rgb

OWN_ROW_LIMIT, DENSE = 60, 500
WAITING = "#C4C7C5"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBar:
    """One request; `mark` is the marker at its end, the marker's colour, and what they mean."""

    name: str
    arrival_s: float
    start_s: float
    finish_s: float
    deadline_s: float | None
    colour: Rgb | str
    mark: tuple[str, str, str]


def pack(spans: Sequence[tuple[float, float]]) -> list[int]:
    """The lane of each span: the lowest one that is free from its start on. Lanes are as few as overlaps allow.

    Spans are in order of start; one that starts where another ends may follow it in its lane.
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes = []
    for start, end in spans:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes


def draw_requests(axes: Any, bars: Sequence[RequestBar]) -> None:
    """One line per request: faint while it waits, in its colour from its first work to its end, red within when late.

    Up to OWN_ROW_LIMIT requests have a row each, with name and deadline. More share lanes, so that the height of the
    panel is the number of requests in flight, the lowest lane first.
    """
    bars = sorted(bars, key=lambda bar: (bar.arrival_s, bar.name))
    shared = len(bars) > OWN_ROW_LIMIT
    spans = [(bar.arrival_s, bar.finish_s) for bar in bars]
    rows = [lane + 1 for lane in pack(spans)] if shared else list(range(len(bars)))
    starts_s, ends_s = [bar.start_s for bar in bars], [bar.finish_s for bar in bars]
    axes.hlines(rows, [bar.arrival_s for bar in bars], starts_s, color=WAITING, linewidth=0.8 if shared else 1.2)
    axes.hlines(rows, starts_s, ends_s, color=[bar.colour for bar in bars], linewidth=1.8 if shared else 3.5, zorder=2)
    overdue = [
        (row, max(bar.deadline_s, bar.arrival_s), bar.finish_s)
        for bar, row in zip(bars, rows, strict=True)
        if bar.deadline_s is not None and bar.finish_s > bar.deadline_s
    ]
    if overdue:
        axes.hlines(*zip(*overdue, strict=True), color=BAD, linewidth=0.9 if shared else 1.4, zorder=2.5)
    for mark in dict.fromkeys(bar.mark for bar in bars):
        marker, ink, _ = mark
        at = [(bar.finish_s, row) for bar, row in zip(bars, rows, strict=True) if bar.mark == mark]
        size, edge = (5.5, 1.6) if not shared else (3, 0.8) if len(bars) <= DENSE else (2, 0.6)
        above = 4 if ink == BAD else 3  # Bad ends are drawn over good ones.
        axes.plot(*zip(*at, strict=True), marker, color=ink, markersize=size, markeredgewidth=edge, zorder=above)
    if shared:
        axes.set_ylabel("requests in flight")
        axes.set_ylim(0, max(rows) + 0.6)
    else:
        due = [(bar.deadline_s, row) for bar, row in zip(bars, rows, strict=True) if bar.deadline_s is not None]
        for deadline_s, row in due:
            axes.plot(deadline_s, row, "|", color="black", markersize=8, zorder=3)
        axes.set_yticks(rows, [bar.name[:8] for bar in bars], fontsize=7)
        axes.set_ylabel("requests")
        axes.set_ylim(len(bars) - 0.4, -0.6)
