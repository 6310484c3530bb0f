"""A picture of how the errors of the sweep are spread."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from math import floor, log10

_LOW, _HIGH = -8, 0
_EQUAL = _LOW - 1
"""The bin of results that are equal bit for bit, left of all others."""


def histograms(errors: Mapping[str, Mapping[str, Sequence[float]]], colours: Mapping[str, str]) -> bytes:
    """A row for each way and a column for each type of `errors[way][dtype]`; the height is a share of the cases."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dtypes = list(next(iter(errors.values())))
    figure = Figure(figsize=(3.1 * len(dtypes) + 1, 0.95 * len(errors) + 1.3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "Latents against the stock pipeline: largest difference over largest value", x=0.01, ha="left", fontsize=12
    )
    grid = figure.subplots(len(errors), len(dtypes), sharex=True, sharey=True, squeeze=False)
    for row, (way, by_dtype) in zip(grid, errors.items(), strict=True):
        for axes, dtype in zip(row, dtypes, strict=True):
            shares = _shares(by_dtype[dtype])
            axes.bar(list(shares), list(shares.values()), width=0.9, color=[colours[dtype]], zorder=2)
            axes.axvline(-5, color="#B3261E", linewidth=0.8, linestyle=":", zorder=1)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#E3E3E3", zorder=0)
            axes.tick_params(labelsize=8)
        row[0].set_ylabel(
            way.replace(": ", ":\n").replace(", ", ",\n"), rotation=0, ha="right", va="center", fontsize=9
        )
    for axes, dtype in zip(grid[0], dtypes, strict=True):
        axes.set_title(dtype, fontsize=10)
        axes.set_ylim(0, 1.05)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    for axes in grid[-1]:
        ticks = [_EQUAL, *range(_LOW + 1, _HIGH + 1, 2)]
        axes.set_xticks(ticks, ["equal", *(f"$10^{{{exponent}}}$" for exponent in ticks[1:])])
    buffer = io.BytesIO()
    figure.savefig(buffer)
    return buffer.getvalue()


def _shares(errors: Sequence[float]) -> dict[float, float]:
    """The share of the errors in each power of ten, by its middle."""
    counts: dict[float, int] = {}
    for error in errors:
        place = _EQUAL if not error else min(_HIGH, max(_LOW, floor(log10(error)))) + 0.5
        counts[place] = counts.get(place, 0) + 1
    return {place: count / len(errors) for place, count in sorted(counts.items())}
