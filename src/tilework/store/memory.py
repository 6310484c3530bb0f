"""Results in this process's memory, under a time to live and a cap in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.store.index import Index
from tilework.store.results import LocalStore, Result, Stored, TooLarge


@dataclass(frozen=True, slots=True)
class InMemory:
    """A `Result` whose content is shared with the store."""

    content: bytes = field(repr=False)
    media_type: str

    @property
    def num_bytes(self) -> int:
        return len(self.content)

    async def read(self, part: range | None = None) -> bytes:
        return self.content if part is None else self.content[part.start : part.stop]

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class MemoryStore(LocalStore):
    """A `ResultStore` that removes expired results whenever it is used.

    The cap counts contents, not the bookkeeping of about 300 bytes per result.
    """

    def __init__(self, *, max_bytes: int, ttl_ns: int) -> None:
        self._index: Index[InMemory] = Index(max_bytes=max_bytes, ttl_ns=ttl_ns)

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    def __len__(self) -> int:
        return len(self._index)

    async def put(self, uid: str, content: bytes, media_type: str, now_ns: int) -> Stored | TooLarge:
        self._index.sweep(now_ns)
        if len(content) > self._index.max_bytes:
            return TooLarge(num_bytes=len(content), max_bytes=self._index.max_bytes)
        expires_ns = self._index.expires_ns(now_ns)
        self._index.add(uid, InMemory(content, media_type), len(content), expires_ns)
        return Stored(expires_ns=expires_ns)

    async def get(self, uid: str, now_ns: int) -> Result | None:
        self._index.sweep(now_ns)
        return self._index.get(uid, now_ns)

    async def holds(self, uid: str, now_ns: int) -> bool:
        self._index.sweep(now_ns)
        return self._index.get(uid, now_ns) is not None

    async def delete(self, uid: str) -> None:
        self._index.remove(uid)
