"""The grid of plots over two quantities."""

from __future__ import annotations

from typing import Any


def show_grid(axes: Any) -> None:
    """Draw a pale grid behind the data, and no frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E3E3E3", linewidth=0.7)
    axes.set_axisbelow(True)
