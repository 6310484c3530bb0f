"""Since when each set is in the registry, or is not, as the node manager has seen it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set


class Presence:
    """Times are seconds of one clock. A set whose record was written anew was away: it counts from then."""

    def __init__(self) -> None:
        self._there: dict[str, tuple[int, float]] = {}  # By name: the revision of its record, and since when.
        self._away: dict[str, float] = {}

    def clear(self) -> None:
        """What is seen next begins then."""
        self._there, self._away = {}, {}

    def see(self, sets: Mapping[str, int], others: Iterable[str], now_s: float) -> None:
        """These sets are there, by name with the revision at which the record was created; `others` may be away."""
        self._there = {
            name: self._there[name] if self._there.get(name, (0,))[0] == created else (created, now_s)
            for name, created in sets.items()
        }
        self._away = {name: self._away.get(name, now_s) for name in others if name not in sets}

    def steady(self, now_s: float, for_s: float) -> Set[str]:
        """Sets that have been there all the time for so long."""
        return {name for name, (_, since_s) in self._there.items() if now_s - since_s >= for_s}

    def gone(self, now_s: float, for_s: float) -> Set[str]:
        """Sets that have been away for so long."""
        return {name for name, since_s in self._away.items() if now_s - since_s >= for_s}
