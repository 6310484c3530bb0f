"""Images of policies side by side: curves with their bound, shares by size, distributions of latency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INK = "#202124"
FAINT = "#5F6368"
GRID = "#E3E3E3"
# Okabe and Ito's colours, strong ones first; after them each comes again with another mark and line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F5539", "#8A8D91")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "h")
LINES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
PANEL_INCHES = (4.7, 3.7)
MOST_COLUMNS = 3
LOWEST_SHOWN = 0.02
_ABOVE_ALL = 0.015  # Part of an axis of shares above 100%.
_GROUP_WIDTH = 0.84  # Share of the distance between two groups of bars.
_PAIR_INCHES = 0.62
_LEGEND: Mapping[str, Any] = {"frameon": False, "fontsize": 9, "columnspacing": 1.4}
_LONG_TAIL = 20.0  # Longest over shortest time, above which an axis is logarithmic.


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points in ascending order of x; `halves` are those of the intervals of the ys, if there are any."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    halves: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePanel:
    """One curve per policy; `bound` is drawn dashed. `is_share`: y is a share of 1.

    `is_distribution`: each y is the share of what is at most x, which may be infinite, and the curve is one of steps.
    """

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Curve]
    is_share: bool = True
    is_distribution: bool = False
    bound: Curve | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPanel:
    """Panel with a bar per policy for each of `groups`; `marks` are the smallest and largest values behind each bar, if
    any.

    `is_share`: they are shares of 1.
    """

    title: str
    y_label: str
    groups: tuple[str, ...]
    bars: Mapping[str, tuple[float, ...]]
    marks: Mapping[str, tuple[tuple[float, float], ...]] | None = None
    is_share: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two bars, one below the other: the shares of their parts, and what stands at the end of the first ones."""

    label: str
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPanel:
    """Pairs of bars, from the top. Each bar goes from 0 to at most 1."""

    title: str
    pairs: tuple[Pair, ...]


Panel = CurvePanel | BarPanel


