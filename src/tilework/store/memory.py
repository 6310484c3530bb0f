"""Results in this process's memory, under a time to live and a cap in bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tilework.store.results import Result, Stored, TooLarge


@dataclass(frozen=True, slots=True)
class _Entry:
    result: Result
    expires_ns: int


class MemoryStore:
    """A `ResultStore` that sweeps out what has expired whenever it is used.

    Beyond the cap the oldest result goes first. All results live equally long, so the order of arrival is also the
    order of expiry: a sweep looks at the oldest only. The cap counts contents, not the bookkeeping of about 300
    bytes per result.
    """

    def __init__(self, *, max_bytes: int, ttl_ns: int) -> None:
        assert max_bytes > 0
        assert ttl_ns > 0
        self._max_bytes = max_bytes
        self._ttl_ns = ttl_ns
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    async def put(self, uid: str, content: bytes, media_type: str, now_ns: int) -> Stored | TooLarge:
        self.sweep(now_ns)
        if len(content) > self._max_bytes:
            return TooLarge(num_bytes=len(content), max_bytes=self._max_bytes)
        self._remove(uid)
        while self._num_bytes + len(content) > self._max_bytes:
            self._remove(next(iter(self._entries)))
        expires_ns = now_ns + self._ttl_ns
        self._entries[uid] = _Entry(Result(content=content, media_type=media_type), expires_ns)
        self._num_bytes += len(content)
        return Stored(expires_ns=expires_ns)

    async def get(self, uid: str, now_ns: int) -> Result | None:
        self.sweep(now_ns)
        entry = self._entries.get(uid)
        return None if entry is None else entry.result

    async def holds(self, uid: str, now_ns: int) -> bool:
        self.sweep(now_ns)
        return uid in self._entries

    async def delete(self, uid: str) -> None:
        self._remove(uid)

    def sweep(self, now_ns: int) -> None:
        """Drop what has expired; a result is gone at `expires_ns` itself."""
        while self._entries:
            uid, entry = next(iter(self._entries.items()))
            if entry.expires_ns > now_ns:
                return
            self._remove(uid)

    def _remove(self, uid: str) -> None:
        entry = self._entries.pop(uid, None)
        if entry is not None:
            self._num_bytes -= len(entry.result.content)
