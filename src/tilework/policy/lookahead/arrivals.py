"""When requests with a deadline come: those that can be on time, and those that cannot wait for long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import inf

from tilework.core.request import RequestClass
from tilework.policy.toolkit.known_demands import ByClass

_WEIGHT = 0.1  # Of the latest gap in the mean.
_MOST_CLASSES = 256


@dataclass(slots=True)
class DueArrivals:
    """The latest arrival `last_ns`, and the mean time between two, in which later ones count more; inf before two."""

    last_ns: float = -inf
    gap_ns: float = inf

    def gap_at(self, now_ns: int) -> float:
        """The mean time between two, or the time since the latest if that is longer or there was only one."""
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
        """For each slack, ascending: how many requests with at most this slack come per nanosecond."""
        ordered = sorted((slack_ns, 1 / arrivals.gap_at(now_ns)) for slack_ns, arrivals in self._known.values())
        sums = accumulate(frequency for _, frequency in ordered)
        return tuple((slack_ns, total) for (slack_ns, _), total in zip(ordered, sums, strict=True))
