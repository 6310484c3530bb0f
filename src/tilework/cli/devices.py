"""Devices that a command runs models on: which ones, how many, and how many of them form one cell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tilework.cli.console import UserError, console, user_errors
from tilework.core.comm import COLLECTIVES
from tilework.core.component import MOST_IN_CELL
from tilework.core.model import DEVICES, DTYPES, OFFLOADS, ModelSource, Source
from tilework.pipelines.fits.beside import SERVER, Beside, StartPlan

if TYPE_CHECKING:
    from tilework.pipelines.cuda.state import Card


AUTO = "auto"
_ON_CPUS = 2
"""Workers where there is no card and no number is given."""


@dataclass(frozen=True, slots=True)
class FoundDevices:
    """The kind of `device` that models run on; `cards` are those of this machine, if it is "cuda" and they are known.

    `reason` is why it is that, if that was left open.
    """

    device: str
    cards: tuple[Card, ...] = ()
    reason: str = ""

    def show(self) -> None:
        """Say what was found, once nothing else is wrong with what was asked for."""
        if self.reason:
            console.print(f"device: {self.device}{self.reason}", soft_wrap=True, highlight=False, markup=False)

    def number(self, asked: int | None) -> int:
        """Return the number of workers: the number asked for, else that of the cards.

        Raises:
            UserError: there are fewer cards, or one of them cannot be used.
        """
        if not self.cards:
            return asked or _ON_CPUS
        number = asked or len(self.cards)
        if number > len(self.cards):
            raise UserError(
                f"devices is {number}, and torch sees {len(self.cards)} ({', '.join(one.name for one in self.cards)}); "
                f"give --devices {len(self.cards)}, or see whether CUDA_VISIBLE_DEVICES hides others"
            )
        for index, card in enumerate(self.cards[:number]):
            if card.problem:
                others = ",".join(str(each) for each, one in enumerate(self.cards) if not one.problem)
                leave = f", or leave it out: CUDA_VISIBLE_DEVICES={others}" if others else ""
                raise UserError(
                    f"device {index} ({card.name}) cannot be used: {card.problem}; end what uses it (nvidia-smi shows "
                    f"that), install a build of torch for it{leave}"
                )
        return number

    def dtype(self, asked: str) -> str:
        """Return the type of weights: on cards bfloat16, or float16 where one has no units for it; on CPUs float32.

        Raises UserError.
        """
        if asked == AUTO:
            if self.device == "cpu":
                return "float32"
            return "bfloat16" if all(card.has_bfloat16 for card in self.cards) else "float16"
        if asked not in DTYPES:
            raise UserError(f"dtype is {asked!r}; choose one of {', '.join((AUTO, *DTYPES))}")
        return asked


def found_devices(asked: str, *, elsewhere: bool = False) -> FoundDevices:
    """Return the devices that `--device` asks for. With `elsewhere`, other machines have them.

    Raises:
        UserError: there is no such kind, or CUDA cannot be used on this machine.
    """
    if asked not in (AUTO, *DEVICES):
        raise UserError(f"device is {asked!r}; choose one of {', '.join((AUTO, *DEVICES))}")
    if asked == "cpu" or (asked == "cuda" and elsewhere):
        return FoundDevices(asked)
    from tilework.pipelines.cuda.look import cuda_state

    state = cuda_state()
    if asked == "cuda" and state.reason_against:
        raise UserError(f"device is 'cuda', and {state.reason_against}; {state.remedy}")
    cards = ", ".join(card.name for card in state.cards)
    reason = f" ({cards})" if cards else f", since {state.reason_against}"
    device = "cuda" if cards else "cpu"
    return FoundDevices(device, () if elsewhere else state.cards, reason if asked == AUTO else "")


_CHOSEN = "auto"


def checked_collectives(name: str | None, sources: Sequence[Source]) -> str | None:
    """Return the collectives for devices that share a request. Raises UserError if these models' devices lack them."""
    device = sources[0].device
    if name is None or COLLECTIVES.get(name) == device:
        return name
    known = " or ".join(one for one, takes in COLLECTIVES.items() if takes == device)
    raise UserError(f"collectives is {name!r}; give {known} where models run on {device}, or leave it out")


def check_setup(models: Sequence[ModelSource], weights_bytes: int | None, *, memory_is_known: bool) -> None:
    """Raise UserError if models cannot be set up like this, with what a device has for weights."""
    for one in models:
        if one.offload == "layers" and weights_bytes is not None:
            raise UserError("offload is layers, which brings weights by itself; leave out --weights-memory")
        if one.offload == "components" and weights_bytes is None and not memory_is_known:
            raise UserError(
                "offload is components, and the memory of the devices is not known; say what each has for weights, as "
                "in --weights-memory 8GB"
            )
        if one.offload == "layers" and one.compiles:
            raise UserError("compile is given, and layers that come and go are not compiled; leave out --compile")
        for setting, is_given in (("quantize", one.quantize), ("compile", one.compiles)):
            if is_given and one.loras:
                raise UserError(f"{setting} is given, and LoRAs are not applied then yet; leave out --loras")


@dataclass(frozen=True, slots=True)
class Devices:
    """Number of workers, workers per device, bytes of weights for each, and CPU slots.

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
        """Return workers in cells of a size that is given as text.

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
        """Return the same with what each has for weights, by the plan of the models' memory; in cells, of a size that
        fits.

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
        """Return the same in the smallest cells in which these models fit; says what each device holds.

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
