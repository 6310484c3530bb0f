"""The producers of a ring, as its consumer knows them: who may write, who has ended, and ending one that is stuck."""

from __future__ import annotations

import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Collection, MutableSequence
from contextlib import suppress
from dataclasses import dataclass

from tilework.comm.ring.handshake import Grant, grant, is_ended, peer_of, refuse
from tilework.comm.ring.layout import MAX_OWNERS
from tilework.comm.ring.owners import OwnerFiles, open_process


@dataclass(slots=True)
class Member:
    """A producer that may write. `process` is a descriptor of its process, None if that cannot be named here.

    One that was a former consumer's has no connection. It connects when it notices, as a new member.
    """

    owner: int
    epoch: int
    connection: socket.socket | None
    process: int | None
    is_killed: bool = False

    def kill(self) -> bool:
        """End the process, also a stopped one; its connection ends when that is done. False: it cannot be killed."""
        if self.process is None or self.is_killed:
            return False
        self.is_killed = True
        with suppress(ProcessLookupError):
            try:
                signal.pidfd_send_signal(self.process, signal.SIGKILL)
            except PermissionError:
                return False
        return True

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        if self.process is not None:
            os.close(self.process)


class Members:
    """By owner id; `epochs` counts the holders of each. An id that was freed is given away again."""

    def __init__(self, epochs: MutableSequence[int], files: OwnerFiles) -> None:
        self._free = deque(range(MAX_OWNERS))
        self._epochs, self._files = epochs, files
        self.present: dict[int, Member] = {}
        self.ended: set[int] = set()
        """Fenced owners: their processes have ended or have left. Their last entries may still be in the ring."""
        self.adopted: set[int] = set()
        """Owners that are present, but not connected: a former consumer has taken them in."""

    def adopt(self) -> Collection[int]:
        """Take over from a former consumer; returns those who have ended since. Their entries are all in the ring."""
        ended = []
        for owner, holder in self._files.read().items():
            self._epochs[owner] = holder.epoch
            if self._files.is_held(owner):
                self._free.remove(owner)
                self.present[owner] = Member(owner, holder.epoch, None, holder.open_process())
                self.adopted.add(owner)
            else:
                ended.append(owner)
        return ended

    def note_ended(self, owners: Collection[int]) -> None:
        """Do not give these ids away: entries of their former holders are in the ring."""
        self.ended.update(owners)
        for owner in owners:
            self._free.remove(owner)

    def accept(
        self, connection: socket.socket, make_grant: Callable[[int, int], Grant], fds: list[int]
    ) -> Member | None:
        """Take a producer in; None if it was refused or is gone already."""
        pid, uid = peer_of(connection)
        if uid not in (0, os.geteuid()):
            _refuse(connection, f"the ring belongs to user {os.geteuid()}, not to user {uid}")
            return None
        if not self._free:
            _refuse(connection, f"the ring has {MAX_OWNERS} producers already; use a second ring")
            return None
        owner = self._free.popleft()
        epoch = self._epochs[owner] = self._epochs[owner] + 1
        member = Member(owner, epoch, connection, open_process(pid))
        try:
            # It lives after its process was opened, so this is its process and not a later one of the same number.
            if is_ended(connection):
                raise BrokenPipeError
            file = self._files.admit(owner, epoch, pid)
            try:
                grant(connection, make_grant(owner, epoch), [*fds, file])
            finally:
                os.close(file)
        except OSError:
            member.close()
            self._free.append(owner)
            return None
        self.present[owner] = member
        return member

    def look(self, owner: int) -> Member | None:
        """The member, if it has just ended; it is then fenced."""
        member = self.present[owner]
        if self._files.is_held(owner) if member.connection is None else not is_ended(member.connection):
            return None
        del self.present[owner]
        self.adopted.discard(owner)
        self.ended.add(owner)
        return member

    def free(self, owner: int) -> None:
        self.ended.remove(owner)
        self._free.append(owner)

    def close(self) -> None:
        for member in self.present.values():
            member.close()
        self.present.clear()


def _refuse(connection: socket.socket, reason: str) -> None:
    with suppress(OSError):
        refuse(connection, reason)
