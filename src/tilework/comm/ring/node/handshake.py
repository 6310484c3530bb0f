"""Handover of a ring's memory to a producer: over a Unix socket, which then tells each end when the other has ended.

The kernel closes a socket after it has released the memory of the process that held it. So the end of a connection
proves that no instruction of its producer writes to the ring any more.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from tilework.comm.ring.errors import RingClosed, RingError
from tilework.comm.ring.layout import RingLayout

MAGIC = b"tw-ring2"
_GRANT = struct.Struct("<8sIIIIQBBB")
_FDS = 3
_REFUSAL = b"refused "
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Grant:
    """Grant to a producer: its id among the producers of the ring and the epoch of this id, and the ring."""

    layout: RingLayout
    owner: int
    epoch: int
    abandon_after_ns: int
    is_atomic: bool
    is_checked: bool
    is_lasting: bool


def listen(path: str) -> socket.socket:
    """Listen at a path, even if a former listener has left it. The path always has a socket meanwhile."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.setblocking(False)
    with suppress(FileNotFoundError):
        os.unlink(f"{path}-")
    listener.bind(f"{path}-")
    listener.listen(64)
    os.rename(f"{path}-", path)
    return listener


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other end; the process id is 0 if its namespace cannot be seen."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def grant(connection: socket.socket, given: Grant, fds: list[int]) -> None:
    """Hand over the memory, the bell and the owner's file. Raises OSError if the producer is gone."""
    layout = given.layout
    rest = (given.owner, given.epoch, given.abandon_after_ns, given.is_atomic, given.is_checked, given.is_lasting)
    data = _GRANT.pack(MAGIC, layout.slots, layout.units, *rest)
    socket.send_fds(connection, [data], fds)


def refuse(connection: socket.socket, reason: str) -> None:
    """Send the reason, and close."""
    with connection:
        connection.send(_REFUSAL + reason.encode())


def connect(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to the consumer at `address`, before its answer. Raises OSError if none listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def answer(connection: socket.socket) -> tuple[Grant, list[int]]:
    """Return what the consumer grants, and descriptors of the memory, the bell and the owner's file.

    Raises:
        OSError: it has not answered in the time of the connection (BlockingIOError, TimeoutError), or is gone.
        RingError: it refused, or speaks another version.
    """
    data, fds, _, _ = socket.recv_fds(connection, 4096, _FDS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise ConnectionResetError("it has ended")
    if data.startswith(_REFUSAL):
        raise RingError(data.removeprefix(_REFUSAL).decode())
    if len(data) != _GRANT.size or not data.startswith(MAGIC) or len(fds) != _FDS:
        for fd in fds:
            os.close(fd)
        raise RingError("address: this is no ring of this version; run one version on both ends")
    _, slots, units, owner, epoch, abandon_after_ns, *kind = _GRANT.unpack(data)
    is_atomic, is_checked, is_lasting = map(bool, kind)
    return Grant(RingLayout(slots, units), owner, epoch, abandon_after_ns, is_atomic, is_checked, is_lasting), fds


def join(address: str, timeout_s: float) -> tuple[socket.socket, Grant, list[int]]:
    """Connect to the ring at `address`; return the connection and its answer.

    Raises:
        RingClosed: no consumer listens there, or it did not answer in time.
        RingError: it refused, or speaks another version.
    """
    try:
        connection = connect(address, timeout_s)
        try:
            given, fds = answer(connection)
        except (OSError, RingError):
            connection.close()
            raise
    except OSError as error:
        raise RingClosed(f"address: no consumer answers at {address!r} within {timeout_s:g} s ({error})") from error
    connection.setblocking(False)
    return connection, given, fds
