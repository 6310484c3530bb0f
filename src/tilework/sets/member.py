"""A record of one's own in the registry, which is there as long as its owner renews its lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from tilework.sets.registry import Guard, Registry, RegistryLost

_log = logging.getLogger(__name__)
TTL_S = 10
BEAT_S = 1.0
_LEAVE_S = 1.0


class Member:
    """Keeps a record at `key`, and is its owner while `created` is not None. `record` makes it, with its lease.

    A key that another owner has is tried again every `retry_s`, until it is free. Where the registry is lost, the
    record ends with its lease, after `ttl_s`, and is written again when the registry is back.
    """

    def __init__(
        self,
        registry: Registry,
        key: str,
        record: Callable[[int], bytes],
        *,
        ttl_s: int = TTL_S,
        beat_s: float = BEAT_S,
        retry_s: float = BEAT_S,
        taken: str | None = None,
    ) -> None:
        """`taken` is what is logged, once, when another owner has the key."""
        self._registry, self._key, self._record, self._taken = registry, key, record, taken
        self._ttl_s, self._beat_s, self._retry_s = ttl_s, beat_s, retry_s
        self._lease: int | None = None
        self._written = b""
        self._due = asyncio.Event()
        self.created: int | None = None

    async def run(self) -> None:
        """Own the key whenever that is possible, until cancelled; then it is free at once."""
        was_lost = False
        try:
            while True:
                try:
                    await self._hold()
                    was_lost = False
                except RegistryLost as error:
                    if not was_lost:
                        _log.warning("%s is not in the registry: %s", self._key, error)
                    was_lost = True
                self.created = None
                await asyncio.sleep(self._retry_s)
        finally:
            await self._leave()

    def write_now(self) -> None:
        """Write the record again before the next beat."""
        self._due.set()

    async def _hold(self) -> None:
        """Take the key, and keep it until its lease has ended, or another has it."""
        if self._lease is None or not await self._registry.renew(self._lease):
            self._lease = await self._registry.grant(self._ttl_s)
        self._written = self._record(self._lease)
        self.created = await self._registry.create(self._key, self._written, self._lease)
        if self.created is None:
            if self._taken is not None:
                _log.error("%s", self._taken)
                self._taken = None
            return
        while await self._registry.renew(self._lease):
            if not await self._write(self._lease, self.created):
                return
            self._due.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._beat_s):
                    await self._due.wait()

    async def _write(self, lease: int, created: int) -> bool:
        """Write the record if it has changed; returns whether it is still ours."""
        value = self._record(lease)
        if value == self._written:
            return True
        self._written = value
        return await self._registry.put(self._key, value, lease, Guard(self._key, created)) is not None

    async def _leave(self) -> None:
        self.created = None
        if self._lease is not None:
            with suppress(RegistryLost, TimeoutError):  # Else it ends by itself.
                async with asyncio.timeout(_LEAVE_S):
                    await self._registry.revoke(self._lease)
