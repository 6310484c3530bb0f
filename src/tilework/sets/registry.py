"""What a registry is: a small ordered store of values by key, with leases, guarded writes and a watch.

Keys are texts such as `sets/a`. Each write has a *revision*, a number that only grows; that at which a key was created
is its fencing token: a write can be bound to it, so that it fails once another has taken the key.

A registry that was wiped, or restored from a backup, begins a new *era*: revisions begin at a smaller number, and those
of the era before mean nothing. What one holds by a lease it has to give up then, and to write again under a new one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Protocol


class BadRegistry(ValueError):
    """An address that names no registry; the message names the value and the remedy."""


class RegistryLost(ConnectionError):
    """The registry does not answer at any of its addresses, or what answers is none; the message says which."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value, the revisions at which its key was created and last written, and the lease of that write (0: none)."""

    value: bytes
    created: int
    changed: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Guard:
    """A write happens only while this key exists as it was created at this revision."""

    key: str
    created: int


Entries = Mapping[str, Entry]


class Registry(Protocol):
    """Every method raises RegistryLost if the registry does not answer; then it may have been done, or not."""

    @property
    def era(self) -> int:
        """How many eras have ended, as far as answers have shown."""

    async def grant(self, ttl_s: int) -> int:
        """A new lease. What is written under it is removed when it was not renewed for `ttl_s` seconds."""

    async def renew(self, lease: int) -> bool:
        """Whether the lease was still there, and is now for its full time."""

    async def revoke(self, lease: int) -> None:
        """End a lease, and remove what was written under it."""

    async def create(self, key: str, value: bytes, lease: int) -> int | None:
        """Write a key that is absent; the revision. None if it is there already, and not under this lease."""

    async def put(self, key: str, value: bytes, lease: int, guard: Guard) -> int | None:
        """Write a key; the revision. None if the guard does not hold, or the lease has ended."""

    def watch(self) -> AsyncGenerator[Entries, None]:
        """All entries: at once, and again whenever some have changed. The mapping may be changed in place."""

    async def close(self) -> None: ...
