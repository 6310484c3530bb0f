"""A registry that answers late, not at all, or with what was so a while ago, or that loses what it held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

import clock
from tilework.sets.local import LocalRegistry
from tilework.sets.records import LEADER, ROUTES, Route, decoded
from tilework.sets.registry import Entries, Guard, RegistryLost

T = TypeVar("T")
_SILENCE_S = 2.0  # After which a watch asks whether the registry is still there.


class Forgetful(LocalRegistry):
    """A registry whose machine may lose its disk, or get back an old copy of it."""

    def wipe(self) -> None:
        """Begin with nothing, as on the first day."""
        self.restore(({}, {}, 0))

    def backup(self) -> object:
        """What there is now."""
        return deepcopy((self._entries, self._leases, self._revision))

    def restore(self, kept: object) -> None:
        """Begin with what there was then; leases have their full time again, as after each start of an etcd."""
        assert isinstance(kept, tuple)
        self._entries, self._leases, self._revision = kept
        for one in self._leases.values():
            one.end_s = self._now_s() + one.ttl_s
        self.era += 1
        self._changed.set()


class Late(LocalRegistry):
    """A registry whose every answer takes this long to come."""

    def __init__(self, late_s: float) -> None:
        super().__init__()
        self._late_s = late_s

    async def grant(self, ttl_s: int) -> int:
        return await self._late(await super().grant(ttl_s))

    async def renew(self, lease: int) -> bool:
        return await self._late(await super().renew(lease))

    async def create(self, key: str, value: bytes, lease: int) -> int | None:
        return await self._late(await super().create(key, value, lease))

    async def put(self, key: str, value: bytes, lease: int, guard: Guard) -> int | None:
        return await self._late(await super().put(key, value, lease, guard))

    async def _late(self, answer: T) -> T:
        await clock.sleep(self._late_s)
        return answer


@dataclass(slots=True)
class Shared:
    """What the registry really holds, all that it ever held, and the epoch of each leader that has written a route."""

    registry: LocalRegistry = field(default_factory=LocalRegistry)
    past: list[Entries] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def note(self) -> None:
        """Keep a copy of what there is now."""
        now = dict(self.registry._entries)
        if not self.past or self.past[-1] != now:
            self.past.append(now)

    def check_route(self, value: bytes) -> None:
        """A route was written: by the leader that there is."""
        route, leader = decoded(Route, value), self.registry._entries.get(LEADER)
        if route is not None and (leader is None or leader.created != route.epoch):
            self.violations.append(f"a leader of epoch {route.epoch} writes, and was replaced")


@dataclass(slots=True)
class Unsteady:
    """The registry as one server or agent reaches it. While it `is_cut`, nothing is answered."""

    shared: Shared
    random: Random
    share: float
    is_cut: bool = False

    @property
    def era(self) -> int:
        return self.shared.registry.era

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer; or none, and then it may have been done."""
        if self.random.random() < self.share:
            await clock.sleep(self.random.choice((0.5, 2.0, 6.0)))
        if self.is_cut or self.random.random() < self.share / 4:
            raise RegistryLost("it was not reached")
        answer = await call()
        self.shared.note()
        if self.random.random() < self.share / 4:
            raise RegistryLost("its answer was lost")
        return answer

    async def grant(self, ttl_s: int) -> int:
        return await self._call(lambda: self.shared.registry.grant(ttl_s))

    async def renew(self, lease: int) -> bool:
        return await self._call(lambda: self.shared.registry.renew(lease))

    async def revoke(self, lease: int) -> None:
        await self._call(lambda: self.shared.registry.revoke(lease))

    async def create(self, key: str, value: bytes, lease: int) -> int | None:
        return await self._call(lambda: self.shared.registry.create(key, value, lease))

    async def put(self, key: str, value: bytes, lease: int, guard: Guard) -> int | None:
        async def put() -> int | None:
            revision = await self.shared.registry.put(key, value, lease, guard)
            if revision is not None and key.startswith(ROUTES):
                self.shared.check_route(value)
            return revision

        return await self._call(put)

    async def watch(self) -> AsyncGenerator[Entries, None]:
        """At first perhaps what a member of the registry still believes that lags behind, then all that changes."""
        if self.shared.past and self.random.random() < self.share:
            yield self.shared.past[-self.random.randint(1, min(20, len(self.shared.past)))]
        watched = self.shared.registry.watch()
        changed = asyncio.ensure_future(anext(watched))
        try:
            while True:
                await asyncio.wait({changed}, timeout=_SILENCE_S)
                if changed.done() and self.random.random() < self.share:
                    await clock.sleep(self.random.uniform(0.0, 1.0))
                if self.is_cut or (changed.done() and self.random.random() < self.share / 8):
                    raise RegistryLost("it was not reached")
                if changed.done():
                    yield dict(changed.result())
                    changed = asyncio.ensure_future(anext(watched))
        finally:
            changed.cancel()
            await asyncio.wait({changed})

    async def close(self) -> None: ...
