"""The times since which sets are in the registry, or are missing from it, as the node manager has seen them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set


class Presence:
    """Times since when sets are there or away, in seconds of one clock. A new record of a set restarts its time."""

    def __init__(self) -> None:
        self._there: dict[str, tuple[int, float]] = {}  # By name: the revision of its record, and since when.
        self._away: dict[str, float] = {}

    def clear(self) -> None:
        """Forget all: times count from what is seen next."""
        self._there, self._away = {}, {}

    def see(self, sets: Mapping[str, int], others: Iterable[str], now_s: float) -> None:
        """Note the sets that are there, each with the revision of its record's creation; `others` may be away."""
        self._there = {
            name: self._there[name] if self._there.get(name, (0,))[0] == created else (created, now_s)
            for name, created in sets.items()
        }
        self._away = {name: self._away.get(name, now_s) for name in others if name not in sets}

    def steady(self, now_s: float, for_s: float) -> Set[str]:
        """Return the sets that have been there all the time for `for_s`."""
        return {name for name, (_, since_s) in self._there.items() if now_s - since_s >= for_s}

    def gone(self, now_s: float, for_s: float) -> Set[str]:
        """Return the sets that have been away for `for_s`."""
        return {name for name, since_s in self._away.items() if now_s - since_s >= for_s}
