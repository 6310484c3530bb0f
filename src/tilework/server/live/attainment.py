"""Which deadlines were kept, by class, tenant and model: since the start, and in the latest minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tilework.core.request import Request
from tilework.core.time import NS_PER_S

WINDOW_NS = 600 * NS_PER_S
MOST_RECENT = 50_000
"""How many ends the window holds at most; of a busier server it shows less than its minutes."""


class Group(NamedTuple):
    """What is counted together: `by` is `class`, `tenant` or `model`, and `name` the one of it."""

    by: str
    name: str


@dataclass(slots=True)
class Counts:
    """Requests that have ended: by their deadline, after it, without one (cancelled ones are there, too), and those
    that were refused. The first two again for the window.
    """

    on_time: int = 0
    late: int = 0
    others: int = 0
    refused: int = 0
    recent_on_time: int = 0
    recent_late: int = 0


class _End(NamedTuple):
    at_ns: int
    groups: tuple[Group, ...]
    is_met: bool


@dataclass(slots=True, eq=False)
class Attainment:
    """Counts each request in its three groups. Times only grow."""

    counts: dict[Group, Counts] = field(default_factory=dict)
    _recent: deque[_End] = field(default_factory=deque)

    def refused(self, request: Request, now_ns: int) -> None:
        self._forget(now_ns)
        for group in _groups(request):
            self._of(group).refused += 1

    def ended(self, request: Request, is_met: bool | None, now_ns: int) -> None:
        """`is_met` as `Request.met_deadline` says it."""
        self._forget(now_ns)
        groups = _groups(request)
        for counts in map(self._of, groups):
            if is_met is None:
                counts.others += 1
            elif is_met:
                counts.on_time += 1
                counts.recent_on_time += 1
            else:
                counts.late += 1
                counts.recent_late += 1
        if is_met is not None:
            self._recent.append(_End(now_ns, groups, is_met))

    def rows(self, now_ns: int) -> Iterator[tuple[Group, Counts]]:
        """All groups by name, as of now."""
        self._forget(now_ns)
        return iter(sorted(self.counts.items()))

    def _of(self, group: Group) -> Counts:
        counts = self.counts.get(group)
        if counts is None:
            counts = self.counts[group] = Counts()
        return counts

    def _forget(self, now_ns: int) -> None:
        """Take what has left the window out of the recent counts."""
        while self._recent and (self._recent[0].at_ns <= now_ns - WINDOW_NS or len(self._recent) > MOST_RECENT):
            end = self._recent.popleft()
            for group in end.groups:
                if end.is_met:
                    self.counts[group].recent_on_time -= 1
                else:
                    self.counts[group].recent_late -= 1


def _groups(request: Request) -> tuple[Group, ...]:
    return Group("class", request.priority), Group("tenant", request.tenant), Group("model", request.pipeline)
