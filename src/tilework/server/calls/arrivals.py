"""The order in which the calls of a tenant arrived."""

from __future__ import annotations

from bisect import bisect_left


class Arrivals:
    """The uids of a tenant's calls in order of arrival; a page of them costs its own length."""

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

    def page(self, after: str | None, limit: int) -> list[str]:
        """At most `limit` uids that came before `after`, newest first."""
        end = len(self._order) if after is None else self._place(after)
        return [uid for _, uid in reversed(self._order[max(0, end - limit) : end])]

    def _place(self, uid: str) -> int:
        return bisect_left(self._order, (self._numbers[uid], uid))
