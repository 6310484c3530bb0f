"""Limits of calls for images per key and minute, and of the share of time that a tenant's promises take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tilework.core.time import NS_PER_S
from tilework.server.tenants import Tenant

_MINUTE_NS = 60 * NS_PER_S


@dataclass(slots=True)
class _Bucket:
    """The calls that a key has left, as of a time; they come back evenly."""

    left: float
    as_of_ns: int


@dataclass(slots=True)
class RequestRates:
    """Token buckets by key (RFC 2697's committed rate): a key may make a minute's calls at once after a minute's rest.

    There is one for each key of a tenant that has a limit, since other keys are refused before. Without keys all calls
    share one.
    """

    _buckets: dict[tuple[str, bytes], _Bucket] = field(default_factory=dict)

    def take(self, tenant: Tenant, key: bytes, now_ns: int) -> int:
        """Count a call, and return 0; if none is left, return the time in ns until there is one."""
        per_minute = tenant.requests_per_minute
        if per_minute is None:
            return 0
        bucket = self._buckets.setdefault((tenant.name, key), _Bucket(per_minute, now_ns))
        bucket.left = min(per_minute, bucket.left + (now_ns - bucket.as_of_ns) * per_minute / _MINUTE_NS)
        bucket.as_of_ns = now_ns
        if bucket.left >= 1:
            bucket.left -= 1
            return 0
        return int((1 - bucket.left) * _MINUTE_NS / per_minute) + 1


@dataclass(slots=True, eq=False)
class _Turn:
    """The turns of a tenant: one promise at a time. The next one may be decided at `free_s`, on the monotonic clock."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    free_s: float = 0.0


@dataclass(slots=True)
class PromiseTurns:
    """Lets the promises of a tenant be decided one after another, in its share of the event loop's time.

    Deciding a call takes milliseconds, in which the loop answers no other. Without turns, each call of other tenants
    would wait for all that one tenant has sent.
    """

    _turns: dict[str, _Turn] = field(default_factory=dict)

    @asynccontextmanager
    async def of(self, tenant: str, share: float) -> AsyncIterator[None]:
        """Wait for the turn of a tenant that may use this share of the time, above 0.

        The time of the block, which waits for nothing, is counted.
        """
        turn = self._turns.setdefault(tenant, _Turn())
        async with turn.lock:
            await asyncio.sleep(max(0.0, turn.free_s - time.monotonic()))
            begin_s = time.thread_time()
            try:
                yield
            finally:
                taken_s = time.thread_time() - begin_s
                turn.free_s = time.monotonic() + taken_s * (1 / share - 1)