def draw_panels(path: Path | str, panels: Sequence[Panel], policies: Sequence[str], *, title: str) -> None:
    """Write a PNG of all panels, row by row. A policy has the same colour and mark on each; the legend is at the foot.

    Raises:
        ValueError: there are no panels.
        OSError: the file cannot be written.
    """
    if not panels:
        raise ValueError("there is nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(MOST_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    width = PANEL_INCHES[0] * max(columns, 2)
    legend_columns = max(1, min(len(policies) + 1, int(width // 2.2)))
    legend_inches = 0.3 * math.ceil((len(policies) + 1) / legend_columns) + 0.15
    height = PANEL_INCHES[1] * rows + legend_inches + 0.35
    figure = Figure(figsize=(width, height), dpi=120)
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, y=1 - 0.12 / height, ha="left", va="top", fontsize=13, fontweight="bold", color=INK)
    body = figure.add_gridspec(
        rows,
        columns,
        left=0.74 / width,
        right=1 - 0.25 / width,
        bottom=(legend_inches + 0.6) / height,
        top=1 - 0.8 / height,
        hspace=0.95 / (PANEL_INCHES[1] - 0.95),
        wspace=0.75 / (PANEL_INCHES[0] - 0.75),
    )
    styles = {policy: _style(index) for index, policy in enumerate(policies)}
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(body[index // columns, index % columns])
        if isinstance(panel, BarPanel):
            _draw_marked_bars(axes, panel, styles)
        else:
            _draw_curves(axes, panel, styles)
    _draw_legend(figure, styles, legend_columns, has_bound=any(_has_bound(panel) for panel in panels))
    figure.savefig(path)


def _style(index: int) -> dict[str, Any]:
    """Return the first one is drawn over the others."""
    turn = index // len(COLOURS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKS[(index + turn) % len(MARKS)],
        "linestyle": LINES[turn % len(LINES)],
        "linewidth": 2.6 if index == 0 else 1.6,
        "markersize": 6 if index == 0 else 5,
        "zorder": 5 if index == 0 else 3,
    }


def _has_bound(panel: Panel) -> bool:
    return isinstance(panel, CurvePanel) and panel.bound is not None


def _draw_curves(axes: Any, panel: CurvePanel, styles: Mapping[str, dict[str, Any]]) -> None:
    for policy, curve in panel.curves.items():
        style = styles[policy]
        if panel.is_distribution:
            axes.step(curve.xs, curve.ys, where="post", **style | {"marker": ""})
            continue
        axes.plot(curve.xs, curve.ys, **style, markeredgecolor="white", markeredgewidth=0.6)
        if any(curve.halves):
            low = [y - half for y, half in zip(curve.ys, curve.halves, strict=True)]
            high = [y + half for y, half in zip(curve.ys, curve.halves, strict=True)]
            axes.fill_between(curve.xs, low, high, color=style["color"], alpha=0.1, linewidth=0, zorder=1)
    if panel.bound is not None:
        axes.plot(panel.bound.xs, panel.bound.ys, color=INK, linewidth=1.4, linestyle=(0, (4, 2)), zorder=4)
    _limit(axes, panel)
    _finish(axes, panel.title, panel.x_label, panel.y_label)


def _finish(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def _limit(axes: Any, panel: CurvePanel) -> None:
    """Set the limits of the axes: shares up to 100%; a distribution up to its longest finite latency."""
    if panel.is_share:
        axes.yaxis.set_major_formatter("{x:.0%}")
        ys = [y for curve in panel.curves.values() for y in curve.ys]
        low = 0.0 if panel.is_distribution else max(0.0, min(ys, default=0.0) - LOWEST_SHOWN)
        axes.set_ylim(low, 1.0 + _ABOVE_ALL * (1 - low))
    else:
        _limit_values(axes, [y for curve in panel.curves.values() for y in curve.ys if 0 < y < math.inf])
    if panel.is_distribution:
        _limit_times(axes, [x for curve in panel.curves.values() for x in curve.xs if 0 < x < math.inf])
    else:
        xs = sorted({x for curve in panel.curves.values() for x in curve.xs})
        axes.set_xticks(xs, [f"{x:g}" for x in xs])


def _limit_values(axes: Any, ys: Sequence[float]) -> None:
    if max(ys, default=1.0) <= _LONG_TAIL * min(ys, default=1.0):
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")


def _limit_times(axes: Any, times_s: Sequence[float]) -> None:
    """Set the time axis from the shortest to the longest; logarithmic where a tail would squeeze the rest."""
    shortest, longest = min(times_s, default=1.0), max(times_s, default=1.0)
    if longest <= _LONG_TAIL * shortest:
        axes.set_xlim(0, 1.02 * longest)
        return
    axes.set_xscale("log")
    axes.set_xlim(0.9 * shortest, 1.1 * longest)
    decades = range(math.floor(math.log10(shortest)), math.ceil(math.log10(longest)) + 1)
    parts = (1, 2, 5) if longest < 1000 * shortest else (1,)
    ticks = [part * 10.0**decade for decade in decades for part in parts]
    ticks = [tick for tick in ticks if 0.9 * shortest <= tick <= 1.1 * longest]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)


def draw_bars(axes: Any, panel: BarPanel, colours: Mapping[str, str]) -> dict[str, list[float]]:
    """Draw groups of bars at 0, 1, 2, ..., in each those of `colours` in their order, named for a legend.

    Returns where the middles of the bars are.
    """
    shown = [policy for policy in colours if policy in panel.bars]
    width = _GROUP_WIDTH / len(shown)
    places = dict[str, list[float]]()
    for index, policy in enumerate(shown):
        middle = (index + 0.5) * width - _GROUP_WIDTH / 2
        at = places[policy] = [group + middle for group in range(len(panel.groups))]
        axes.bar(at, panel.bars[policy], 0.92 * width, color=colours[policy], label=policy, zorder=2)
        ends = () if panel.marks is None else panel.marks[policy]
        for place, (low, high) in zip(at, ends, strict=False):
            axes.plot([place, place], [low, high], color=FAINT, linewidth=1, zorder=3)
    axes.set_xticks(range(len(panel.groups)), panel.groups)
    axes.set_ylim(bottom=0)
    if panel.is_share:
        axes.set_ylim(0, 1 + _ABOVE_ALL)
        axes.yaxis.set_major_formatter("{x:.0%}")
    _finish(axes, panel.title, "", panel.y_label)
    axes.grid(visible=False, axis="x")
    return places


def _draw_marked_bars(axes: Any, panel: BarPanel, styles: Mapping[str, dict[str, Any]]) -> None:
    """Draw bars with the legend's marks on top, which show a bar of no height and tell policies of one colour apart."""
    places = draw_bars(axes, panel, {policy: style["color"] for policy, style in styles.items()})
    for policy, at in places.items():
        mark = styles[policy] | {"linestyle": "", "markeredgecolor": "white", "markeredgewidth": 0.6}
        axes.plot(at, panel.bars[policy], **mark, clip_on=False)


def _draw_legend(figure: Any, styles: Mapping[str, dict[str, Any]], columns: int, *, has_bound: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=policy, **style, markeredgecolor="white") for policy, style in styles.items()]
    if has_bound:
        label = "bound: no policy can do better"
        handles.append(Line2D([], [], color=INK, linewidth=1.4, linestyle=(0, (4, 2)), label=label))
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.006, 0.004),
        ncols=columns,
        handlelength=2.6,
        **_LEGEND,
    )


def draw_pairs(
    path: Path | str, panels: Sequence[PairPanel], parts: Mapping[str, str], *, num_good: int, title: str, foot: str
) -> None:
    """Write a PNG of pairs of bars. `parts` are the colours of the parts of a bar by name, in their order.

    The sum of the first `num_good` stands at their end, in per cent. `foot` says what the two bars of a pair are.

    Raises:
        ValueError: there are no panels.
        OSError: the file cannot be written.
    """
    if not panels:
        raise ValueError("there is nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns = min(MOST_COLUMNS, len(panels))
    rows = [panels[first : first + columns] for first in range(0, len(panels), columns)]
    heights = [_PAIR_INCHES * max(len(panel.pairs) for panel in row) + 0.75 for row in rows]
    named = len(parts) if columns > 2 else math.ceil(len(parts) / 2)  # In a row of the legend.
    width, height = PANEL_INCHES[0] * max(columns, 2), sum(heights) + 0.75 + 0.25 * math.ceil(len(parts) / named)
    figure = Figure(figsize=(width, height), dpi=120)
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, y=1 - 0.12 / height, ha="left", va="top", fontsize=13, fontweight="bold", color=INK)
    top = height - 0.45
    for row, inches in zip(rows, heights, strict=True):
        for index, panel in enumerate(row):
            body = 0.2 + index * width / columns, top - inches + 0.3, width / columns - 0.4, inches - 0.65
            axes = figure.add_axes((body[0] / width, body[1] / height, body[2] / width, body[3] / height))
            _draw_pairs(axes, panel, list(parts.values()), num_good)
        top -= inches
    handles = [Patch(color=colour, label=name) for name, colour in parts.items()]
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.006, 0.22 / height), ncols=named, **_LEGEND)
    figure.text(0.012, 0.08 / height, foot, fontsize=9, color=FAINT)
    figure.savefig(path)


def _draw_pairs(axes: Any, panel: PairPanel, colours: Sequence[str], num_good: int) -> None:
    for index, pair in enumerate(panel.pairs):
        axes.text(0, index - 0.36, pair.label, fontsize=8.5, color=INK, va="center")
        for place, parts in ((index - 0.08, pair.before), (index + 0.24, pair.after)):
            left = 0.0
            for number, (part, colour) in enumerate(zip(parts, colours, strict=True), start=1):
                axes.barh(place, part, 0.28, left=left, color=colour, zorder=2)
                left += part
                if number == num_good:
                    axes.text(left - 0.01, place, f"{100 * left:.1f}", ha="right", va="center", fontsize=8, color=INK)
    _finish(axes, panel.title, "", "")
    axes.set_xlim(0, 1)
    axes.set_ylim(len(panel.pairs) - 0.5, -0.55)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
