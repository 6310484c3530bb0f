"""Base of the stores on other machines: results of this server there, and the limits on them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tilework.store.index import Index
from tilework.store.results import Result, Stored, StoreUnreachable, TooLarge, Unwritten


class SharedStore(ABC):
    """Results on other machines: every server that has the same address finds them (`SpooledStore` uses this).

    The store itself removes expired results. `max_bytes` bounds one result. `num_bytes` and the number of results count
    those that this server has put there. All methods but `put` and `close` raise StoreUnreachable.
    """

    def __init__(self, *, max_bytes: int, ttl_ns: int) -> None:
        self.max_bytes = max_bytes
        self._ttl_ns = ttl_ns
        self._own: Index[str] = Index(max_bytes=1 << 62, ttl_ns=ttl_ns)

    @property
    def num_bytes(self) -> int:
        return self._own.num_bytes

    def __len__(self) -> int:
        return len(self._own)

    async def check(self) -> None:
        """Check that results could be kept now. Raises StoreUnreachable, whose message names the remedy."""
        try:
            await self.reach()
        except StoreUnreachable as error:
            raise StoreUnreachable(f"{error} Start it or make it, or give another address for results.") from error

    async def put(
        self, uid: str, content: bytes, media_type: str, now_ns: int, expires_ns: int | None = None
    ) -> Stored | TooLarge | Unwritten:
        """Keep a result until `expires_ns`, or for `ttl_ns` if that is None; it replaces one with the same uid."""
        self._own.sweep(now_ns)
        if len(content) > self.max_bytes:
            return TooLarge(num_bytes=len(content), max_bytes=self.max_bytes)
        if expires_ns is None:
            expires_ns = self._own.expires_ns(now_ns)
        try:
            await self.write(uid, content, media_type, expires_ns - now_ns)
        except StoreUnreachable as error:
            return Unwritten(reason=str(error))
        self._own.add(uid, uid, len(content), expires_ns)
        return Stored(expires_ns=expires_ns)

    async def get(self, uid: str, now_ns: int) -> Result | None:
        """Return the result, which the caller closes; None if it is unknown, expired, evicted or deleted."""
        self._own.sweep(now_ns)
        return await self.find(uid)

    async def holds(self, uid: str, now_ns: int) -> bool:
        """Return whether `get` would find the result."""
        return await self.get(uid, now_ns) is not None

    async def delete(self, uid: str) -> None:
        """Delete a result before its expiry; do nothing if there is none."""
        self._own.remove(uid)
        await self.remove(uid)

    @abstractmethod
    async def reach(self) -> None:
        """Check that results could be kept now. Raises StoreUnreachable, as `write`, `find` and `remove` do."""

    @abstractmethod
    async def write(self, uid: str, content: bytes, media_type: str, ttl_ns: int) -> None:
        """Keep a result for `ttl_ns` from now on."""

    @abstractmethod
    async def find(self, uid: str) -> Result | None: ...

    @abstractmethod
    async def remove(self, uid: str) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...
