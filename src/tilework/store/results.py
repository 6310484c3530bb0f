"""The interface of stores of results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A result that was kept. It can be fetched until `expires_ns`, unless newer results evict it."""

    expires_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    """A result that alone exceeds the store's cap; nothing was stored or evicted."""

    num_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwritten:
    """A result that could not be written, for instance because the disk is full; nothing was stored or evicted.

    `reason` is for the log. `places` are those that were tried, in words for the result's client.
    """

    reason: str
    places: str = "to its disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Results on this machine's disk that wait until they can be written to other machines.

    `unwritten_ns` is the time since these machines last took a result; 0 while nothing waits. `outlives_server`: a
    later start writes the results that are left.
    """

    num_results: int = 0
    num_bytes: int = 0
    unwritten_ns: int = 0
    outlives_server: bool = True


class StoreUnreachable(OSError):
    """Results cannot be read or written at the moment."""


class Result(Protocol):
    """A result that is being read. It can be read to its end, even if it is deleted meanwhile; then it is closed."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def media_type(self) -> str: ...
    async def read(self, part: range | None = None) -> bytes:
        """Return the bytes at these places, or all. Raises StoreUnreachable."""

    def close(self) -> None: ...


class ResultStore(Protocol):
    """Keeps results for a while. Times are on one clock, chosen by the caller, and do not go backwards.

    If results are on other machines, `get`, `holds` and `delete` raise StoreUnreachable.
    """

    @property
    def num_bytes(self) -> int:
        """The size of all results, including expired ones that are not removed yet."""

    def __len__(self) -> int:
        """The number of results."""

    async def open(self) -> None:
        """Open the store, before any other method is called. Raises StoreUnreachable if nothing could be kept."""

    def refusal(self, num_results: int) -> str | None:
        """Return why this number of further results could not be kept, in words for a client; None if they could."""

    def backlog(self) -> Backlog: ...

    async def written(self) -> None:
        """Wait until no result would be lost with this server."""

    async def put(self, uid: str, content: bytes, media_type: str, now_ns: int) -> Stored | TooLarge | Unwritten:
        """Keep a result; it replaces one with the same uid."""

    async def get(self, uid: str, now_ns: int) -> Result | None:
        """Return the result, which the caller closes; None if it is unknown, expired, evicted or deleted."""

    async def holds(self, uid: str, now_ns: int) -> bool:
        """Return whether `get` would find the result."""

    async def delete(self, uid: str) -> None:
        """Delete a result before its expiry; do nothing if there is none."""

    async def close(self) -> None:
        """Close connections. Results stay where they are, except those that would be lost with this server."""


class LocalStore:
    """Base of the stores in this process or on its disk, which are always reachable."""

    async def open(self) -> None:
        """Do nothing: there is nothing to open."""

    def refusal(self, _num_results: int) -> str | None:
        return None

    def backlog(self) -> Backlog:
        return Backlog()

    async def written(self) -> None:
        """Return at once: results are where they stay."""

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""
