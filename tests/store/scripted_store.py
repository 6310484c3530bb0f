"""A shared store whose every answer the test chooses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tilework.core.time import NS_PER_S
from tilework.store.results import Result, StoreUnreachable
from tilework.store.shared import SharedStore

TTL_NS = 100 * NS_PER_S


@dataclass(frozen=True)
class Held:
    """A `Result` in memory, and for how long the store was to keep it."""

    content: bytes
    media_type: str
    ttl_ns: int

    @property
    def num_bytes(self) -> int:
        return len(self.content)

    async def read(self, part: range | None = None) -> bytes:
        return self.content if part is None else self.content[part.start : part.stop]

    def close(self) -> None: ...


class ScriptedStore(SharedStore):
    """`problem` is what it says instead of an answer; a write that it `swallows` is done nevertheless.

    While `going` is not set, writes hang. `bugs` are raised by writes first. `tried` are the uids of all writes.
    """

    def __init__(self, *, max_bytes: int = 1000, ttl_ns: int = TTL_NS) -> None:
        super().__init__(max_bytes=max_bytes, ttl_ns=ttl_ns)
        self.held: dict[str, Held] = {}
        self.tried: list[str] = []
        self.bugs: list[Exception] = []
        self.problem = ""
        self.swallows = False
        self.going = asyncio.Event()
        self.going.set()

    async def reach(self) -> None:
        self._answer()

    async def write(self, uid: str, content: bytes, media_type: str, ttl_ns: int) -> None:
        self.tried.append(uid)
        if self.bugs:
            raise self.bugs.pop()
        await self.going.wait()
        if self.swallows or not self.problem:
            self.held[uid] = Held(content, media_type, ttl_ns)
        self._answer()

    async def find(self, uid: str) -> Result | None:
        self._answer()
        return self.held.get(uid)

    async def remove(self, uid: str) -> None:
        self._answer()
        self.held.pop(uid, None)

    async def close(self) -> None: ...

    def _answer(self) -> None:
        if self.problem:
            raise StoreUnreachable(self.problem)
