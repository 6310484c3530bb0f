"""The registry of a server that is alone, or of several servers in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from tilework.sets.registry import Entries, Entry, Guard


@dataclass(slots=True)
class _Lease:
    ttl_s: int
    end_s: float
    keys: set[str] = field(default_factory=set)


class LocalRegistry:
    """A `Registry` in this process. `now_s` is the clock of its leases (default: that of the event loop)."""

    era = 0

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        self._now_s = now_s or (lambda: asyncio.get_running_loop().time())
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _Lease] = {}
        self._revision = 0
        self._changed = asyncio.Event()

    async def grant(self, ttl_s: int) -> int:
        self._revision += 1
        self._leases[self._revision] = _Lease(ttl_s, self._now_s() + ttl_s)
        return self._revision

    async def renew(self, lease: int) -> bool:
        self.expire()
        known = self._leases.get(lease)
        if known is not None:
            known.end_s = self._now_s() + known.ttl_s
        return known is not None

    async def revoke(self, lease: int) -> None:
        known = self._leases.pop(lease, None)
        for key in known.keys if known is not None else ():
            del self._entries[key]
        self._changed.set()

    async def create(self, key: str, value: bytes, lease: int) -> int | None:
        self.expire()
        if key not in self._entries:
            return self._write(key, value, lease)
        return self._entries[key].created if lease in self._leases and key in self._leases[lease].keys else None

    async def put(self, key: str, value: bytes, lease: int, guard: Guard) -> int | None:
        self.expire()
        held = self._entries.get(guard.key)
        return self._write(key, value, lease) if held is not None and held.created == guard.created else None

    def _write(self, key: str, value: bytes, lease: int) -> int | None:
        if lease not in self._leases:
            return None
        for other in self._leases.values():
            other.keys.discard(key)
        self._leases[lease].keys.add(key)
        self._revision += 1
        before = self._entries.get(key)
        self._entries[key] = Entry(value, self._revision if before is None else before.created, self._revision, lease)
        self._changed.set()
        return self._revision

    def expire(self) -> None:
        """Remove the entries under leases whose time is up. Each call does that, and a watch learns of it then."""
        for lease in [one for one, known in self._leases.items() if known.end_s <= self._now_s()]:
            for key in self._leases.pop(lease).keys:
                del self._entries[key]
            self._changed.set()

    async def watch(self) -> AsyncGenerator[Entries, None]:
        while True:
            changed = self._changed
            yield self._entries
            await changed.wait()
            if self._changed is changed:
                self._changed = asyncio.Event()

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""
