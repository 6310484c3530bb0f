"""The device x time picture: what ran where and when, and which requests were on time, as PNG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilework.core.request import Status
from tilework.core.work import DECODE, ENCODE
from tilework.formats.json_lines import RequestId
from tilework.report.chart import Chart, ChartRequest, ChartWork, busy_shares
from tilework.report.lanes import OWN_ROW_LIMIT, RequestBar, draw_requests
from tilework.report.palette import BAD, GOOD, NEUTRAL, Rgb, class_hues, darker, ink_on, request_colours

WIDTH_INCHES = 15.0
PLOT_SHARE = 0.88  # Of the width, without labels and busy shares; exact enough to judge what fits.
HATCHES, LOST_HATCH = {ENCODE: "....", DECODE: "////"}, "xxxx"
AWAY: dict[str, Any] = {"facecolor": "#DADCE0", "edgecolor": "#9AA0A6", "hatch": "\\\\", "linewidth": 0.0}
BAR_HEIGHT = 0.8
PLAIN_INCHES = 0.1  # A narrower bar has neither label nor hatch; thousands of them are drawn at once.

Corners = tuple[tuple[float, float], ...]


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

    picture = _lay_out(chart)
    heights = [_requests_inches(len(ended))] if ended else []
    heights += [_devices_inches(len(picture.rows))] if chart.works else []
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 1.35), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1))
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    if ended:
        draw_requests(axes[0], [_request_bar(request, picture) for request in ended])
        axes[0].tick_params(labelbottom=False)
        _clean(axes[0])
    if chart.works:
        _draw_devices(axes[-1], chart, picture)
    axes[-1].set_xlim(*_limits_s(ended, picture))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """What all parts of the drawing agree on. `rows` maps a device to its place from the top."""

    rows: dict[int, int]
    start_s: float
    end_s: float
    requests: dict[RequestId, ChartRequest]
    colours: dict[RequestId, Rgb]
    starts_s: dict[RequestId, float]

    def inches(self, work: ChartWork) -> float:
        """How wide the work is on paper."""
        return (work.end_s - work.start_s) / max(self.end_s - self.start_s, 1e-9) * WIDTH_INCHES * PLOT_SHARE


def _lay_out(chart: Chart) -> _Picture:
    starts_s: dict[RequestId, float] = {}
    for work in chart.works:
        for request in work.requests:
            starts_s.setdefault(request, work.start_s)
    if not chart.works:
        starts_s = {request.id: request.arrival_s for request in chart.requests}
    shapes = {request.id: request.shape for request in chart.requests if request.shape is not None}
    devices = {device_id for work in chart.works for device_id in work.devices} | set(chart.nodes)
    return _Picture(
        rows={device_id: row for row, device_id in enumerate(sorted(devices))},
        start_s=chart.start_s,
        end_s=chart.end_s,
        requests={request.id: request for request in chart.requests},
        colours=request_colours([request.id for request in chart.requests], shapes),
        starts_s=starts_s,
    )


def _draw_devices(axes: Any, chart: Chart, picture: _Picture) -> None:
    from matplotlib.collections import PolyCollection

    narrow = [work for work in chart.works if picture.inches(work) < PLAIN_INCHES]
    plain = [(corners, colour, work) for work in narrow for corners, colour in _bars(work, picture)]
    for work in chart.works:
        if picture.inches(work) >= PLAIN_INCHES:
            _draw_work(axes, work, picture)
    axes.add_collection(
        PolyCollection(
            [corners for corners, _, _ in plain],
            facecolors=[colour for _, colour, _ in plain],
            edgecolors="white",
            linewidths=[_outline(work, picture) for _, _, work in plain],
        )
    )
    axes.add_collection(PolyCollection(_late_edges(chart.works, picture), facecolors=BAD, linewidths=0, zorder=3))
    for outage in chart.outages:
        row = picture.rows[outage.device_id]
        axes.fill_betweenx((row - 0.5, row + 0.5), outage.start_s, outage.end_s, **AWAY)
    shares = busy_shares(chart.works, picture.start_s, picture.end_s)
    right = axes.get_yaxis_transform()
    for device_id, row in picture.rows.items():
        axes.text(1.006, row, f"{shares.get(device_id, 0):.0%} busy", transform=right, va="center", fontsize=9)
    axes.set_yticks(list(picture.rows.values()), [f"device {device_id}" for device_id in picture.rows])
    axes.set_ylim(len(picture.rows) - 0.45, -0.55)
    _clean(axes)


def _draw_work(axes: Any, work: ChartWork, picture: _Picture) -> None:
    """A bar over each unbroken run of the work's devices. Hatch and label go where they would hide it."""
    from matplotlib.patches import Polygon

    inches = picture.inches(work)
    hatch = LOST_HATCH if work.lost else HATCHES.get(work.stage)
    for corners, colour in _bars(work, picture):
        bar = Polygon(corners, facecolor=colour, edgecolor="white", linewidth=_outline(work, picture))
        if hatch and inches >= 0.2:
            bar.set_hatch(hatch)
        axes.add_patch(bar)
    ink = ink_on(_bar_colour(work, work.requests[len(work.requests) // 2], picture))
    for corners in _corners(work, picture):
        middle = [(low + high) / 2 for low, high in zip(corners[0], corners[2], strict=True)]
        style = {"ha": "center", "va": "center", "fontsize": 7.5, "linespacing": 1.1, "clip_on": True}
        axes.text(*middle, _label(work, inches), color=ink, **style)


def _late_edges(works: Iterable[ChartWork], picture: _Picture) -> list[Corners]:
    """A thin strip along the bottom of what ran after the deadline of its request."""
    strips: list[Corners] = []
    for work in works:
        for place, request in enumerate(work.requests):
            deadline_s = picture.requests[request].deadline_s
            if deadline_s is not None and work.end_s > deadline_s:
                late = replace(work, start_s=max(work.start_s, deadline_s))
                for corners in _corners(late, picture):
                    _, _, (right, bottom), (left, _) = _stripe(corners, place, len(work.requests))
                    top = bottom - 0.1 / len(work.requests)
                    strips.append(((left, top), (right, top), (right, bottom), (left, bottom)))
    return strips


def _bars(work: ChartWork, picture: _Picture) -> list[tuple[Corners, Rgb]]:
    """Each run of a work's devices, with its colour; of a work that several share, a stripe for each of them."""
    return [
        (_stripe(corners, place, len(work.requests)), _bar_colour(work, request, picture))
        for corners in _corners(work, picture)
        for place, request in enumerate(work.requests)
    ]


def _stripe(corners: Corners, place: int, num_stripes: int) -> Corners:
    """One of so many stripes of a rectangle, from the top."""
    (left, top), _, (right, bottom), _ = corners
    tall = (bottom - top) / num_stripes
    top, bottom = top + place * tall, top + (place + 1) * tall
    return (left, top), (right, top), (right, bottom), (left, bottom)


def _corners(work: ChartWork, picture: _Picture) -> list[Corners]:
    """The rectangle of each unbroken run of the work's devices; first and third corner are opposite."""
    spans = _row_runs(sorted(picture.rows[device_id] for device_id in work.devices))
    edges = [(first - BAR_HEIGHT / 2, last + BAR_HEIGHT / 2) for first, last in spans]
    left, right = work.start_s, work.end_s
    return [((left, top), (right, top), (right, bottom), (left, bottom)) for top, bottom in edges]


def _outline(work: ChartWork, picture: _Picture) -> float:
    return 0.6 if picture.inches(work) >= 0.06 else 0.0


def _label(work: ChartWork, inches: float) -> str:
    """The request and, below it, its steps, as far as they fit into a bar of this width."""
    if work.stage in HATCHES or work.lost:
        return ""
    name = ",".join(str(request)[:6] for request in work.requests)
    steps = f"x{work.steps}"
    if inches < 0.06 * len(name) + 0.04:
        return ""
    return f"{name}\n{steps}" if inches >= 0.06 * len(steps) + 0.04 else name


def _request_bar(request: ChartRequest, picture: _Picture) -> RequestBar:
    assert request.finish_s is not None, "only requests that ended are drawn"
    start_s = picture.starts_s.get(request.id, request.finish_s)
    return RequestBar(
        name=str(request.id),
        arrival_s=request.arrival_s,
        start_s=min(start_s, request.finish_s),
        finish_s=request.finish_s,
        deadline_s=request.deadline_s,
        colour=darker(picture.colours[request.id], 0.1),
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
    stages = {work.stage for work in chart.works}
    patterns = [(f"{stage} (darker)", hatch) for stage, hatch in HATCHES.items() if stage in stages]
    patterns += [("lost", LOST_HATCH)] if any(work.lost for work in chart.works) else []
    handles += [Patch(facecolor="#6B6E72", edgecolor="white", hatch=hatch, label=name) for name, hatch in patterns]
    if any(len(work.requests) > 1 for work in chart.works):
        handles.append(Line2D([], [], color="none", label="stripes: shared by several"))
    if chart.outages:
        handles.append(Patch(**AWAY, label="device lost"))
    marks = dict.fromkeys(_mark(request) for request in ended)
    handles += [Line2D([], [], marker=m, color=ink, linestyle="", label=text) for m, ink, text in sorted(marks)]
    slacks_s = [request.slack_s for request in ended if request.slack_s is not None]
    if slacks_s and len(ended) <= OWN_ROW_LIMIT:
        handles.append(Line2D([], [], marker="|", color="black", linestyle="", label="deadline"))
    if any(slack_s < 0 for slack_s in slacks_s):
        handles.append(Line2D([], [], color=BAD, linewidth=2, label="after its deadline"))
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(len(handles), 9), frameon=False, fontsize=9
        )


def _bar_colour(work: ChartWork, request: RequestId, picture: _Picture) -> Rgb:
    colour = picture.colours[request]
    return darker(colour) if work.stage in HATCHES else colour


def _row_runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted rows as (first, last) of each unbroken run: one bar per run, so that a wide work looks wide."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], row)
        else:
            runs.append((row, row))
    return runs


def _limits_s(ended: Sequence[ChartRequest], picture: _Picture) -> tuple[float, float]:
    """What the time axis shows: everything that ran, and the last deadlines if they are not far off."""
    length_s = picture.end_s - picture.start_s
    last_s = max([picture.end_s, *(request.deadline_s for request in ended if request.deadline_s is not None)])
    return picture.start_s - 0.004 * length_s, min(last_s, picture.end_s + 0.12 * length_s) + 0.006 * length_s


def _requests_inches(num_requests: int) -> float:
    return min(5.0, 0.4 + 0.145 * num_requests)


def _devices_inches(num_rows: int) -> float:
    return max(1.2, 0.62 * num_rows)


def _clean(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#E3E3E3", linewidth=0.7)
    axes.set_axisbelow(True)
