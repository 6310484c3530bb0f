"""The workers that a command starts, alone or in cells: devices that are one, for models that exceed one of them."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.cli.console import UserError


@dataclass(frozen=True, slots=True)
class Devices:
    """How many workers there are, how many of them are one device, and what each has for weights; and CPU slots."""

    number: int
    cell_size: int
    weights_bytes: int | None
    num_slots: int = 1

    @property
    def num_devices(self) -> int:
        return self.number // self.cell_size

    def check(self) -> None:
        """Raises UserError if the workers do not make up cells, or it is not said what each of them has for weights."""
        size = self.cell_size
        if self.number % size:
            raise UserError(
                f"cell is {size}, which does not divide the {self.number} devices; give another number of one of them"
            )
        if size > 1 and self.weights_bytes is None:
            raise UserError(
                f"cell is {size}, and --weights-memory does not say what a device has for weights; give it, as in 24GB"
            )
