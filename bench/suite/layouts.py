"""A picture of a packed batch: which patch is whose, and in which order they lie."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from tilework.core.packing import Size, choose_patch
from tilework.patches.csp import NO_PATCH, Csp
from tilework.report.palette import HUES
from tilework.report.panels import FAINT, INK

_GAP = 1.6  # Between two pictures, in patches.


def layout_png(sizes: Sequence[Size], pixels: int, shown: int) -> bytes:
    """Pictures of these `sizes` in cells of `pixels` px; the neighbours of patch `shown` of the batch are marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    csp = Csp.of(sizes, choose_patch(sizes, 1), torch.device("cpu"))
    width = sum(grid[1] for grid in csp.grids) + _GAP * (len(csp.grids) - 1)
    figure = Figure(figsize=(9.4, 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=(2.6, 1))
    rows, columns = (side * pixels for side in csp.patch)
    figure.suptitle(
        f"Four requests as {csp.num_patches} patches of {columns} x {rows} px",
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
        color=INK,
    )
    _draw_pictures(above, csp, sizes, pixels, shown)
    _draw_batch(below, csp, shown)
    above.set_xlim(-0.1, width + 0.1)
    below.set_xlim(-0.1, csp.num_patches + 0.1)
    for axes in (above, below):
        axes.set_axis_off()
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw_pictures(axes: Any, csp: Csp, sizes: Sequence[Size], pixels: int, shown: int) -> None:
    left = 0.0
    tallest = max(rows for rows, _ in csp.grids)
    for place, (rows, columns) in enumerate(csp.grids):
        for index in range(rows * columns):
            row, column = divmod(index, columns)
            patch = csp.picture_offsets[place] + index
            _square(axes, csp, patch, left + column, tallest - 1 - row, shown)
        height, width = (side * pixels for side in sizes[csp.order[place]])
        label = f"request {csp.order[place]}\n{width} x {height} px"
        axes.text(left, tallest - rows - 0.15, label, fontsize=9, color=INK, va="top")
        left += columns + _GAP
    axes.set_ylim(-1.0, tallest + 0.1)
    axes.set_aspect("equal")


def _draw_batch(axes: Any, csp: Csp, shown: int) -> None:
    for patch in range(csp.num_patches):
        _square(axes, csp, patch, patch, 0, shown)
    for height, offsets, name in ((1.25, csp.picture_offsets, "picture"), (2.0, _run_patches(csp), "attention")):
        for first, end in pairwise(offsets):
            axes.plot([first + 0.08, end - 0.08], [height, height], color=FAINT, linewidth=1.5)
        axes.text(csp.num_patches, height + 0.12, name, fontsize=8.5, color=FAINT, ha="right")
    axes.set_ylim(-0.1, 2.6)


def _run_patches(csp: Csp) -> list[int]:
    return [csp.picture_offsets[picture] for picture in csp.run_offsets]


def _square(axes: Any, csp: Csp, patch: int, left: float, bottom: float, shown: int) -> None:
    from matplotlib.patches import Rectangle

    around = [neighbour for neighbour in csp.neighbours[shown].tolist() if neighbour != NO_PATCH]
    marked = patch == shown or patch in around
    axes.add_patch(
        Rectangle(
            (left + 0.03, bottom + 0.03),
            0.94,
            0.94,
            facecolor=HUES[int(csp.owners[patch]) % len(HUES)],
            edgecolor=INK if marked else "white",
            linewidth=3 if patch == shown else 1.4,
            alpha=0.85 if marked else 0.6,
        )
    )
    weight = "bold" if patch == shown else "normal"
    axes.text(left + 0.5, bottom + 0.5, str(patch), fontsize=9, ha="center", va="center", fontweight=weight)
