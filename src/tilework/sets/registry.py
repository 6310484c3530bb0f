"""The interface of a registry: a small ordered store of values by key, with leases, guarded writes and a watch.

Keys are texts such as `sets/a`. Each write has a *revision*, a number that only grows. The revision at which a key was
created is its fencing token: a write can be bound to it, so that it fails once another has taken the key.

A registry that was wiped, or restored from a backup, begins a new *era*: revisions begin at a smaller number, and those
of the era before mean nothing. An owner then has to give up what it held by a lease, and to write it again under a new
one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Protocol


class BadRegistry(ValueError):
    """An address that names no registry; the message names the value and the remedy."""


class RegistryLost(ConnectionError):
    """The registry does not answer at any of its addresses, or something else answers there; the message says which."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value, the revisions at which its key was created and last written, and the lease of that write (0: none)."""

    value: bytes
    created: int
    changed: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Guard:
    """The condition of a write: this key exists since it was created at this revision."""

    key: str
    created: int


Entries = Mapping[str, Entry]


class Registry(Protocol):
    """Values that servers share. Methods raise RegistryLost without an answer: then a change was made, or not."""

    @property
    def era(self) -> int:
        """Number of eras that have ended, as far as answers have shown."""

    async def grant(self, ttl_s: int) -> int:
        """Return a new lease. Entries under it are removed when it was not renewed for `ttl_s` seconds."""

    async def renew(self, lease: int) -> bool:
        """Renew a lease for its full time; return whether it was still there."""

    async def revoke(self, lease: int) -> None:
        """End a lease, and remove the entries under it."""

    async def create(self, key: str, value: bytes, lease: int) -> int | None:
        """Write an absent key and return its revision; None if the key exists already, and not under this lease."""

    async def put(self, key: str, value: bytes, lease: int, guard: Guard) -> int | None:
        """Write a key and return the revision; None if the guard does not hold, or the lease has ended."""

    def watch(self) -> AsyncGenerator[Entries, None]:
        """Yield all entries: at once, and again whenever some have changed. The mapping may be changed in place."""

    async def close(self) -> None: ...
