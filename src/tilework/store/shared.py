"""What all stores on other machines do alike: what this server put there, and what it may not."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tilework.store.index import Index
from tilework.store.results import Result, Stored, StoreUnreachable, TooLarge, Unwritten


class SharedStore(ABC):
    """A `ResultStore` on other machines, where every server that has the same address finds the results.

    The store itself removes what has expired. `max_bytes` bounds one result. `num_bytes` and the number of results are
    those that this server has put there.
    """

    def __init__(self, *, max_bytes: int, ttl_ns: int) -> None:
        self._max_bytes, self._ttl_ns = max_bytes, ttl_ns
        self._own: Index[str] = Index(max_bytes=1 << 62, ttl_ns=ttl_ns)

    @property
    def num_bytes(self) -> int:
        return self._own.num_bytes

    def __len__(self) -> int:
        return len(self._own)

    async def check(self) -> None:
        try:
            await self.reach()
        except StoreUnreachable as error:
            raise StoreUnreachable(f"{error} Start it or make it, or give another address for results.") from error

    async def put(self, uid: str, content: bytes, media_type: str, now_ns: int) -> Stored | TooLarge | Unwritten:
        self._own.sweep(now_ns)
        if len(content) > self._max_bytes:
            return TooLarge(num_bytes=len(content), max_bytes=self._max_bytes)
        try:
            await self.write(uid, content, media_type)
        except StoreUnreachable as error:
            return Unwritten(reason=str(error))
        expires_ns = self._own.expires_ns(now_ns)
        self._own.add(uid, uid, len(content), expires_ns)
        return Stored(expires_ns=expires_ns)

    async def get(self, uid: str, now_ns: int) -> Result | None:
        self._own.sweep(now_ns)
        return await self.find(uid)

    async def holds(self, uid: str, now_ns: int) -> bool:
        return await self.get(uid, now_ns) is not None

    async def delete(self, uid: str) -> None:
        self._own.remove(uid)
        await self.remove(uid)

    @abstractmethod
    async def reach(self) -> None:
        """Raises StoreUnreachable if nothing could be kept now. So do the others."""

    @abstractmethod
    async def write(self, uid: str, content: bytes, media_type: str) -> None:
        """Keep a result for `ttl_ns` from now on."""

    @abstractmethod
    async def find(self, uid: str) -> Result | None: ...

    @abstractmethod
    async def remove(self, uid: str) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...
