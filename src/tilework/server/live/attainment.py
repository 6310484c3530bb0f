"""The deadlines that were kept, by class, tenant and model: since the start, and in the latest minutes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tilework.core.request import Request
from tilework.core.time import NS_PER_S

WINDOW_NS = 600 * NS_PER_S
SPAN_NS = 10 * NS_PER_S
"""Span of time whose ends of requests leave the window together, so that memory does not grow with their number."""


class Group(NamedTuple):
    """A group of requests that are counted together: `by` is `class`, `tenant` or `model`, and `name` the one of it."""

    by: str
    name: str


@dataclass(slots=True)
class Counts:
    """Numbers of requests that have ended: on time, late, without a deadline (and cancelled ones), and refused.

    The first two also for the window alone.
    """

    on_time: int = 0
    late: int = 0
    others: int = 0
    refused: int = 0
    recent_on_time: int = 0
    recent_late: int = 0


@dataclass(slots=True)
class _Span:
    """The ends of requests with a deadline in a span of time: numbers by group, on time and late."""

    number: int
    on_time: Counter[Group] = field(default_factory=Counter)
    late: Counter[Group] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Attainment:
    """Counts each request in its three groups. Times only grow."""

    counts: dict[Group, Counts] = field(default_factory=dict)
    _recent: deque[_Span] = field(default_factory=deque)

    def refused(self, request: Request, now_ns: int) -> None:
        self._forget(now_ns)
        for group in _groups(request):
            self._of(group).refused += 1

    def ended(self, request: Request, is_met: bool | None, now_ns: int) -> None:
        """Count a request that has ended; `is_met` is the result of `Request.met_deadline`."""
        self._forget(now_ns)
        for group in _groups(request):
            counts = self._of(group)
            if is_met is None:
                counts.others += 1
            elif is_met:
                counts.on_time += 1
                counts.recent_on_time += 1
                self._span(now_ns).on_time[group] += 1
            else:
                counts.late += 1
                counts.recent_late += 1
                self._span(now_ns).late[group] += 1

    def rows(self, now_ns: int) -> Iterator[tuple[Group, Counts]]:
        """Return all groups by name, as of now."""
        self._forget(now_ns)
        return iter(sorted(self.counts.items()))

    def _of(self, group: Group) -> Counts:
        counts = self.counts.get(group)
        if counts is None:
            counts = self.counts[group] = Counts()
        return counts

    def _span(self, now_ns: int) -> _Span:
        number = now_ns // SPAN_NS
        if not self._recent or self._recent[-1].number != number:
            self._recent.append(_Span(number))
        return self._recent[-1]

    def _forget(self, now_ns: int) -> None:
        """Subtract from the recent counts what has left the window."""
        oldest = (now_ns - WINDOW_NS) // SPAN_NS
        while self._recent and self._recent[0].number <= oldest:
            span = self._recent.popleft()
            for group, count in span.on_time.items():
                self.counts[group].recent_on_time -= count
            for group, count in span.late.items():
                self.counts[group].recent_late -= count


def _groups(request: Request) -> tuple[Group, ...]:
    return Group("class", request.priority), Group("tenant", request.tenant), Group("model", request.pipeline)
