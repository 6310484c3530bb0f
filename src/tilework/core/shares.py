"""How often each kind of request comes: shares, skewed ones, and decks that are dealt in their proportions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from tilework.core.request import Shape

PIXELS_PER_TOKEN = 16 * 16

Kind = TypeVar("Kind")


class Shuffles(Protocol):
    """The part of `random.Random` that deals; core knows no generator of its own."""

    def shuffle(self, x: list[Any], /) -> None: ...


def skewed(shares: Mapping[Shape, float], alpha: float = 1.0) -> dict[Shape, float]:
    """Multiply each weight by exp(alpha * L / L_max), L the latent tokens (pixels / 256): large sizes come more often.

    Source: TetriServe section 6.1, "Skewed", there with alpha = 1 and equal weights.
    """
    longest = max(shape.pixels for shape in shares) / PIXELS_PER_TOKEN
    return {s: weight * math.exp(alpha * s.pixels / PIXELS_PER_TOKEN / longest) for s, weight in shares.items()}


def dealt(shares: Mapping[Kind, float], count: int, rng: Shuffles) -> list[Kind]:
    """`count` kinds in the proportions of `shares`, to within one request each, in random order.

    What rounding leaves over goes to the largest remainders, of equal ones to the first. TetriServe draws each size
    independently; dealt proportions are the same on average and differ less between seeds.
    """
    total = math.fsum(shares.values())
    quotas = {kind: count * weight / total for kind, weight in shares.items()}
    counts = {kind: math.floor(quota) for kind, quota in quotas.items()}
    by_remainder = sorted(shares, key=lambda kind: counts[kind] - quotas[kind])
    for kind in by_remainder[: count - sum(counts.values())]:
        counts[kind] += 1
    deck = [kind for kind, number in counts.items() for _ in range(number)]
    rng.shuffle(deck)
    return deck
