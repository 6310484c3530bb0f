"""The workers that a command starts, alone or in cells: devices that are one, for models that exceed one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilework.cli.console import UserError, console, user_errors
from tilework.cli.devices import FoundDevices
from tilework.cli.models import check_setup
from tilework.core.comm import COLLECTIVES
from tilework.core.component import MOST_IN_CELL
from tilework.core.model import OFFLOADS, ModelSource, Source
from tilework.pipelines.fits.beside import SERVER, Beside, StartPlan

_CHOSEN = "auto"


def checked_collectives(name: str | None, sources: Sequence[Source]) -> str | None:
    """How devices are to talk that share a request. Raises UserError if these models' devices cannot."""
    device = sources[0].device
    if name is None or COLLECTIVES.get(name) == device:
        return name
    known = " or ".join(one for one, takes in COLLECTIVES.items() if takes == device)
    raise UserError(f"collectives is {name!r}; give {known} where models run on {device}, or leave it out")


@dataclass(frozen=True, slots=True)
class Devices:
    """How many workers there are, how many of them are one device, and what each has for weights; and CPU slots.

    `cell_size` is 0 until it is `chosen` for their models. `beside` is what each holds beside models, and `plan` what
    is planned for each, if it is.
    """

    number: int
    cell_size: int
    weights_bytes: int | None
    num_slots: int = 1
    beside: Beside = SERVER
    plan: StartPlan | None = None

    @staticmethod
    def of(number: int, cell: str, weights_bytes: int | None, num_slots: int = 1, beside: Beside = SERVER) -> Devices:
        """Workers in cells of a size that is given as text.

        Raises:
            UserError: they do not make up such cells, or it is not said what each of them has for weights.
        """
        size = 0 if cell == _CHOSEN else int(cell) if cell.isdecimal() else -1
        if cell != _CHOSEN and not 1 <= size <= MOST_IN_CELL:
            raise UserError(f"cell is {cell!r}; give how many devices are one, 1 to {MOST_IN_CELL}, or auto")
        if size and number % size:
            raise UserError(
                f"cell is {cell}, which does not divide the {number} devices; give another number of one of them"
            )
        if size != 1 and weights_bytes is None:
            raise UserError(
                f"cell is {cell}, and --weights-memory does not say what a device has for weights; give it, as in 24GB"
            )
        return Devices(number, size, weights_bytes, num_slots, replace(beside, num_cards=number))

    @property
    def num_devices(self) -> int:
        return self.number // self.cell_size

    def planned(self, sources: Sequence[Source], found: FoundDevices) -> Devices:
        """The same with what each has for weights, by the plan of the models' memory; in cells, of a size that fits.

        Raises UserError.
        """
        models = [one for one in sources if isinstance(one, ModelSource)]
        cards = found.cards[: self.number]
        check_setup(models, self.weights_bytes, memory_is_known=bool(cards))
        if self.cell_size != 1:
            if any(one.quantize or one.compiles or one.offload != OFFLOADS[0] for one in models):
                raise UserError("--cell divides weights as they are; leave out --quantize, --offload and --compile")
            return self if self.cell_size else self.chosen(sources)
        if not cards:
            return self
        from tilework.cli.memory_plan import planned_start

        free_bytes = min(card.free_bytes for card in cards)
        plan = planned_start(models, free_bytes, self.weights_bytes, self.beside)
        return replace(self, weights_bytes=plan.weights_room, plan=plan, beside=plan.beside)

    def chosen(self, sources: Sequence[Source]) -> Devices:
        """The same in the smallest cells in which these models fit; says what each device holds.

        Raises UserError.
        """
        from tilework.runtime.executor import WorkerStartFailed
        from tilework.runtime.models.cell_choice import sizes_of, smallest_cell

        assert self.weights_bytes is not None
        with user_errors(WorkerStartFailed), console.status("reading how large the models are"):
            choice = smallest_cell(asyncio.run(sizes_of(sources)), self.number, self.weights_bytes)
        for line in choice.lines():
            console.print(line, soft_wrap=True, highlight=False)
        return replace(self, cell_size=choice.size)
