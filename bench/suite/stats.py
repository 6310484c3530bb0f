"""Medians, percentiles and how sure of them we are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, median

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


def p99(values: Sequence[float]) -> float:
    return percentile(values, 99)


__all__ = ["Interval", "bootstrap", "exact", "extremes", "fmean", "median", "over_repeats", "p99", "percentile"]
