"""The interface of stores of results."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """It could not be written, for instance because the disk is full; nothing was stored or evicted."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    content: bytes = field(repr=False)
    media_type: str


class ResultStore(Protocol):
    """Keeps results for a while. Times are of one clock of the caller's choice, and do not go backwards."""

    @property
    def num_bytes(self) -> int:
        """The size of all results, including expired ones that are not removed yet."""

    def __len__(self) -> int:
        """The number of results."""

    async def put(self, uid: str, content: bytes, media_type: str, now_ns: int) -> Stored | TooLarge | Unwritten:
        """Keep a result; one with the same uid is replaced."""

    async def get(self, uid: str, now_ns: int) -> Result | None:
        """The result, or None if it is unknown, expired, evicted or deleted."""

    async def holds(self, uid: str, now_ns: int) -> bool:
        """Whether `get` would find it."""

    async def delete(self, uid: str) -> None:
        """Delete a result before its expiry; does nothing if there is none."""
