"""The devices that a command runs models on: CUDA if there is any, and what is said where it cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilework.cli.console import UserError, console
from tilework.core.model import DEVICES, DTYPES

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
        """How many workers there are: as many as cards, unless it is said.

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
        """The type of weights: on cards bfloat16, or float16 where one has no units for it; on CPUs float32.

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
    """The devices that `--device` asks for. With `elsewhere`, other machines have them.

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
