"""The parts one after another, the most valuable first, as long as there is time for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec

from suite.children import GRACE_S
from suite.gpu.parts import Part


class UnknownPart(ValueError):
    """The message has the name, and those to choose from."""


class Ending(StrEnum):
    MEASURED = "measured"
    MISSED = "measured, and a goal is missed"
    FAILED = "failed"
    PAST_LIMIT = "ended at its limit"
    BEFORE = "measured before"
    NO_CARDS = "needs more cards"
    NO_PACKAGES = "needs packages that are not there"
    NO_TIME = "not begun: it might not end in time"


BEGUN = (Ending.MEASURED, Ending.MISSED, Ending.FAILED, Ending.PAST_LIMIT)


def has_package(name: str) -> bool:
    return find_spec(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    part: Part
    ending: Ending
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Measures parts until `end_s` of the `clock`, and none past it: one that might take longer is not begun.

    Parts in `before` were measured already. One for more cards than `num_cards` cannot be, nor one whose packages
    `has_package` does not find.
    """

    end_s: float
    measure: Callable[[Part], Ending]
    before: Collection[str] = ()
    num_cards: int = 1
    has_package: Callable[[str], bool] = has_package
    clock: Callable[[], float] = time.monotonic

    def run(self, parts: Sequence[Part]) -> Iterator[Outcome]:
        for part in parts:
            start_s = self.clock()
            ending = self._reason_against(part, start_s) or self.measure(part)
            yield Outcome(part=part, ending=ending, seconds=self.clock() - start_s)

    def _reason_against(self, part: Part, now_s: float) -> Ending | None:
        if part.name in self.before:
            return Ending.BEFORE
        if part.num_cards > self.num_cards:
            return Ending.NO_CARDS
        if not part.can_do_without and not all(map(self.has_package, part.packages)):
            return Ending.NO_PACKAGES
        if now_s + part.limit_s + GRACE_S > self.end_s:
            return Ending.NO_TIME
        return None


def parts_from(parts: Sequence[Part], name: str) -> Sequence[Part]:
    """The part of this name and those after it; all if there is no name.

    Raises:
        UnknownPart: no part has the name.
    """
    names = [part.name for part in parts]
    if name and name not in names:
        raise UnknownPart(f"{name!r} is no part; choose from {', '.join(names)}")
    return parts[names.index(name) :] if name else parts
