"""The device x time picture of a schedule: who ran where and when, and which requests came out on time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilework.core.request import Status
from tilework.core.work import DECODE, ENCODE
from tilework.core.workload import RequestId, WorkloadRequest, by_id
from tilework.report.palette import Rgb, class_hues, darker, ink_on, request_colours
from tilework.report.schedule import RequestLine, Schedule, WorkLine

WIDTH_INCHES = 15.0
PLOT_SHARE = 0.88  # Of the width, without labels and busy shares; exact enough to judge what fits.
GOOD, BAD, NEUTRAL = "#00664B", "#B3261E", "#5F6368"
HATCHES = {ENCODE: "....", DECODE: "////"}
BAR_HEIGHT = 0.8


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
    that no work names. Ends of requests, if the schedule has any, are drawn in a panel above the devices, one thin
    line per request in order of arrival. Labels give way where they would not fit.

    Raises:
        ValueError: the schedule has no work.
    """
    if not schedule.works:
        raise ValueError("the schedule has no work to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    picture = _lay_out(schedule, by_id(workload), num_devices)
    panels = 1 if not schedule.requests else 2
    heights = [_requests_inches(len(schedule.requests))] * (panels - 1) + [_devices_inches(len(picture.rows))]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 1.35), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1))
    FigureCanvasAgg(figure)
    axes = figure.subplots(panels, 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    if panels == 2:
        _draw_requests(axes[0], schedule.requests, picture)
    _draw_devices(axes[-1], schedule.works, picture)
    axes[-1].set_xlim(*_limits_s(schedule, picture))
    axes[-1].set_xlabel("seconds")
    axes[0].set_title(title or "Devices over time", loc="left", fontsize=13, fontweight="bold")
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
    gpus = {gpu for work in works for gpu in work.gpus} | set(range(num_devices or 0))
    ids = [*requests, *(i for i in starts_s if i not in requests)]
    return _Picture(
        rows={gpu: row for row, gpu in enumerate(sorted(gpus))},
        start_s=min([works[0].start_s, *(requests[i].arrival_s for i in starts_s if i in requests)]),
        end_s=max([*(work.end_s for work in works), *(line.finish_s for line in schedule.requests)]),
        requests=requests,
        colours=request_colours(ids, {i: request.shape for i, request in requests.items()}),
        starts_s=starts_s,
    )


def _draw_devices(axes: Any, works: Sequence[WorkLine], picture: _Picture) -> None:
    for work in works:
        _draw_work(axes, work, picture)
    shares = busy_shares(works, picture.start_s, picture.end_s)
    right = axes.get_yaxis_transform()
    for gpu, row in picture.rows.items():
        axes.text(1.006, row, f"{shares.get(gpu, 0):.0%} busy", transform=right, va="center", fontsize=9)
    axes.set_yticks(list(picture.rows.values()), [f"device {gpu}" for gpu in picture.rows])
    axes.set_ylim(len(picture.rows) - 0.45, -0.55)
    _clean(axes)


def _draw_work(axes: Any, work: WorkLine, picture: _Picture) -> None:
    """A bar over each unbroken run of the work's devices. Outline, hatch and label go where they would hide it."""
    from matplotlib.patches import Rectangle

    colour = _bar_colour(work, picture)
    inches = picture.inches(work)
    for first, last in _row_runs(sorted(picture.rows[gpu] for gpu in work.gpus)):
        bar = Rectangle((work.start_s, first - BAR_HEIGHT / 2), work.end_s - work.start_s, last - first + BAR_HEIGHT)
        bar.set(facecolor=colour, edgecolor="white", linewidth=0.6 if inches >= 0.06 else 0)
        if work.stage in HATCHES and inches >= 0.2:
            bar.set_hatch(HATCHES[work.stage])
        axes.add_patch(bar)
        label = _label(work, inches)
        middle_s = (work.start_s + work.end_s) / 2
        style = {"ha": "center", "va": "center", "fontsize": 7.5, "linespacing": 1.1, "clip_on": True}
        axes.text(middle_s, (first + last) / 2, label, color=ink_on(colour), **style)


def _label(work: WorkLine, inches: float) -> str:
    """The request and, below it, its steps, as far as they fit into a bar of this width."""
    if work.stage in HATCHES:
        return ""
    name = ",".join(str(request)[:6] for request in work.requests)
    steps = f"x{work.steps}"
    if inches < 0.06 * len(name) + 0.04:
        return ""
    return f"{name}\n{steps}" if inches >= 0.06 * len(steps) + 0.04 else name


def _draw_requests(axes: Any, lines: Sequence[RequestLine], picture: _Picture) -> None:
    """One line per request: faint while it waits, in its colour from its first work to its end."""
    ordered = sorted(lines, key=lambda line: (_arrival_s(line, picture), str(line.request)))
    thin = len(lines) > 60
    for row, line in enumerate(ordered):
        arrival_s = _arrival_s(line, picture)
        start_s = min(picture.starts_s.get(line.request, line.finish_s), line.finish_s)
        axes.plot([arrival_s, start_s], [row, row], color="#C4C7C5", linewidth=0.5 if thin else 1.2, zorder=1)
        colour = darker(picture.colours[line.request], 0.1) if line.request in picture.colours else NEUTRAL
        axes.plot([start_s, line.finish_s], [row, row], color=colour, linewidth=1.5 if thin else 3.5, zorder=2)
        request = picture.requests.get(line.request)
        if request is not None and request.deadline_s is not None:
            axes.plot(request.deadline_s, row, "|", color="black", markersize=4 if thin else 8, zorder=3)
        marker, ink, _ = _mark(line)
        axes.plot(
            line.finish_s,
            row,
            marker,
            color=ink,
            markersize=3 if thin else 5.5,
            markeredgewidth=0.8 if thin else 1.6,
            zorder=4,
        )
    labels = [] if thin else [str(line.request)[:8] for line in ordered]
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.set_ylabel("requests")
    axes.set_ylim(len(ordered) - 0.4, -0.6)
    axes.tick_params(labelbottom=False)
    _clean(axes)


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
    if schedule.requests and any(request.deadline_s is not None for request in picture.requests.values()):
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
