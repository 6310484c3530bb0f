"""The order in which the calls of a tenant arrived."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class Arrivals:
    """The uids of a tenant's calls in order of arrival. A walk can begin at any of them without passing the others."""

    def __init__(self) -> None:
        self._num_added = 0
        self._numbers: dict[str, int] = {}
        self._order: list[tuple[int, str]] = []

    def add(self, uid: str) -> None:
        self._num_added += 1
        self._numbers[uid] = self._num_added
        self._order.append((self._num_added, uid))

    def remove(self, uid: str) -> None:
        del self._order[self._place(uid)]
        del self._numbers[uid]

    def walk(self, after: str | None, *, newest_first: bool) -> Iterator[str]:
        """Return the uids that follow `after` in this direction, or all. No call may come or go meanwhile."""
        if newest_first:
            end = len(self._order) if after is None else self._place(after)
            places = range(end - 1, -1, -1)
        else:
            places = range(0 if after is None else self._place(after) + 1, len(self._order))
        return (self._order[place][1] for place in places)

    def _place(self, uid: str) -> int:
        return bisect_left(self._order, (self._numbers[uid], uid))
