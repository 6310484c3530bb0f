"""The device x time picture of a schedule: who ran where and when, and which requests came out on time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilework.core.request import Status
from tilework.core.work import DECODE, ENCODE
from tilework.core.workload import RequestId, WorkloadRequest, by_id
from tilework.report.lanes import OWN_ROW_LIMIT, RequestBar, draw_requests
from tilework.report.palette import BAD, GOOD, NEUTRAL, Rgb, class_hues, darker, ink_on, request_colours
from tilework.report.schedule import RequestLine, Schedule, WorkLine

WIDTH_INCHES = 15.0
PLOT_SHARE = 0.88  # Of the width, without labels and busy shares; exact enough to judge what fits.
HATCHES = {ENCODE: "....", DECODE: "////"}
BAR_HEIGHT = 0.8
PLAIN_INCHES = 0.1  # A narrower bar has neither label nor hatch; thousands of them are drawn at once.


def busy_shares(works: Iterable[WorkLine], start_s: float, end_s: float) -> dict[int, float]:
    """Share of [start_s, end_s] that each device spent in at least one work, by device."""
    spans: dict[int, list[tuple[float, float]]] = {}
    for work in works:
        for gpu in work.gpus:
            spans.setdefault(gpu, []).append((max(work.start_s, start_s), min(work.end_s, end_s)))
    length_s = end_s - start_s
    return {gpu: _covered_s(sorted(spans[gpu])) / length_s if length_s > 0 else 0.0 for gpu in sorted(spans)}


def draw_timeline(
    path: Path | str,
    schedule: Schedule,
    *,
    workload: Sequence[WorkloadRequest] = (),
    title: str = "",
    num_devices: int | None = None,
) -> None:
    """Write a PNG with one row per device and one bar per executed work.

    `workload` (matched by request id) adds colours by size, arrivals and deadlines; `num_devices` shows idle devices
    that no work names. Ends of requests, if the schedule has any, are drawn in a panel above the devices, see
    `report.lanes`. A schedule that knows of ends only, not of devices, is drawn as that panel.
    Labels give way where they would not fit.

    Raises:
        ValueError: the schedule has neither works nor ends of requests.
    """
    if not schedule.works and not schedule.requests:
        raise ValueError("the schedule has no work and no ends of requests to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    picture = _lay_out(schedule, by_id(workload), num_devices)
    heights = [_requests_inches(len(schedule.requests))] if schedule.requests else []
    heights += [_devices_inches(len(picture.rows))] if schedule.works else []
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 1.35), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1))
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    if schedule.requests:
        draw_requests(axes[0], [_request_bar(line, picture) for line in schedule.requests])
        axes[0].tick_params(labelbottom=False)
        _clean(axes[0])
    if schedule.works:
        _draw_devices(axes[-1], schedule.works, picture)
    axes[-1].set_xlim(*_limits_s(schedule, picture))
    axes[-1].set_xlabel("seconds")
    axes[-1].tick_params(labelbottom=True)
    axes[0].set_title(
        title or ("Devices over time" if schedule.works else "Requests over time"),
        loc="left",
        fontsize=13,
        fontweight="bold",
    )
    _draw_legend(figure, picture, schedule)
    figure.savefig(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """What all parts of the drawing agree on. `rows` maps a device to its place from the top."""

    rows: dict[int, int]
    start_s: float
    end_s: float
    requests: dict[RequestId, WorkloadRequest]
    colours: dict[RequestId, Rgb]
    starts_s: dict[RequestId, float]

    def inches(self, work: WorkLine) -> float:
        """How wide the work is on paper."""
        return (work.end_s - work.start_s) / max(self.end_s - self.start_s, 1e-9) * WIDTH_INCHES * PLOT_SHARE


def _lay_out(schedule: Schedule, requests: dict[RequestId, WorkloadRequest], num_devices: int | None) -> _Picture:
    works = sorted(schedule.works, key=lambda work: (work.start_s, work.work))
    starts_s: dict[RequestId, float] = {}
    for work in works:
        for request in work.requests:
            starts_s.setdefault(request, work.start_s)
    if not works:
        starts_s = {
            line.request: requests[line.request].arrival_s for line in schedule.requests if line.request in requests
        }
    gpus = {gpu for work in works for gpu in work.gpus} | set(range(num_devices or 0))
    ids = [*requests, *(i for i in starts_s if i not in requests)]
    return _Picture(
        rows={gpu: row for row, gpu in enumerate(sorted(gpus))},
        start_s=min([*starts_s.values(), *(requests[i].arrival_s for i in starts_s if i in requests)], default=0.0),
        end_s=max([*(work.end_s for work in works), *(line.finish_s for line in schedule.requests)]),
        requests=requests,
        colours=request_colours(ids, {i: request.shape for i, request in requests.items()}),
        starts_s=starts_s,
    )


def _draw_devices(axes: Any, works: Sequence[WorkLine], picture: _Picture) -> None:
    from matplotlib.collections import PolyCollection

    narrow = [work for work in works if picture.inches(work) < PLAIN_INCHES]
    plain = [(corners, work) for work in narrow for corners in _corners(work, picture)]
    for work in works:
        if picture.inches(work) >= PLAIN_INCHES:
            _draw_work(axes, work, picture)
    axes.add_collection(
        PolyCollection(
            [corners for corners, _ in plain],
            facecolors=[_bar_colour(work, picture) for _, work in plain],
            edgecolors="white",
            linewidths=[_outline(work, picture) for _, work in plain],
        )
    )
    shares = busy_shares(works, picture.start_s, picture.end_s)
    right = axes.get_yaxis_transform()
    for gpu, row in picture.rows.items():
        axes.text(1.006, row, f"{shares.get(gpu, 0):.0%} busy", transform=right, va="center", fontsize=9)
    axes.set_yticks(list(picture.rows.values()), [f"device {gpu}" for gpu in picture.rows])
    axes.set_ylim(len(picture.rows) - 0.45, -0.55)
    _clean(axes)


def _draw_work(axes: Any, work: WorkLine, picture: _Picture) -> None:
    """A bar over each unbroken run of the work's devices. Hatch and label go where they would hide it."""
    from matplotlib.patches import Polygon

    colour = _bar_colour(work, picture)
    inches = picture.inches(work)
    for corners in _corners(work, picture):
        bar = Polygon(corners, facecolor=colour, edgecolor="white", linewidth=_outline(work, picture))
        if work.stage in HATCHES and inches >= 0.2:
            bar.set_hatch(HATCHES[work.stage])
        axes.add_patch(bar)
        middle = [(low + high) / 2 for low, high in zip(corners[0], corners[2], strict=True)]
        style = {"ha": "center", "va": "center", "fontsize": 7.5, "linespacing": 1.1, "clip_on": True}
        axes.text(*middle, _label(work, inches), color=ink_on(colour), **style)


