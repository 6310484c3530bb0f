"""Which requests of the dearest classes are to be on time while there is more to do than devices can.

Theory of operation. A selection defers the dearest job only when others would be late. By then that has often run for
long, and all of it was in vain. So, as requests come, it is decided for each whether it is to be on time. Classes of
requests are served in the order of what one of them costs: its device time, per weight. A class has what the cheaper
ones leave of the devices, by their rates of the last minutes. If that is less than all of its requests need, as large a
share of them is to be on time, and the others are *rationed*: they get what no other needs, as if they were deferred.

This is the fractional knapsack for the rates: it keeps the most deadlines per time if devices can be divided at will.
While the devices are enough for all, nothing is rationed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import exp
from typing import NamedTuple

from tilework.core.request import RequestClass
from tilework.core.time import NS_PER_S
from tilework.policy.toolkit.known_demands import ByClass

_RECENT_NS = 120 * NS_PER_S
_LEAST_NS = 60 * NS_PER_S
"""Rates count at least this time: a burst is no load."""
_OVERLOAD = 1.05
"""From which load on anything is rationed: slack makes up for less."""
_MOST_CLASSES = 256
_FIRST_CREDIT = 0.5


class _Asked(NamedTuple):
    """How much device time requests of a class have asked for, decayed since the latest came, and that of one.

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

    _asked: ByClass[RequestClass, _Asked] = field(default_factory=partial(ByClass, _MOST_CLASSES))
    _first_ns: int | None = None
    _shares: dict[RequestClass, float] = field(default_factory=dict)  # Those of `_moment`, if none was counted since.
    _moment: tuple[int, int] | None = None  # A time, and how many devices there are.

    def add(self, key: RequestClass, now_ns: int, device_ns: float, weight: float) -> None:
        """Count a request that has come, with the device time that it takes to be on time."""
        self._first_ns = now_ns if self._first_ns is None else self._first_ns
        self._moment = None
        before = self._asked.get(key, _Asked(now_ns, 0.0, device_ns, weight))
        total_ns = device_ns + before.total_ns * _decay(now_ns - before.at_ns)
        self._asked.renew(key, _Asked(now_ns, total_ns, device_ns, weight, before.credit))

    def forget(self, pipeline: str) -> None:
        """Drop the classes of a pipeline."""
        self._moment = None
        self._shares.clear()
        self._asked.forget(pipeline)

    def admits(self, key: RequestClass, now_ns: int, num_devices: int) -> bool:
        """Whether a request that was counted is to be on time; to be asked once for each."""
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
        """How large a share of a class the devices can serve beside all cheaper ones."""
        assert self._first_ns is not None
        span_ns = max(_LEAST_NS, _RECENT_NS * (1 - _decay(now_ns - self._first_ns)))
        own = self._asked[key]
        dear, room_ns = own.each_ns / own.weight, num_devices * span_ns
        totals = {other: one.total_ns * _decay(now_ns - one.at_ns) for other, one in self._asked.items()}
        if sum(totals.values()) < _OVERLOAD * room_ns:
            return 1.0
        cheaper = [other for other, one in self._asked.items() if other != key and one.each_ns / one.weight < dear]
        return max(0.0, room_ns - sum(totals[other] for other in cheaper)) / own.total_ns


def _decay(passed_ns: float) -> float:
    return exp(-max(0.0, passed_ns) / _RECENT_NS)
