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

_NORMAL = NormalDist().inv_cdf(0.975)
# The quantile at 97.5% of Student's t with 1, 2, ... degrees of freedom.
_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
)


class Block(NamedTuple):
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
        """The lower end that is still in reach with `factor` times as many requests: if the others have the share at
        the upper end of this interval.
        """
        value = (self.value + (factor - 1) * self.high) / factor
        return _wilson(value, factor * self.num_independent, _NORMAL)[0]


def share_of(blocks: Sequence[Block]) -> Share:
    """The share of all blocks together. There is at least one, and none is empty."""
    num_due = sum(block.num_due for block in blocks)
    value = sum(block.num_on_time for block in blocks) / num_due
    quantile = t_quantile(len(blocks) - 1) if len(blocks) > 1 else _NORMAL
    num = num_due / _design_effect(blocks, value, num_due)
    low, high = _wilson(value, num, quantile)
    return Share(value=value, low=low, high=high, num_due=num_due, num_independent=num)


def t_quantile(freedom: int) -> float:
    """The quantile at 97.5% of Student's t; beyond the table by Cornish and Fisher's expansion, to four digits."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = _NORMAL
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def num_to_show(target: float) -> int:
    """How many requests, all of them on time, it takes for an interval that is at the target or above."""
    return math.ceil(_NORMAL**2 * target / (1 - target))


def _design_effect(blocks: Sequence[Block], value: float, num_due: int) -> float:
    """At least 1; 1 also where it cannot be told."""
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
