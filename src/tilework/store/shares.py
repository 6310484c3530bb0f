"""Entries and bytes of each owner in a bounded place, and which entry goes first when it is full."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict


class Shares:
    """Entries of each owner, in order of arrival, and their bytes.

    Rejected: the oldest entry of all goes first. An owner of many entries would push out those of all others.
    """

    def __init__(self) -> None:
        self._entries: defaultdict[str, OrderedDict[str, int]] = defaultdict(OrderedDict)
        self._bytes: Counter[str] = Counter()

    def add(self, owner: str, uid: str, num_bytes: int) -> None:
        self._entries[owner][uid] = num_bytes
        self._bytes[owner] += num_bytes

    def remove(self, owner: str, uid: str) -> None:
        self._bytes[owner] -= self._entries[owner].pop(uid)
        if not self._entries[owner]:
            del self._entries[owner], self._bytes[owner]

    def oldest_of_most_entries(self) -> str:
        """Return the oldest entry of the owner that has the most entries; there must be one."""
        most = max(self._entries, key=lambda one: len(self._entries[one]))
        return next(iter(self._entries[most]))

    def oldest_of_most_bytes(self, newcomer: str = "", num_bytes: int = 0) -> str:
        """Return the oldest entry of the owner that has the most bytes; there must be one.

        `newcomer` is about to get `num_bytes` more, which count.
        """
        most = max(self._entries, key=lambda one: self._bytes[one] + (num_bytes if one == newcomer else 0))
        return next(iter(self._entries[most]))
