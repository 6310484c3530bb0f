"""A chart of the share of requests on time over the number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilework.report.panels import COLOURS, FAINT, GRID, INK, MARKS


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthPoint:
    """The share on time with some devices, and its interval; it `is_most` where no more than that is known."""

    num_devices: int
    share: float
    low: float
    high: float
    is_most: bool = False


def draw_growth(
    path: Path | str,
    curves: Mapping[str, Sequence[GrowthPoint]],
    *,
    target: float,
    chosen: Mapping[str, int],
    title: str,
) -> None:
    """Write a PNG with a curve for each hardware, points ascending. `chosen` marks the devices that are enough.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, points) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        xs = [one.num_devices for one in points]
        axes.plot(xs, [one.share for one in points], color=colour, linewidth=1.6, label=name, zorder=3)
        below, above = [one.share - one.low for one in points], [one.high - one.share for one in points]
        ys = [one.share for one in points]
        axes.errorbar(xs, ys, (below, above), fmt="none", ecolor=colour, elinewidth=1, capsize=3, zorder=3)
        for is_most, mark in ((False, MARKS[index % len(MARKS)]), (True, "v")):
            own = [one for one in points if one.is_most == is_most]
            axes.plot(
                [one.num_devices for one in own],
                [one.share for one in own],
                linestyle="",
                marker=mark,
                color="white" if is_most else colour,
                markeredgecolor=colour,
                markersize=6,
                zorder=4,
            )
        if name in chosen:
            axes.axvline(chosen[name], color=colour, linewidth=1, linestyle=(0, (1, 2)), zorder=2)
            axes.annotate(
                f"{chosen[name]}", (chosen[name], 0.01), xycoords=("data", "axes fraction"), color=colour, fontsize=9
            )
    axes.axhline(target, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=2)
    axes.annotate(
        f"target {target:.1%}", (0.005, target), xycoords=("axes fraction", "data"), fontsize=8.5, va="bottom"
    )
    has_most = any(one.is_most for points in curves.values() for one in points)
    label = "devices (open triangle: at most this share)" if has_most else "devices"
    axes.set_xlabel(label, fontsize=9, color=FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("requests on time", fontsize=9)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_ylim(max(0.0, min(one.low for points in curves.values() for one in points) - 0.02), 1.01)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    figure.savefig(path)
