"""The arrivals of requests with a deadline: how often they come, how long they can wait, and which are to be on time.

Theory of operation of `Rationing`. A selection defers the dearest job only when others would be late. By then that job
has often run for long, and all of it was in vain. So, as requests come, it is decided for each whether it is to be on
time. Classes of requests are served in the order of the cost of one request: its device time, per weight. A class has
what the cheaper ones leave of the devices, by their rates of the last minutes. If that is less than all of its requests
need, as large a share of them is to be on time, and the others are *rationed*: they get what no other needs, as if they
were deferred.

This is the fractional knapsack for the rates: it keeps the most deadlines per time if devices can be divided at will.
While the devices are enough for all, nothing is rationed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import exp, inf
from typing import NamedTuple

from tilework.core.request import RequestClass
from tilework.core.time import NS_PER_S
from tilework.policy.toolkit.known_demands import ByClass

_WEIGHT = 0.1  # Share of the latest gap in the mean.
_MOST_CLASSES = 256


@dataclass(slots=True)
class DueArrivals:
    """The latest arrival `last_ns`, and the mean time between two, in which later ones count more; inf before two."""

    last_ns: float = -inf
    gap_ns: float = inf

    def gap_at(self, now_ns: int) -> float:
        """Return the mean time between two, or the time since the latest if that is longer or there was only one."""
        since_ns = max(1.0, now_ns - self.last_ns)
        return since_ns if self.gap_ns == inf else max(self.gap_ns, since_ns)

    def add(self, arrivals_ns: Iterable[int]) -> None:
        """Count those that are later than the latest so far."""
        for at_ns in sorted(arrivals_ns):
            if at_ns > self.last_ns:
                gap_ns = at_ns - self.last_ns
                self.gap_ns = gap_ns if self.gap_ns == inf else (1 - _WEIGHT) * self.gap_ns + _WEIGHT * gap_ns
                self.last_ns = at_ns


@dataclass(slots=True)
class TightClasses:
    """The slack of the latest request of each class: how long it could wait and be on time on the narrowest group.

    `least_slack_ns` is the least of any class; inf if there is none.
    """

    least_slack_ns: float = field(default=inf, init=False)
    _known: ByClass[RequestClass, tuple[int, DueArrivals]] = field(default_factory=partial(ByClass, _MOST_CLASSES))

    def add(self, key: RequestClass, arrival_ns: int, slack_ns: int) -> None:
        """Count a request that has a deadline and this slack; one that needs a wider group does not count."""
        if slack_ns <= 0:
            return
        arrivals = self._known[key][1] if key in self._known else DueArrivals()
        arrivals.add([arrival_ns])
        self._known.renew(key, (slack_ns, arrivals))
        self._find_least()

    def forget(self, pipeline: str) -> None:
        """Drop the classes of a pipeline."""
        self._known.forget(pipeline)
        self._find_least()

    def _find_least(self) -> None:
        self.least_slack_ns = min([slack_ns for slack_ns, _ in self._known.values()], default=inf)

    def frequencies(self, now_ns: int) -> tuple[tuple[int, float], ...]:
        """Return for each slack, ascending, how many requests with at most this slack come per nanosecond."""
        ordered = sorted((slack_ns, 1 / arrivals.gap_at(now_ns)) for slack_ns, arrivals in self._known.values())
        sums = accumulate(frequency for _, frequency in ordered)
        return tuple((slack_ns, total) for (slack_ns, _), total in zip(ordered, sums, strict=True))


_RECENT_NS = 120 * NS_PER_S
_LEAST_NS = 60 * NS_PER_S
"""Rates count at least this time: a burst is no load."""
_OVERLOAD = 1.05
"""Load from which on anything is rationed: slack makes up for less."""
_FIRST_CREDIT = 0.5


class _AskedTime(NamedTuple):
    """The device time that requests of a class have asked for, decayed since the latest came, and that of one.

    `credit` is the part of a request that may be on time beyond those that were to be.
    """

    at_ns: int
    total_ns: float
    each_ns: float
    weight: float
    credit: float = _FIRST_CREDIT


@dataclass(slots=True)
class Rationing:
    """The requests with a deadline that devices which stand for each other are asked for."""

    _asked: ByClass[RequestClass, _AskedTime] = field(default_factory=partial(ByClass, _MOST_CLASSES))
    _first_ns: int | None = None
    _shares: dict[RequestClass, float] = field(
        default_factory=dict
    )  # Shares at `_moment`, if no request was counted since.
    _moment: tuple[int, int] | None = None  # A time, and how many devices there are.

    def add(self, key: RequestClass, now_ns: int, device_ns: float, weight: float) -> None:
        """Count a request that has come, with the device time that it takes to be on time."""
        self._first_ns = now_ns if self._first_ns is None else self._first_ns
        self._moment = None
        before = self._asked.get(key, _AskedTime(now_ns, 0.0, device_ns, weight))
        total_ns = device_ns + before.total_ns * _decay(now_ns - before.at_ns)
        self._asked.renew(key, _AskedTime(now_ns, total_ns, device_ns, weight, before.credit))

    def forget(self, pipeline: str) -> None:
        """Drop the classes of a pipeline."""
        self._moment = None
        self._shares.clear()
        self._asked.forget(pipeline)

    def admits(self, key: RequestClass, now_ns: int, num_devices: int) -> bool:
        """Return whether a request that was counted is to be on time; to be asked once for each."""
        if self._moment != (now_ns, num_devices):  # Thousands of requests may come at once.
            self._moment = now_ns, num_devices
            self._shares.clear()
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = self._share(key, now_ns, num_devices) if key in self._asked else 1.0
        if share >= 1.0:
            self._keep_credit(key, _FIRST_CREDIT)
            return True
        credit = self._asked[key].credit + share
        self._keep_credit(key, credit - 1.0 if credit >= 1.0 else credit)
        return credit >= 1.0

    def _keep_credit(self, key: RequestClass, credit: float) -> None:
        if key in self._asked:
            self._asked[key] = self._asked[key]._replace(credit=credit)

    def _share(self, key: RequestClass, now_ns: int, num_devices: int) -> float:
        """Return how large a share of a class the devices can serve beside all cheaper ones."""
        assert self._first_ns is not None
        span_ns = max(_LEAST_NS, _RECENT_NS * (1 - _decay(now_ns - self._first_ns)))
        own = self._asked[key]
        dear = own.each_ns / own.weight
        room_ns = num_devices * span_ns
        totals = {other: one.total_ns * _decay(now_ns - one.at_ns) for other, one in self._asked.items()}
        if sum(totals.values()) < _OVERLOAD * room_ns:
            return 1.0
        cheaper = [other for other, one in self._asked.items() if other != key and one.each_ns / one.weight < dear]
        return max(0.0, room_ns - sum(totals[other] for other in cheaper)) / own.total_ns


def _decay(passed_ns: float) -> float:
    return exp(-max(0.0, passed_ns) / _RECENT_NS)
