"""A share of requests with its interval, where requests that come close together share their luck.

Theory of operation. A run is cut into blocks of requests that came one after another. If requests were independent, the
shares of blocks would differ as those of a binomial distribution. They differ more, since a queue delays many at once:
by the *design effect*, the ratio of the two variances. So n requests say as much as n over the design effect of
independent ones, and Wilson's interval is taken of that many. Wilson's, since shares near 1 are what is asked for: it
never leaves 0 to 1, and has a width where all were on time. The quantile is Student's for the number of blocks.

Source: batch means of simulation output (Law, Simulation Modeling and Analysis, 9.5.3); the effective sample size is
Kish's, as in Korn and Graubard's interval for survey proportions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from tilework.core.actions import Action, Finish, Reject
from tilework.core.events import Event
from tilework.core.request import Request, Status

_NORMAL = NormalDist().inv_cdf(0.975)
# The quantile at 97.5% of Student's t with 1, 2, ... degrees of freedom.
_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
)


class DueBlock(NamedTuple):
    """Requests with a deadline that came one after another: how many, and how many of them were on time."""

    num_due: int
    num_on_time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The share on time of `num_due` requests, and its 95% interval.

    They say as much as `num_independent` independent ones.
    """

    value: float
    low: float
    high: float
    num_due: int
    num_independent: float

    def low_at_most(self, factor: float) -> float:
        """Return the lower end that is still in reach with `factor` times as many requests: if the others have the
        share at the upper end of this interval.
        """
        value = (self.value + (factor - 1) * self.high) / factor
        return _wilson(value, factor * self.num_independent, _NORMAL)[0]


def share_of(blocks: Sequence[DueBlock]) -> Share:
    """Return the share of all blocks together. There is at least one, and none is empty."""
    num_due = sum(block.num_due for block in blocks)
    value = sum(block.num_on_time for block in blocks) / num_due
    quantile = t_quantile(len(blocks) - 1) if len(blocks) > 1 else _NORMAL
    num = num_due / _design_effect(blocks, value, num_due)
    low, high = _wilson(value, num, quantile)
    return Share(value=value, low=low, high=high, num_due=num_due, num_independent=num)


def t_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t; beyond the table by Cornish and Fisher's expansion, to four digits."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = _NORMAL
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def num_to_show(target: float) -> int:
    """Return the number of requests, all on time, that put the whole interval at the target or above."""
    return math.ceil(_NORMAL**2 * target / (1 - target))


def _design_effect(blocks: Sequence[DueBlock], value: float, num_due: int) -> float:
    """Return the design effect, at least 1; also 1 where it is unknown."""
    independent = value * (1 - value) / num_due
    if len(blocks) < 2 or not independent:
        return 1.0
    squares = math.fsum((block.num_on_time - value * block.num_due) ** 2 for block in blocks)
    return max(1.0, squares * len(blocks) / (len(blocks) - 1) / num_due**2 / independent)


def _wilson(value: float, num: float, quantile: float) -> tuple[float, float]:
    square = quantile**2
    middle = (value + square / (2 * num)) / (1 + square / num)
    half = quantile * math.sqrt(value * (1 - value) / num + square / (4 * num**2)) / (1 + square / num)
    return max(0.0, min(value, middle - half)), min(1.0, max(value, middle + half))  # Rounding may put value outside.


BLOCKS = 10
"""Number of blocks that the requests of a run are cut into, at most."""
SHOWN = 0.25
"""A run goes on while the share on time may be as near to the target as that, so that curves show how far below."""


class Decided(Exception):
    """No request is left whose deadline can still be kept or missed, or the target is far out of reach."""


class Judge:
    """Counts which deadlines are kept, for `Simulation.run(observe=...)`. Raises Decided when the rest does not matter.

    A deadline is missed once it has passed, or its request has ended without a result, also if one is made later.
    """

    def __init__(self, requests: Sequence[Request], target: float) -> None:
        """`requests` are those whose deadlines count, in order of arrival; others may be simulated with them."""
        due = [one for one in requests if one.deadline_ns is not None]
        self._place = {one.uid: index for index, one in enumerate(due)}
        self._by_deadline = sorted((one.deadline_ns, one.uid) for one in due if one.deadline_ns is not None)
        self._num_passed = 0
        self._open = set(self._place)
        self._missed: list[str] = []
        self._most_missed = round(len(due) * (1 - target + SHOWN))

    def __call__(self, event: Event, actions: Sequence[Action], now_ns: int) -> None:
        while self._num_passed < len(self._by_deadline) and self._by_deadline[self._num_passed][0] < now_ns:
            self._end(self._by_deadline[self._num_passed][1], is_kept=False)
            self._num_passed += 1
        for action in actions:
            if type(action) is Finish:
                self._end(action.uid, is_kept=action.status is Status.DONE)
            elif type(action) is Reject:
                self._end(action.uid, is_kept=False)
        if self.is_whole or len(self._missed) > self._most_missed:
            raise Decided

    def _end(self, uid: str, *, is_kept: bool) -> None:
        if uid in self._open:
            self._open.remove(uid)
            if not is_kept:
                self._missed.append(uid)

    @property
    def is_whole(self) -> bool:
        """True if all deadlines were judged; else the others count as kept."""
        return not self._open

    def end(self) -> None:
        """End without further events: deadlines not kept by now are missed."""
        self._missed += self._open
        self._open.clear()

    def blocks(self) -> tuple[DueBlock, ...]:
        """Return requests with a deadline in the order of their arrival, in blocks of equal size to within one."""
        num = min(BLOCKS, len(self._place))
        due, missed = [0] * num, [0] * num
        for place in self._place.values():
            due[place * num // len(self._place)] += 1
        for uid in self._missed:
            missed[self._place[uid] * num // len(self._place)] += 1
        return tuple(DueBlock(all_, all_ - late) for all_, late in zip(due, missed, strict=True))
