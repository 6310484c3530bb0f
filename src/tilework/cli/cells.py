"""The options of cells: devices that are one, for models that exceed one of them."""

from __future__ import annotations

from tilework.cli.console import UserError


def check_cell(size: int, num_workers: int, weights_bytes: int | None) -> None:
    """Raises UserError if so many workers are no cells of this size, or what a device has for weights is not said."""
    if num_workers % size:
        raise UserError(
            f"cell is {size}, which does not divide the {num_workers} devices; give another number of one of them"
        )
    if size > 1 and weights_bytes is None:
        raise UserError(
            f"cell is {size}, and --weights-memory does not say what a device has for weights; give it, as in 24GB"
        )
