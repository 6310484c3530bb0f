"""The interface of stores of results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The result can be fetched until `expires_ns`, unless newer results evict it."""

    expires_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    """The result alone exceeds the store's cap; nothing was stored or evicted."""

    num_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwritten:
    """It could not be written, for instance because the disk is full; nothing was stored or evicted.

    `reason` is for the log. `places` are those that were tried, in words for the result's client.
    """

    reason: str
    places: str = "to its disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What waits on this machine's disk until it can be written to other machines.

    `unwritten_ns` is the time since these took a result; 0 while nothing waits. `outlives_server`: a later start
    writes what is left.
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
        """The bytes at these places, or all. Raises StoreUnreachable."""

    def close(self) -> None: ...


class ResultStore(Protocol):
    """Keeps results for a while. Times are of one clock of the caller's choice, and do not go backwards.

    Where results are on other machines, `get`, `holds` and `delete` raise StoreUnreachable.
    """

    @property
    def num_bytes(self) -> int:
        """The size of all results, including expired ones that are not removed yet."""

    def __len__(self) -> int:
        """The number of results."""

    async def open(self) -> None:
        """Begin, before anything else is asked for. Raises StoreUnreachable if nothing could be kept."""

    def refusal(self, num_results: int) -> str | None:
        """Why this number of further results could not be kept, in words for a client; None if they could."""

    def backlog(self) -> Backlog: ...

    async def written(self) -> None:
        """Wait until no result would be lost with this server."""

    async def put(self, uid: str, content: bytes, media_type: str, now_ns: int) -> Stored | TooLarge | Unwritten:
        """Keep a result; one with the same uid is replaced."""

    async def get(self, uid: str, now_ns: int) -> Result | None:
        """The result, which the caller closes, or None if it is unknown, expired, evicted or deleted."""

    async def holds(self, uid: str, now_ns: int) -> bool:
        """Whether `get` would find it."""

    async def delete(self, uid: str) -> None:
        """Delete a result before its expiry; does nothing if there is none."""

    async def close(self) -> None:
        """Close connections. Results stay where they are, but for those that would be lost with this server."""


class LocalStore:
    """What all stores of this process or its disk have in common: nothing can be unreachable."""

    async def open(self) -> None:
        """There is nothing to begin."""

    def refusal(self, _num_results: int) -> str | None:
        return None

    def backlog(self) -> Backlog:
        return Backlog()

    async def written(self) -> None:
        """What is kept is where it stays."""

    async def close(self) -> None:
        """There is nothing to close."""
