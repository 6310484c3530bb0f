"""Medians, percentiles and how sure of them we are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from random import Random
from statistics import NormalDist, fmean, median

from tilework.report.tables import percentile

RESAMPLES = 2000
Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A number and its uncertainty; `kind` says what `low` and `high` are, `count` from how many values."""

    value: float
    low: float
    high: float
    kind: str
    count: int

    def scaled(self, factor: float) -> Interval:
        return Interval(
            value=self.value * factor,
            low=self.low * factor,
            high=self.high * factor,
            kind=self.kind,
            count=self.count,
        )


def bootstrap(values: Sequence[float], seed: int, statistic: Statistic = median) -> Interval:
    """The statistic with a 95% percentile bootstrap interval; for values that are drawn independently."""
    rng = Random(seed)
    draws = [statistic(rng.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return Interval(
        value=statistic(values),
        low=percentile(draws, 2.5),
        high=percentile(draws, 97.5),
        kind="95% bootstrap",
        count=len(values),
    )


def extremes(values: Sequence[float], statistic: Statistic = median) -> Interval:
    """The statistic with the smallest and the largest value; for few values, where a bootstrap says nothing."""
    return Interval(value=statistic(values), low=min(values), high=max(values), kind="min to max", count=len(values))


def exact(value: float) -> Interval:
    """A number that every measurement gives again."""
    return Interval(value=value, low=value, high=value, kind="the same each time", count=1)


def over_repeats(repeats: Sequence[Sequence[float]], statistic: Statistic) -> Interval:
    """The statistic of all values together; the interval are its extremes over the repeats of the measurement."""
    single = [statistic(values) for values in repeats]
    together = statistic([value for values in repeats for value in values])
    return Interval(
        value=together,
        low=min(single),
        high=max(single),
        kind=f"min to max of {len(repeats)} repeats",
        count=len(repeats),
    )


def slope(times: Sequence[float], values: Sequence[float], blocks: int = 20) -> Interval:
    """Of the least-squares line, with its 95% interval by Student's distribution, in values per unit of time.

    Values that follow each other closely are not drawn independently: the line is fitted to the means of blocks.
    """
    cuts = [len(times) * index // blocks for index in range(blocks + 1)]
    spans = [(first, end) for first, end in pairwise(cuts) if end > first]
    xs, ys = ([fmean(column[first:end]) for first, end in spans] for column in (times, values))
    middle, degrees = fmean(xs), len(xs) - 2
    square = sum((x - middle) ** 2 for x in xs)
    rise = sum((x - middle) * y for x, y in zip(xs, ys, strict=True)) / square
    level = fmean(ys)
    rest = sum((y - level - rise * (x - middle)) ** 2 for x, y in zip(xs, ys, strict=True))
    half = _student(degrees) * sqrt(rest / degrees / square)
    return Interval(value=rise, low=rise - half, high=rise + half, kind="95% least squares", count=len(xs))


def _student(degrees: int) -> float:
    """The 97.5% quantile of Student's distribution, by its expansion around the normal one's; good to 1% from 4 on."""
    z = NormalDist().inv_cdf(0.975)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / float(degrees) ** power for power, term in enumerate(terms, start=1))


def p99(values: Sequence[float]) -> float:
    return percentile(values, 99)


__all__ = [
    "Interval",
    "bootstrap",
    "exact",
    "extremes",
    "fmean",
    "median",
    "over_repeats",
    "p99",
    "percentile",
    "slope",
]
