"""Degrees that follow from a profile alone: the efficient ones, and the one up to which a doubling pays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tilework.cost.degrees import EFFICIENT
from tilework.cost.demand import Speed

_LEAST_GAIN = 0.25


def efficient_speeds(speeds: Sequence[Speed]) -> list[Speed]:
    """Return the speeds of degrees k with T(1) / (k T(k)) at least EFFICIENT. `speeds` are ascending, and not empty.

    Where a request does not fit on one device, the narrowest degree stands for the first.

    Source: TridentServe's criterion of efficiency.
    """
    return [speed for speed in speeds if speeds[0].device_ns >= EFFICIENT * speed.device_ns]


def efficient_degree(speeds: Sequence[Speed]) -> int:
    """Return the highest degree that is efficient: TridentServe's optimal one."""
    return efficient_speeds(speeds)[-1].degree


def best_doubling(speeds: Sequence[Speed]) -> int:
    """Return the degree that DDiT calls B: up to it, each doubling pays. `speeds` are ascending, and not empty.

    Source: DDiT §4.2.3, eq. 4: z = 1 - T(k) / T(k / 2), and B the degree with the largest z. Taken literally, noise
    decides where speed-up is nearly linear (z of .48, .46, .43 gives 2 devices), and where no doubling gains anything,
    one is chosen all the same. So here B is the last doubling of an unbroken run of those that save a quarter of the
    time; the narrowest degree if the first does not. It gives the paper's 1, 2 and 4 for its three sizes.
    """
    best = speeds[0]
    for narrow, wide in pairwise(speeds):
        if wide.step_ns > (1 - _LEAST_GAIN) * narrow.step_ns:
            break
        best = wide
    return best.degree