def _corners(work: WorkLine, picture: _Picture) -> list[tuple[tuple[float, float], ...]]:
    """The rectangle of each unbroken run of the work's devices; first and third corner are opposite."""
    spans = _row_runs(sorted(picture.rows[gpu] for gpu in work.gpus))
    edges = [(first - BAR_HEIGHT / 2, last + BAR_HEIGHT / 2) for first, last in spans]
    left, right = work.start_s, work.end_s
    return [((left, top), (right, top), (right, bottom), (left, bottom)) for top, bottom in edges]


def _outline(work: WorkLine, picture: _Picture) -> float:
    return 0.6 if picture.inches(work) >= 0.06 else 0.0


def _label(work: WorkLine, inches: float) -> str:
    """The request and, below it, its steps, as far as they fit into a bar of this width."""
    if work.stage in HATCHES:
        return ""
    name = ",".join(str(request)[:6] for request in work.requests)
    steps = f"x{work.steps}"
    if inches < 0.06 * len(name) + 0.04:
        return ""
    return f"{name}\n{steps}" if inches >= 0.06 * len(steps) + 0.04 else name


def _request_bar(line: RequestLine, picture: _Picture) -> RequestBar:
    request = picture.requests.get(line.request)
    return RequestBar(
        name=str(line.request),
        arrival_s=_arrival_s(line, picture),
        start_s=min(picture.starts_s.get(line.request, line.finish_s), line.finish_s),
        finish_s=line.finish_s,
        deadline_s=None if request is None else request.deadline_s,
        colour=darker(picture.colours[line.request], 0.1) if line.request in picture.colours else NEUTRAL,
        mark=_mark(line),
    )


def _mark(line: RequestLine) -> tuple[str, str, str]:
    """Marker, colour and meaning of how a request ended; the marker alone tells them apart."""
    if line.status != Status.DONE:
        return "s", BAD, "not served"
    if line.on_time is None:
        return "D", NEUTRAL, "done (no deadline)"
    return ("o", GOOD, "on time") if line.on_time else ("x", BAD, "late")


def _draw_legend(figure: Any, picture: _Picture, schedule: Schedule) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    hues = class_hues(request.shape for request in picture.requests.values())
    handles: list[Any] = [Patch(color=hue, label=name) for name, hue in hues.items()]
    stages = {work.stage for work in schedule.works}
    handles += [
        Patch(facecolor="#6B6E72", edgecolor="white", hatch=hatch, label=f"{stage} (darker)")
        for stage, hatch in HATCHES.items()
        if stage in stages
    ]
    marks = dict.fromkeys(_mark(line) for line in schedule.requests)
    handles += [Line2D([], [], marker=m, color=ink, linestyle="", label=text) for m, ink, text in sorted(marks)]
    promised = any(request.deadline_s is not None for request in picture.requests.values())
    if promised and 0 < len(schedule.requests) <= OWN_ROW_LIMIT:
        handles.append(Line2D([], [], marker="|", color="black", linestyle="", label="deadline"))
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(len(handles), 9), frameon=False, fontsize=9
        )


def _bar_colour(work: WorkLine, picture: _Picture) -> Rgb:
    colour = picture.colours[work.requests[0]]
    return darker(colour) if work.stage in HATCHES else colour


def _arrival_s(line: RequestLine, picture: _Picture) -> float:
    request = picture.requests.get(line.request)
    return picture.starts_s.get(line.request, line.finish_s) if request is None else request.arrival_s


def _row_runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted rows as (first, last) of each unbroken run: one bar per run, so that a wide work looks wide."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], row)
        else:
            runs.append((row, row))
    return runs


def _covered_s(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of sorted spans."""
    covered_s, until_s = 0.0, float("-inf")
    for start_s, end_s in spans:
        covered_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return covered_s


def _limits_s(schedule: Schedule, picture: _Picture) -> tuple[float, float]:
    """What the time axis shows: everything that ran, and the last deadlines if they are not far off."""
    length_s = picture.end_s - picture.start_s
    ended = [picture.requests[line.request] for line in schedule.requests if line.request in picture.requests]
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
