"""The producers of a ring as its consumer knows them: which may write, which have ended, and how to end a stuck one."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableSequence
from dataclasses import dataclass
from typing import Protocol

from tilework.comm.ring.layout import MAX_OWNERS


class Access(Protocol):
    """The access by which a producer may write to the memory, and how it ends. Each back end has its own."""

    @property
    def connection(self) -> socket.socket | None:
        """Connection that is readable when the producer has rung or ended. None for one of a former consumer."""

    def is_ended(self) -> bool:
        """Return whether the producer has ended or left. After `close` no part of it writes any more."""

    def revoke(self) -> bool:
        """End the access, whatever the producer does; `is_ended` follows soon. False if that is impossible here."""

    def close(self) -> None: ...


@dataclass(slots=True)
class RingMember:
    """A producer that may write."""

    owner: int
    epoch: int
    access: Access
    is_revoked: bool = False

    def revoke(self) -> bool:
        """Fence the producer, once; return False if that was tried before or cannot be done."""
        if self.is_revoked:
            return False
        self.is_revoked = True
        return self.access.revoke()


class Members:
    """Members by owner id; `epochs` counts the holders of each id. Freed ids are given away again."""

    def __init__(self, epochs: MutableSequence[int]) -> None:
        self._free = deque(range(MAX_OWNERS))
        self._epochs = epochs
        self.present: dict[int, RingMember] = {}
        self.ended: set[int] = set()
        """Fenced owners, which write nothing any more. Their last entries may still be in the ring."""
        self.adopted: set[int] = set()
        """Owners that are present, but not connected: a former consumer has taken them in. They connect when they
        notice, as new members.
        """

    @property
    def is_full(self) -> bool:
        return not self._free

    def adopt(self, holders: Mapping[int, tuple[int, Access]]) -> Collection[int]:
        """Take over members from a former consumer, by owner the epoch and access; return those that have ended since.
        Their entries are all in the ring.
        """
        ended = []
        for owner, (epoch, access) in holders.items():
            self._epochs[owner] = epoch
            if access.is_ended():
                access.close()
                ended.append(owner)
            else:
                self._free.remove(owner)
                self.present[owner] = RingMember(owner, epoch, access)
                self.adopted.add(owner)
        return ended

    def note_ended(self, owners: Collection[int]) -> None:
        """Do not give these ids away: entries of their former holders are in the ring."""
        self.ended.update(owners)
        for owner in owners:
            self._free.remove(owner)

    def take_in(self, grant: Callable[[int, int], Access]) -> RingMember | None:
        """Give an id away; return None if the producer is gone.

        `grant` tells a producer its id and epoch, and returns the access that it has given; it raises OSError if the
        producer is gone.
        """
        owner = self._free.popleft()
        epoch = self._epochs[owner] = self._epochs[owner] + 1
        try:
            access = grant(owner, epoch)
        except OSError:
            self._free.append(owner)
            return None
        member = self.present[owner] = RingMember(owner, epoch, access)
        return member

    def drop_if_ended(self, owner: int) -> bool:
        """Return whether the member has just ended; it is then fenced."""
        member = self.present[owner]
        if not member.access.is_ended():
            return False
        member.access.close()
        del self.present[owner]
        self.adopted.discard(owner)
        self.ended.add(owner)
        return True

    def free(self, owner: int) -> None:
        self.ended.remove(owner)
        self._free.append(owner)

    def close(self) -> None:
        for member in self.present.values():
            member.access.close()
        self.present.clear()
