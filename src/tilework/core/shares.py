"""Shares of a whole: skewed shares, whole numbers in proportion to shares, and items drawn in their proportions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from tilework.core.request import Shape

PIXELS_PER_TOKEN = 16 * 16

Item = TypeVar("Item")


class Shuffles(Protocol):
    """The one method of `random.Random` that is used here. The caller passes the generator in."""

    def shuffle(self, x: list[Any], /) -> None: ...


def skewed(shares: Mapping[Shape, float], alpha: float = 1.0) -> dict[Shape, float]:
    """Multiply each weight by exp(alpha * L / L_max), L the latent tokens (pixels / 256): large sizes come more often.

    Source: TetriServe section 6.1, "Skewed", there with alpha = 1 and equal weights.
    """
    longest = max(shape.pixels for shape in shares) / PIXELS_PER_TOKEN
    return {s: weight * math.exp(alpha * s.pixels / PIXELS_PER_TOKEN / longest) for s, weight in shares.items()}


def apportioned(shares: Mapping[Item, float], count: int) -> dict[Item, int]:
    """Return whole numbers in the proportions of `shares`, `count` in all, each within one of its exact part.

    The units that rounding leaves go to the largest remainders; of equal ones, to the first (Hamilton's method).
    """
    total = math.fsum(shares.values())
    quotas = {item: count * weight / total for item, weight in shares.items()}
    counts = {item: math.floor(quota) for item, quota in quotas.items()}
    by_remainder = sorted(shares, key=lambda item: counts[item] - quotas[item])
    for item in by_remainder[: count - sum(counts.values())]:
        counts[item] += 1
    return counts


def dealt(shares: Mapping[Item, float], count: int, rng: Shuffles) -> list[Item]:
    """Return `count` items in the proportions of `shares`, to within one item each, in random order.

    TetriServe draws each size independently; these proportions are the same on average and differ less between seeds.
    """
    counts = apportioned(shares, count)
    deck = [item for item, number in counts.items() for _ in range(number)]
    rng.shuffle(deck)
    return deck
