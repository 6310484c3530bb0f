"""The back end on memory that processes of one node share. The kernel ends a writer with its process."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from tilework.comm.ring.backend import Admission, Attachment, is_ended
from tilework.comm.ring.errors import RingError
from tilework.comm.ring.layout import MAX_OWNERS
from tilework.comm.ring.members import Access, Members
from tilework.comm.ring.node.handshake import Grant, grant, listen, peer_of, refuse
from tilework.comm.ring.node.owners import OwnerFiles, open_process
from tilework.comm.ring.node.place import RingPlace
from tilework.comm.ring.transport import has_extension, map_memory, transport


class NodeSite:
    """A ring at a place of this node. Raises RingError if its memory needs the C extension, which is missing here."""

    def __init__(self, place: RingPlace) -> None:
        self._place = place
        self.layout = place.layout
        self.address = place.address
        self.is_one_sided = place.is_atomic
        self.memory = map_memory(place.memory, place.layout.size)
        self.transport = transport(place.layout, self.memory, place.memory, place.is_atomic, place.is_checked)
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._files = OwnerFiles(place.directory)
        self.listener = listen(place.address)

    def holders(self) -> Mapping[int, tuple[int, Access]]:
        return {
            owner: (holder.epoch, _Adopted(self._files, owner, holder.open_process()))
            for owner, holder in self._files.read().items()
        }

    def admit(self, connection: socket.socket, members: Members, abandon_after_ns: int) -> Admission:
        yield from ()  # The kernel says who connected.
        pid, uid = peer_of(connection)
        reason = ""
        if uid not in (0, os.geteuid()):
            reason = f"the ring belongs to user {os.geteuid()}, not to user {uid}"
        elif members.is_full:
            reason = f"the ring has {MAX_OWNERS} producers already; use a second ring"
        if reason:
            with suppress(OSError):
                refuse(connection, reason)
            return None
        access = _Connected(connection, open_process(pid))
        place = self._place
        kind = (place.is_atomic, place.is_checked, place.is_lasting)

        def give(owner: int, epoch: int) -> Access:
            # The producer still lives after its process was opened: it is not a later process of the same number.
            if access.is_ended():
                raise BrokenPipeError
            file = self._files.admit(owner, epoch, pid)
            try:
                given = Grant(place.layout, owner, epoch, abandon_after_ns, *kind)
                grant(connection, given, [place.memory, self.bell, file])
            finally:
                os.close(file)
            return access

        member = members.take_in(give)
        if member is None:
            access.close()
        return member

    def close(self) -> None:
        self.listener.close()
        os.close(self.bell)
        self._place.remove()


@dataclass(slots=True)
class _Connected:
    """A process with the memory; `process` is a descriptor of it, None if it cannot be named here."""

    connection: socket.socket
    process: int | None

    def is_ended(self) -> bool:
        return is_ended(self.connection)

    def revoke(self) -> bool:
        return _kill(self.process)

    def close(self) -> None:
        self.connection.close()
        if self.process is not None:
            os.close(self.process)


@dataclass(slots=True)
class _Adopted:
    """The same for a producer of a former consumer, known only by its file."""

    files: OwnerFiles
    owner: int
    process: int | None
    connection: None = None

    def is_ended(self) -> bool:
        return not self.files.is_held(self.owner)

    def revoke(self) -> bool:
        return _kill(self.process)

    def close(self) -> None:
        if self.process is not None:
            os.close(self.process)


def _kill(process: int | None) -> bool:
    """Kill the process, even a stopped one. The kernel tells when that is done."""
    if process is None:
        return False
    with suppress(ProcessLookupError):
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        except PermissionError:
            return False
    return True


def attach(connection: socket.socket, given: Grant, fds: list[int]) -> Attachment:
    """Return the attachment to what a consumer granted. Owns all that is passed, even when it raises RingError."""
    memory_fd, bell, file = fds
    if given.is_atomic and not has_extension():
        connection.close()
        for fd in fds:
            os.close(fd)
        raise RingError("the ring needs the C extension, which is missing here; install with a C compiler")
    memory = map_memory(memory_fd, given.layout.size)
    attached = transport(given.layout, memory, memory_fd, given.is_atomic, given.is_checked)
    os.close(memory_fd)

    def close() -> None:
        """Close the memory first: the end of the others says that this process cannot write."""
        memory.close()
        connection.close()
        os.close(file)
        os.close(bell)

    whose = (given.owner, given.epoch, given.abandon_after_ns, given.is_lasting)
    return Attachment(*whose, attached, connection, bell, close)
