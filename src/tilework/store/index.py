"""The index of a store in order of expiry, with a time to live and a cap in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from tilework.store.shares import Shares

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _IndexEntry(Generic[T]):
    value: T
    num_bytes: int
    expires_ns: int


class Index(Generic[T]):
    """Results by uid. Methods that remove results return them, so that their files can be deleted.

    The part of a uid before its last `/` names the result's owner. Beyond the cap, the owner that has the most bytes
    loses its oldest result first. All results live equally long (but for those of a former process with another
    setting), so the order of arrival is also the order of expiry: a sweep looks at the oldest only.
    """

    def __init__(self, *, max_bytes: int, ttl_ns: int) -> None:
        assert max_bytes > 0
        assert ttl_ns > 0
        self.max_bytes = max_bytes
        self._ttl_ns = ttl_ns
        self._entries: OrderedDict[str, _IndexEntry[T]] = OrderedDict()
        self._shares = Shares()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def expires_ns(self, now_ns: int) -> int:
        """Return the expiry of a result that is added now."""
        return now_ns + self._ttl_ns

    def get(self, uid: str, now_ns: int) -> T | None:
        entry = self._entries.get(uid)
        return None if entry is None or entry.expires_ns <= now_ns else entry.value

    def holds(self, uid: str, value: T) -> bool:
        """Return whether this is still the result's value, expired or not."""
        entry = self._entries.get(uid)
        return entry is not None and entry.value == value

    def oldest(self) -> tuple[str, T, int] | None:
        """Return the uid, value and expiry of the result that came first; None if there is none."""
        for uid, entry in self._entries.items():
            return uid, entry.value, entry.expires_ns
        return None

    def add(self, uid: str, value: T, num_bytes: int, expires_ns: int) -> list[T]:
        """Add a result; return the results that it replaces or evicts."""
        removed = self.remove(uid)
        while self._num_bytes + num_bytes > self.max_bytes:
            removed += self.remove(self._shares.oldest_of_most_bytes(_owner(uid), num_bytes))
        self._entries[uid] = _IndexEntry(value, num_bytes, expires_ns)
        self._shares.add(_owner(uid), uid, num_bytes)
        self._num_bytes += num_bytes
        return removed

    def remove(self, uid: str) -> list[T]:
        entry = self._entries.pop(uid, None)
        if entry is None:
            return []
        self._shares.remove(_owner(uid), uid)
        self._num_bytes -= entry.num_bytes
        return [entry.value]

    def sweep(self, now_ns: int) -> list[T]:
        """Remove and return expired results; a result expires exactly at its `expires_ns`."""
        return [value for uid in list(self._expired(now_ns)) for value in self.remove(uid)]

    def _expired(self, now_ns: int) -> Iterator[str]:
        for uid, entry in self._entries.items():
            if entry.expires_ns > now_ns:
                return
            yield uid


def _owner(uid: str) -> str:
    return uid.rpartition("/")[0]
