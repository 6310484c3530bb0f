"""A record in the registry that is there as long as its owner renews its lease."""

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


class KeyOwner:
    """Keeps a record at `key`. It owns the key while `created` is not None. `record` makes the record for a lease.

    A key of another owner is tried again every `retry_s`, until it is free. If the registry is lost, the record ends
    with its lease, after `ttl_s`, and is written again when the registry is back.
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
        """Prepare a record. `taken` is logged, once, if another owner has the key."""
        self._registry = registry
        self._key = key
        self._record = record
        self._taken = taken
        self._ttl_s = ttl_s
        self._beat_s = beat_s
        self._retry_s = retry_s
        self._lease: int | None = None
        self._era = registry.era  # The era in which the lease was granted.
        self._written = b""
        self._due = asyncio.Event()
        self.created: int | None = None

    @property
    def lease(self) -> int | None:
        """Lease of the record, now or once it is written; None if there is none of this era."""
        return self._lease if self._era == self._registry.era else None

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
                finally:
                    self.created = None
                await asyncio.sleep(self._retry_s)
        except asyncio.CancelledError:
            await self._leave()
            raise

    def write_now(self) -> None:
        """Write the record again before the next beat."""
        self._due.set()

    async def _hold(self) -> None:
        """Take the key, and keep it until its lease has ended, or another owner has it.

        The lease is renewed in its own task, so that it does not end while other answers of the registry are late.
        """
        lease = await self._live_lease()
        both = [asyncio.ensure_future(self._keep_lease(lease)), asyncio.ensure_future(self._keep_record(lease))]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _live_lease(self) -> int:
        """Return the present lease or a new one. A lease of an earlier era is revoked, with all that is under it."""
        if self._lease is not None and self.lease is None:
            await self._registry.revoke(self._lease)
        if (lease := self.lease) is None or not await self._registry.renew(lease):
            self._era = self._registry.era
            self._lease = lease = await self._registry.grant(self._ttl_s)
        return lease

    async def _keep_lease(self, lease: int) -> None:
        """Renew the lease until it has ended: every beat, or as soon as the last renewal is answered."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        while self.lease == lease and await self._registry.renew(lease):
            await asyncio.sleep(begin_s + self._beat_s - loop.time())
            begin_s = loop.time()

    async def _keep_record(self, lease: int) -> None:
        """Write the record whenever it has changed, until the key is no longer ours."""
        self._written = b""  # An earlier call may have made an older record there, although its answer was lost.
        self.created = await self._registry.create(self._key, self._record(lease), lease)
        if self.created is None:
            if self._taken is not None:
                _log.error("%s", self._taken)
                self._taken = None
            return
        while await self._write(lease, self.created):
            with suppress(TimeoutError):
                async with asyncio.timeout(self._beat_s):
                    await self._due.wait()
            self._due.clear()

    async def _write(self, lease: int, created: int) -> bool:
        """Write the record if it has changed; return whether the key is still ours."""
        value = self._record(lease)
        if value == self._written:
            return True
        is_ours = await self._registry.put(self._key, value, lease, Guard(self._key, created)) is not None
        self._written = value
        return is_ours

    async def _leave(self) -> None:
        if self._lease is not None:
            with suppress(RegistryLost, TimeoutError):  # Else the lease ends by itself.
                async with asyncio.timeout(_LEAVE_S):
                    await self._registry.revoke(self._lease)
