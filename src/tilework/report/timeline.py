"""Draws a timeline as PNG: what ran on which device and when, and which requests were on time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tilework.core.request import Status
from tilework.report.chart import Chart, ChartRequest, ChartWork, busy_shares
from tilework.report.lanes import OWN_ROW_LIMIT, RequestBar, draw_requests
from tilework.report.palette import BAD, GOOD, NEUTRAL, class_hues, darker, ink_on
from tilework.report.timeline_bars import (
    BAR_HEIGHT,
    LOST_HATCH,
    WIDTH_INCHES,
    Layout,
    bar_colour,
    bars,
    corners_of,
    hatches,
    label_of,
    late_edges,
    lay_out,
    outline,
)

AWAY: dict[str, Any] = {"facecolor": "#DADCE0", "edgecolor": "#9AA0A6", "hatch": "\\\\", "linewidth": 0.0}
LOADING: dict[str, Any] = {"facecolor": "#F1E4C3", "edgecolor": "#9A7B2F", "hatch": "||", "linewidth": 0.0}
PLACED: dict[str, Any] = {"color": "#7A1F6B", "linewidth": 1.2, "linestyle": "--"}
TAG: dict[str, Any] = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
_MOST_COLUMNS, _LEGEND_LETTERS, _HANDLE_LETTERS = 9, 170, 6  # The last: how wide a handle is, in letters.
PLAIN_INCHES = 0.1  # A narrower bar has neither label nor hatch; thousands of them are drawn at once.


def draw_timeline(path: Path | str, chart: Chart, *, title: str = "") -> None:
    """Write a PNG with one row per device and one bar per executed work, coloured by the size of its request.

    Ends of requests, if the chart has any, are drawn in a panel above the devices, see `report.lanes`. A chart that
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


def _draw_devices(axes: Any, chart: Chart, layout: Layout) -> None:
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


def _draw_placements(axes: Any, chart: Chart, layout: Layout) -> None:
    """A line at each change, and above its bars what each device is for from then on, where that is new."""
    style = {"fontsize": 8, "fontweight": "bold", "va": "center", "clip_on": True, "zorder": 5}
    for placement, uses in chart.new_uses():
        axes.axvline(placement.at_s, **PLACED)
        for device_id in uses.keys() & layout.rows.keys():
            place, name = (placement.at_s, layout.rows[device_id] - BAR_HEIGHT / 2), uses[device_id]
            axes.annotate(name, place, (3, 0), textcoords="offset points", color=PLACED["color"], bbox=TAG, **style)


def _draw_work(axes: Any, work: ChartWork, layout: Layout) -> None:
    """A bar over each unbroken run of the work's devices. Hatch and label go where they would hide it."""
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


def _request_bar(request: ChartRequest, layout: Layout) -> RequestBar:
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
    """Marker, colour and meaning of how a request ended; the marker alone is enough to distinguish them."""
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
    """The most columns of a legend, filled one after another, that the figure has room for."""
    for columns in range(min(len(labels), _MOST_COLUMNS), 1, -1):
        ends = [len(labels) * index // columns for index in range(columns + 1)]
        widths = [max(map(len, labels[first:last])) for first, last in pairwise(ends)]
        if sum(widths) + _HANDLE_LETTERS * columns <= _LEGEND_LETTERS:
            return columns
    return 1


def _limits_s(ended: Sequence[ChartRequest], layout: Layout) -> tuple[float, float]:
    """The limits of the time axis: all works, and the last deadlines if they are near."""
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
