"""The geometry of a timeline's bars: where each work lies, with which colour and label. Draws nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from tilework.formats.json_lines import RequestId
from tilework.report.chart import Chart, ChartRequest, ChartWork
from tilework.report.palette import Rgb, darker, request_colours

WIDTH_INCHES = 15.0
PLOT_SHARE = 0.88  # Of the width, without labels and busy shares; exact enough to decide what fits.
_HATCHES, LOST_HATCH = ("....", "////", "\\\\\\\\", "oo", "++"), "xxxx"
BAR_HEIGHT = 0.8

Corners = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What all parts of the drawing share. `rows` maps a device to its row from the top.

    `hatches` are the patterns of stages without steps.
    """

    rows: dict[int, int]
    start_s: float
    end_s: float
    requests: dict[RequestId, ChartRequest]
    colours: dict[RequestId, Rgb]
    hatches: dict[str, str]
    starts_s: dict[RequestId, float]

    def inches(self, work: ChartWork) -> float:
        """The width of a work on paper."""
        return (work.end_s - work.start_s) / max(self.end_s - self.start_s, 1e-9) * WIDTH_INCHES * PLOT_SHARE


def hatches(chart: Chart) -> dict[str, str]:
    """A pattern for each stage without steps, in the order in which they first ran."""
    others = dict.fromkeys(work.stage for work in sorted(chart.works, key=lambda work: work.start_s) if not work.steps)
    return dict(zip(others, cycle(_HATCHES), strict=False))


def lay_out(chart: Chart) -> Layout:
    starts_s: dict[RequestId, float] = {}
    for work in chart.works:
        for request in work.requests:
            starts_s.setdefault(request, work.start_s)
    if not chart.works:
        starts_s = {request.id: request.arrival_s for request in chart.requests}
    shapes = {request.id: request.shape for request in chart.requests if request.shape is not None}
    devices = {device_id for work in chart.works for device_id in work.devices} | set(chart.nodes)
    return Layout(
        rows={device_id: row for row, device_id in enumerate(sorted(devices))},
        start_s=chart.start_s,
        end_s=chart.end_s,
        requests={request.id: request for request in chart.requests},
        colours=request_colours([request.id for request in chart.requests], shapes),
        hatches=hatches(chart),
        starts_s=starts_s,
    )


def late_edges(works: Iterable[ChartWork], layout: Layout) -> list[Corners]:
    """Thin strips along the bottom of works, for the time after the deadline of their request."""
    strips: list[Corners] = []
    for work in works:
        for place, request in enumerate(work.requests):
            deadline_s = layout.requests[request].deadline_s
            if deadline_s is not None and work.end_s > deadline_s:
                late = replace(work, start_s=max(work.start_s, deadline_s))
                for corners in corners_of(late, layout):
                    _, _, (right, bottom), (left, _) = _stripe(corners, place, len(work.requests))
                    top = bottom - 0.1 / len(work.requests)
                    strips.append(((left, top), (right, top), (right, bottom), (left, bottom)))
    return strips


def bars(work: ChartWork, layout: Layout) -> list[tuple[Corners, Rgb]]:
    """A rectangle and its colour for each unbroken run of a work's devices; one stripe per request that shares it."""
    return [
        (_stripe(corners, place, len(work.requests)), bar_colour(work, request, layout))
        for corners in corners_of(work, layout)
        for place, request in enumerate(work.requests)
    ]


def _stripe(corners: Corners, place: int, num_stripes: int) -> Corners:
    """A rectangle's stripe number `place` of `num_stripes`, from the top."""
    (left, top), _, (right, bottom), _ = corners
    tall = (bottom - top) / num_stripes
    top, bottom = top + place * tall, top + (place + 1) * tall
    return (left, top), (right, top), (right, bottom), (left, bottom)


def corners_of(work: ChartWork, layout: Layout) -> list[Corners]:
    """The rectangle of each unbroken run of the work's devices; first and third corner are opposite."""
    spans = _row_runs(sorted(layout.rows[device_id] for device_id in work.devices))
    edges = [(first - BAR_HEIGHT / 2, last + BAR_HEIGHT / 2) for first, last in spans]
    left, right = work.start_s, work.end_s
    return [((left, top), (right, top), (right, bottom), (left, bottom)) for top, bottom in edges]


def outline(work: ChartWork, layout: Layout) -> float:
    return 0.6 if layout.inches(work) >= 0.06 else 0.0


def label_of(work: ChartWork, inches: float) -> str:
    """The request and, below it, its steps, as far as they fit into a bar of this width."""
    if not work.steps or work.lost:
        return ""
    name = ",".join(str(request)[:6] for request in work.requests)
    steps = f"x{work.steps}"
    if inches < 0.06 * len(name) + 0.04:
        return ""
    return f"{name}\n{steps}" if inches >= 0.06 * len(steps) + 0.04 else name


def bar_colour(work: ChartWork, request: RequestId, layout: Layout) -> Rgb:
    colour = layout.colours[request]
    return colour if work.steps else darker(colour)


def _row_runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of each unbroken run of sorted rows. A run has one bar, so that a wide work looks wide."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], row)
        else:
            runs.append((row, row))
    return runs
