"""A timeline as PNG: what ran on which device and when, and which requests were on time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from tilework.core.request import Status
from tilework.formats.json_lines import RequestId
from tilework.report.chart import Chart, ChartRequest, ChartWork, busy_shares
from tilework.report.palette import BAD, GOOD, NEUTRAL, Rgb, class_hues, darker, ink_on, request_colours

AWAY: dict[str, Any] = {"facecolor": "#DADCE0", "edgecolor": "#9AA0A6", "hatch": "\\\\", "linewidth": 0.0}
LOADING: dict[str, Any] = {"facecolor": "#F1E4C3", "edgecolor": "#9A7B2F", "hatch": "||", "linewidth": 0.0}
PLACED: dict[str, Any] = {"color": "#7A1F6B", "linewidth": 1.2, "linestyle": "--"}
TAG: dict[str, Any] = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
_MOST_COLUMNS = 9
_LEGEND_LETTERS = 170
_HANDLE_LETTERS = 6  # Width of a handle, in letters.
PLAIN_INCHES = 0.1  # A narrower bar has neither label nor hatch; thousands of them are drawn at once.


def draw_timeline(path: Path | str, chart: Chart, *, title: str = "") -> None:
    """Write a PNG with one row per device and one bar per executed work, coloured by the size of its request.

    Ends of requests, if the chart has any, are drawn in a panel above the devices, see `draw_requests`. A chart that
    knows of requests only, not of devices, is drawn as that panel. What ran after its request's deadline has a red
    edge below; what was lost is crossed out; a device that was away is shaded. Labels give way where they do not fit.

    Raises:
        ValueError: the chart has neither works nor ends of requests.
    """
    ended = [request for request in chart.requests if request.finish_s is not None]
    if not chart.works and not ended:
        raise ValueError("there is no work and no end of a request to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = lay_out(chart)
    heights = [_requests_inches(len(ended))] if ended else []
    heights += [_devices_inches(len(layout.rows))] if chart.works else []
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 1.35), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1))
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    if ended:
        draw_requests(axes[0], [_request_bar(request, layout) for request in ended])
        axes[0].tick_params(labelbottom=False)
        _clean(axes[0])
    if chart.works:
        _draw_devices(axes[-1], chart, layout)
    axes[-1].set_xlim(*_limits_s(ended, layout))
    axes[-1].set_xlabel("seconds")
    axes[-1].tick_params(labelbottom=True)
    axes[0].set_title(
        title or ("Devices over time" if chart.works else "Requests over time"),
        loc="left",
        fontsize=13,
        fontweight="bold",
    )
    _draw_legend(figure, chart, ended)
    figure.savefig(path)


def _draw_devices(axes: Any, chart: Chart, layout: ChartLayout) -> None:
    from matplotlib.collections import PolyCollection

    narrow = [work for work in chart.works if layout.inches(work) < PLAIN_INCHES]
    plain = [(corners, colour, work) for work in narrow for corners, colour in bars(work, layout)]
    for work in chart.works:
        if layout.inches(work) >= PLAIN_INCHES:
            _draw_work(axes, work, layout)
    axes.add_collection(
        PolyCollection(
            [corners for corners, _, _ in plain],
            facecolors=[colour for _, colour, _ in plain],
            edgecolors="white",
            linewidths=[outline(work, layout) for _, _, work in plain],
        )
    )
    axes.add_collection(PolyCollection(late_edges(chart.works, layout), facecolors=BAD, linewidths=0, zorder=3))
    for load in chart.loads:
        row = layout.rows[load.device_id]
        top, bottom = row - BAR_HEIGHT / 2, row + BAR_HEIGHT / 2
        if load.is_read_ahead:  # Above its bars, since devices work meanwhile.
            top, bottom = row - 0.5, top
        axes.fill_betweenx((top, bottom), load.start_s, load.end_s, **LOADING)
    for outage in chart.outages:
        row = layout.rows[outage.device_id]
        axes.fill_betweenx((row - 0.5, row + 0.5), outage.start_s, outage.end_s, **AWAY)
    _draw_placements(axes, chart, layout)
    shares = busy_shares(chart.works, layout.start_s, layout.end_s)
    right = axes.get_yaxis_transform()
    for device_id, row in layout.rows.items():
        axes.text(1.006, row, f"{shares.get(device_id, 0):.0%} busy", transform=right, va="center", fontsize=9)
    axes.set_yticks(list(layout.rows.values()), [chart.name_of(device_id) for device_id in layout.rows])
    axes.set_ylim(len(layout.rows) - 0.45, -0.55)
    _clean(axes)


def _draw_placements(axes: Any, chart: Chart, layout: ChartLayout) -> None:
    """Draw a line at each change, and above its bars what each device is for from then on, where that is new."""
    style = {"fontsize": 8, "fontweight": "bold", "va": "center", "clip_on": True, "zorder": 5}
    for placement, uses in chart.new_uses():
        axes.axvline(placement.at_s, **PLACED)
        for device_id in uses.keys() & layout.rows.keys():
            place = (placement.at_s, layout.rows[device_id] - BAR_HEIGHT / 2)
            name = uses[device_id]
            axes.annotate(name, place, (3, 0), textcoords="offset points", color=PLACED["color"], bbox=TAG, **style)


def _draw_work(axes: Any, work: ChartWork, layout: ChartLayout) -> None:
    """Draw a bar over each unbroken run of the work's devices. Hatch and label go where they would hide it."""
    from matplotlib.patches import Polygon

    inches = layout.inches(work)
    hatch = LOST_HATCH if work.lost else None if work.steps else layout.hatches.get(work.stage)
    for corners, colour in bars(work, layout):
        bar = Polygon(corners, facecolor=colour, edgecolor="white", linewidth=outline(work, layout))
        if hatch and inches >= 0.2:
            bar.set_hatch(hatch)
        axes.add_patch(bar)
    ink = ink_on(bar_colour(work, work.requests[len(work.requests) // 2], layout))
    for corners in corners_of(work, layout):
        middle = [(low + high) / 2 for low, high in zip(corners[0], corners[2], strict=True)]
        style = {"ha": "center", "va": "center", "fontsize": 7.5, "linespacing": 1.1, "clip_on": True}
        axes.text(*middle, label_of(work, inches), color=ink, **style)


def _request_bar(request: ChartRequest, layout: ChartLayout) -> RequestBar:
    assert request.finish_s is not None, "only requests that ended are drawn"
    start_s = layout.starts_s.get(request.id, request.finish_s)
    return RequestBar(
        name=str(request.id),
        arrival_s=request.arrival_s,
        start_s=min(start_s, request.finish_s),
        finish_s=request.finish_s,
        deadline_s=request.deadline_s,
        colour=darker(layout.colours[request.id], 0.1),
        mark=_mark(request),
    )


def _mark(request: ChartRequest) -> tuple[str, str, str]:
    """Return marker, colour and meaning of a request's end; the markers alone distinguish the ends."""
    if request.status != Status.DONE:
        return "s", BAD, "not served"
    if request.on_time is None:
        return "D", NEUTRAL, "done (no deadline)"
    return ("o", GOOD, "on time") if request.on_time else ("x", BAD, "late")


def _draw_legend(figure: Any, chart: Chart, ended: Sequence[ChartRequest]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    hues = class_hues(request.shape for request in chart.requests if request.shape is not None)
    handles: list[Any] = [Patch(color=hue, label=name) for name, hue in hues.items()]
    patterns = [(f"{stage} (darker)", hatch) for stage, hatch in hatches(chart).items()]
    patterns += [("lost", LOST_HATCH)] if any(work.lost for work in chart.works) else []
    handles += [Patch(facecolor="#6B6E72", edgecolor="white", hatch=hatch, label=name) for name, hatch in patterns]
    if any(len(work.requests) > 1 for work in chart.works):
        handles.append(Line2D([], [], color="none", label="stripes: shared by several"))
    if chart.outages:
        handles.append(Patch(**AWAY, label="device lost"))
    if chart.loads:
        handles.append(Patch(**LOADING, label="loads weights"))
    if chart.placements:
        handles.append(Line2D([], [], **PLACED, label="devices are for other stages"))
    if any(load.is_read_ahead for load in chart.loads):
        handles.append(Line2D([], [], color=LOADING["edgecolor"], linewidth=3, label="its host reads ahead"))
    marks = dict.fromkeys(_mark(request) for request in ended)
    handles += [Line2D([], [], marker=m, color=ink, linestyle="", label=text) for m, ink, text in sorted(marks)]
    slacks_s = [request.slack_s for request in ended if request.slack_s is not None]
    if slacks_s and len(ended) <= OWN_ROW_LIMIT:
        handles.append(Line2D([], [], marker="|", color="black", linestyle="", label="deadline"))
    if any(slack_s < 0 for slack_s in slacks_s):
        handles.append(Line2D([], [], color=BAD, linewidth=2, label="after its deadline"))
    if handles:
        columns = _num_columns([handle.get_label() for handle in handles])
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _num_columns(labels: Sequence[str]) -> int:
    """Return the most columns of a legend, filled one after another, that the figure has room for."""
    for columns in range(min(len(labels), _MOST_COLUMNS), 1, -1):
        ends = [len(labels) * index // columns for index in range(columns + 1)]
        widths = [max(map(len, labels[first:last])) for first, last in pairwise(ends)]
        if sum(widths) + _HANDLE_LETTERS * columns <= _LEGEND_LETTERS:
            return columns
    return 1


def _limits_s(ended: Sequence[ChartRequest], layout: ChartLayout) -> tuple[float, float]:
    """Return the limits of the time axis: all works, and the last deadlines if they are near."""
    length_s = layout.end_s - layout.start_s
    last_s = max([layout.end_s, *(request.deadline_s for request in ended if request.deadline_s is not None)])
    return layout.start_s - 0.004 * length_s, min(last_s, layout.end_s + 0.12 * length_s) + 0.006 * length_s


def _requests_inches(num_requests: int) -> float:
    return min(5.0, 0.4 + 0.145 * num_requests)


def _devices_inches(num_rows: int) -> float:
    return max(1.2, 0.62 * num_rows)


def _clean(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#E3E3E3", linewidth=0.7)
    axes.set_axisbelow(True)


OWN_ROW_LIMIT = 60
DENSE = 500
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
    """Return the lane of each span: the lowest one that is free from its start on. Lanes are as few as overlaps allow.

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
    """Draw one line per request: faint while it waits, in its colour from its first work to its end, red where late.

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


WIDTH_INCHES = 15.0
PLOT_SHARE = 0.88  # Share of the width without labels and busy shares; exact enough to decide what fits.
_HATCHES = ("....", "////", "\\\\\\\\", "oo", "++")
LOST_HATCH = "xxxx"
BAR_HEIGHT = 0.8

Corners = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLayout:
    """Geometry that all parts of the drawing share. `rows` maps a device to its row from the top.

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
        """Return the width of a work on paper."""
        return (work.end_s - work.start_s) / max(self.end_s - self.start_s, 1e-9) * WIDTH_INCHES * PLOT_SHARE


def hatches(chart: Chart) -> dict[str, str]:
    """Return a pattern for each stage without steps, in the order in which they first ran."""
    others = dict.fromkeys(work.stage for work in sorted(chart.works, key=lambda work: work.start_s) if not work.steps)
    return dict(zip(others, cycle(_HATCHES), strict=False))


def lay_out(chart: Chart) -> ChartLayout:
    starts_s: dict[RequestId, float] = {}
    for work in chart.works:
        for request in work.requests:
            starts_s.setdefault(request, work.start_s)
    if not chart.works:
        starts_s = {request.id: request.arrival_s for request in chart.requests}
    shapes = {request.id: request.shape for request in chart.requests if request.shape is not None}
    devices = {device_id for work in chart.works for device_id in work.devices} | set(chart.nodes)
    return ChartLayout(
        rows={device_id: row for row, device_id in enumerate(sorted(devices))},
        start_s=chart.start_s,
        end_s=chart.end_s,
        requests={request.id: request for request in chart.requests},
        colours=request_colours([request.id for request in chart.requests], shapes),
        hatches=hatches(chart),
        starts_s=starts_s,
    )


def late_edges(works: Iterable[ChartWork], layout: ChartLayout) -> list[Corners]:
    """Return thin strips along the bottom of works, for the time after the deadline of their request."""
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


def bars(work: ChartWork, layout: ChartLayout) -> list[tuple[Corners, Rgb]]:
    """Return a rectangle and its colour for each unbroken run of a work's devices; one stripe per request that shares
    it.
    """
    return [
        (_stripe(corners, place, len(work.requests)), bar_colour(work, request, layout))
        for corners in corners_of(work, layout)
        for place, request in enumerate(work.requests)
    ]


def _stripe(corners: Corners, place: int, num_stripes: int) -> Corners:
    """Return a rectangle's stripe number `place` of `num_stripes`, from the top."""
    (left, top), _, (right, bottom), _ = corners
    tall = (bottom - top) / num_stripes
    top, bottom = top + place * tall, top + (place + 1) * tall
    return (left, top), (right, top), (right, bottom), (left, bottom)


def corners_of(work: ChartWork, layout: ChartLayout) -> list[Corners]:
    """Return the rectangle of each unbroken run of the work's devices; first and third corner are opposite."""
    spans = _row_runs(sorted(layout.rows[device_id] for device_id in work.devices))
    edges = [(first - BAR_HEIGHT / 2, last + BAR_HEIGHT / 2) for first, last in spans]
    left, right = work.start_s, work.end_s
    return [((left, top), (right, top), (right, bottom), (left, bottom)) for top, bottom in edges]


def outline(work: ChartWork, layout: ChartLayout) -> float:
    return 0.6 if layout.inches(work) >= 0.06 else 0.0


def label_of(work: ChartWork, inches: float) -> str:
    """Return the request and, below it, its steps, as far as they fit into a bar of this width."""
    if not work.steps or work.lost:
        return ""
    name = ",".join(str(request)[:6] for request in work.requests)
    steps = f"x{work.steps}"
    if inches < 0.06 * len(name) + 0.04:
        return ""
    return f"{name}\n{steps}" if inches >= 0.06 * len(steps) + 0.04 else name


def bar_colour(work: ChartWork, request: RequestId, layout: ChartLayout) -> Rgb:
    colour = layout.colours[request]
    return colour if work.steps else darker(colour)


def _row_runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, last) of each unbroken run of sorted rows. A run has one bar, so that a wide work looks wide."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], row)
        else:
            runs.append((row, row))
    return runs
