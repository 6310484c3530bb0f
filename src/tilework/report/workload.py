"""A chart of a workload: when requests of each size arrive, and how much they ask of the devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilework.formats.workload import WorkloadRequest
from tilework.report.palette import BAD, class_hues, show_grid, size_classes
from tilework.report.tables import counted_devices

WIDTH_INCHES = 13.0
ROW_INCHES = 0.42
LOAD_INCHES = 3.2
NUM_BINS = 72
GOLDEN = 0.618034
FEW, MANY = 300, 1500
AT_EDGE: Any = ("axes fraction", "data")


def draw_workload(
    path: Path | str,
    requests: Sequence[WorkloadRequest],
    *,
    device_s: Sequence[float] | None = None,
    num_devices: int = 1,
    title: str = "",
) -> None:
    """Write a PNG of two panels over time: each arrival in the row of its size, and the load that they bring.

    `device_s` is the least device time of each request; the load of an interval is what arrives in it over what
    `num_devices` can do meanwhile. Without it, the lower panel is requests per second. Marks are spread over the height
    of their row, so that those that arrive together can be distinguished; hollow ones have no deadline. If all arrive
    at once, there is one panel: how much is asked for in each size.

    Raises:
        ValueError: there are no requests.
    """
    if not requests:
        raise ValueError("there are no requests to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    hues = class_hues(request.shape for request in requests)
    rows_inches = ROW_INCHES * max(3, len(hues)) + 0.2
    spread = len({request.arrival_s for request in requests}) > 1
    height_inches = rows_inches + 0.8 + (LOAD_INCHES if spread else 0.0)
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=110, layout=ConstrainedLayoutEngine(h_pad=0.08))
    FigureCanvasAgg(figure)
    figure.suptitle(title or "Workload", x=0.01, ha="left", fontsize=13, fontweight="bold")
    if spread:
        rows, load = figure.subplots(2, 1, sharex=True, height_ratios=(rows_inches, LOAD_INCHES))
        _draw_rows(rows, requests, hues)
        _draw_load(load, requests, hues, device_s, num_devices)
    else:
        _draw_sums(figure.subplots(), requests, hues, device_s, num_devices)
    figure.savefig(path)


def _draw_rows(axes: Any, requests: Sequence[WorkloadRequest], hues: dict[str, str]) -> None:
    classes = size_classes(request.shape for request in requests)
    size = 34 if len(requests) <= FEW else 14 if len(requests) <= MANY else 5
    for row, (name, hue) in enumerate(hues.items()):
        members = [request for request in requests if classes[request.shape] == name]
        heights = [row + 0.7 * ((place * GOLDEN) % 1 - 0.5) for place in range(len(members))]
        for has_deadline in (True, False):
            at = [
                (request.arrival_s, height)
                for request, height in zip(members, heights, strict=True)
                if (request.slo_s is not None) is has_deadline
            ]
            if at:
                faces = hue if has_deadline else "none"
                axes.scatter(*zip(*at, strict=True), s=size, facecolors=faces, edgecolors=hue, linewidths=0.9)
    _label_rows(axes, requests, hues)
    hollow = any(request.slo_s is None for request in requests)
    axes.set_title("arrivals by size" + (" (hollow: no deadline)" if hollow else ""), loc="left", fontsize=10)
    show_grid(axes)


def _label_rows(axes: Any, requests: Sequence[WorkloadRequest], hues: dict[str, str]) -> None:
    """Draw sizes on the left, and the number of each on the right."""
    classes = size_classes(request.shape for request in requests)
    counts = Counter(classes[request.shape] for request in requests)
    for row, name in enumerate(hues):
        text = f"{counts[name]}  ({counts[name] / len(requests):.0%})"
        axes.annotate(text, (1.005, row), xycoords=AT_EDGE, va="center", fontsize=9, annotation_clip=False)
    axes.set(ylim=(-0.6, len(hues) - 0.4), yticks=range(len(hues)), yticklabels=list(hues))
    axes.tick_params(axis="y", length=0)


def _draw_sums(
    axes: Any,
    requests: Sequence[WorkloadRequest],
    hues: dict[str, str],
    device_s: Sequence[float] | None,
    num_devices: int,
) -> None:
    classes = size_classes(request.shape for request in requests)
    sums = dict.fromkeys(hues, 0.0)
    for request, weight in zip(requests, _weights(requests, device_s, num_devices), strict=True):
        sums[classes[request.shape]] += weight
    axes.barh(range(len(hues)), list(sums.values()), 0.7, color=list(hues.values()))
    _label_rows(axes, requests, hues)
    what = "" if device_s is None else f": {sum(sums.values()):.3g} s of work for {counted_devices(num_devices)}"
    axes.set_title(f"all arrive at once{what}", loc="left", fontsize=10)
    axes.set(xlabel="requests" if device_s is None else f"seconds of work for {counted_devices(num_devices)}")
    show_grid(axes)


def _weights(requests: Sequence[WorkloadRequest], device_s: Sequence[float] | None, num_devices: int) -> list[float]:
    """Return the weight of each request: its share of the devices' time in seconds, or 1 where that is unknown."""
    return [1.0] * len(requests) if device_s is None else [seconds / num_devices for seconds in device_s]


def _draw_load(
    axes: Any,
    requests: Sequence[WorkloadRequest],
    hues: dict[str, str],
    device_s: Sequence[float] | None,
    num_devices: int,
) -> None:
    classes = size_classes(request.shape for request in requests)
    first_s = min(request.arrival_s for request in requests)
    span_s = max(request.arrival_s for request in requests) - first_s
    bin_s = span_s / NUM_BINS
    weights = _weights(requests, device_s, num_devices)
    bottoms = [0.0] * NUM_BINS
    starts_s = [first_s + index * bin_s for index in range(NUM_BINS)]
    for name, hue in hues.items():
        heights = [0.0] * NUM_BINS
        for request, weight in zip(requests, weights, strict=True):
            if classes[request.shape] == name:
                heights[min(int((request.arrival_s - first_s) / bin_s), NUM_BINS - 1)] += weight / bin_s
        axes.bar(starts_s, heights, bin_s, bottoms, align="edge", color=hue, linewidth=0)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    arrived = len(requests) - 1 if device_s is None else sum(weights)
    _draw_levels(axes, arrived / span_s, capacity=device_s is not None)
    load = f"load: least device time that arrives, over {counted_devices(num_devices)}"
    what = "requests per second" if device_s is None else load
    axes.set_title(what, loc="left", fontsize=10)
    axes.set(xlabel="seconds", xlim=(first_s - 0.005 * span_s, first_s + 1.005 * span_s))
    if device_s is not None:
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.set_ylim(0, max(1.15, max(bottoms) * 1.05))
    show_grid(axes)


def _draw_levels(axes: Any, mean: float, *, capacity: bool) -> None:
    levels = [(mean, f"mean {mean:.0%}" if capacity else f"mean {mean:.3g}", "#202124", "--")]
    levels += [(1.0, "all devices busy", BAD, "-")] if capacity else []
    highest = max(height for height, *_ in levels)
    for height, text, colour, style in levels:
        axes.axhline(height, color=colour, linewidth=1.2, linestyle=style)
        above = "bottom" if height == highest else "top"
        axes.annotate(text, (1.005, height), xycoords=AT_EDGE, va=above, fontsize=9, color=colour)
