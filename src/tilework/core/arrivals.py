"""Arrival times of requests: a Poisson process, evenly spaced, or at a rate that varies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, repeat, takewhile
from typing import Protocol


class Gaps(Protocol):
    """The one method of `random.Random` that is used here. The caller passes the generator in."""

    def expovariate(self, lambd: float, /) -> float: ...


def poisson_s(rate_per_s: float, rng: Gaps) -> Iterator[float]:
    """Endless arrival times of a Poisson process. The same seed at another rate gives the same pattern, stretched."""
    return accumulate(rng.expovariate(1.0) / rate_per_s for _ in repeat(None))


def constant_s(rate_per_s: float) -> Iterator[float]:
    """Endless arrival times 0, 1/rate, 2/rate and so on."""
    index = 0
    while True:
        yield index / rate_per_s
        index += 1


def varying_s(rate_per_s: float, profile: Sequence[float], period_s: float, rng: Gaps) -> Iterator[float]:
    """Endless Poisson arrivals at a rate that follows `profile` once per period and is `rate_per_s` on average.

    The profile holds relative rates, each for an equal part of the period; not all are 0. The same seed gives the same
    unit-rate process under every profile: a profile only moves requests in time.
    """
    part_s = period_s / len(profile)
    due = [rate_per_s * period_s * weight / sum(profile) for weight in profile]
    part = 0
    begun = 0.0
    for at in accumulate(rng.expovariate(1.0) for _ in repeat(None)):
        while at >= begun + due[part % len(due)]:
            begun += due[part % len(due)]
            part += 1
        yield (part + (at - begun) / due[part % len(due)]) * part_s


def first_s(arrivals_s: Iterator[float], num_requests: int | None, duration_s: float | None) -> list[float]:
    """Return the first `num_requests` arrivals before `duration_s`; at least one of the two limits is given."""
    assert num_requests is not None or duration_s is not None
    before = arrivals_s if duration_s is None else takewhile(lambda at_s: at_s < duration_s, arrivals_s)
    return list(islice(before, num_requests))
