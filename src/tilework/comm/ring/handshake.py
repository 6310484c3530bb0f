"""How a producer gets the memory of a ring: over a Unix socket, which then tells each end that the other has ended.

The kernel closes a socket after it has released the memory of the process that held it. So the end of a connection
proves that no instruction of its producer writes to the ring any more.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from tilework.comm.ring.errors import RingClosed, RingError
from tilework.comm.ring.layout import Layout

MAGIC = b"tw-ring1"
_GRANT = struct.Struct("<8sIIIIQBB")
_REFUSAL = b"refused "
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Grant:
    """What a producer is given: its id among the producers of the ring and the epoch of this id, and the ring."""

    layout: Layout
    owner: int
    epoch: int
    abandon_after_ns: int
    is_atomic: bool
    is_checked: bool


def listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.setblocking(False)
    listener.bind(path)
    listener.listen(64)
    return listener


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of who connected; the id is 0 if the process is in a namespace that cannot be seen."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def grant(connection: socket.socket, given: Grant, fds: list[int]) -> None:
    """Hand the memory and the bell over. Raises OSError if the producer is gone."""
    layout = given.layout
    rest = (given.owner, given.epoch, given.abandon_after_ns, given.is_atomic, given.is_checked)
    data = _GRANT.pack(MAGIC, layout.slots, layout.units, *rest)
    socket.send_fds(connection, [data], fds)


def refuse(connection: socket.socket, reason: str) -> None:
    """Say why, and close."""
    with connection:
        connection.send(_REFUSAL + reason.encode())


def join(address: str, timeout_s: float) -> tuple[socket.socket, Grant, list[int]]:
    """Connect to the ring at `address`: the connection, what is granted, and descriptors of the memory and the bell.

    Raises:
        RingClosed: no consumer listens there, or it did not answer in time.
        RingError: it refused, or speaks another version.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address)
        data, fds, _, _ = socket.recv_fds(connection, 4096, 2)
    except OSError as error:
        connection.close()
        raise RingClosed(f"address: no consumer answers at {address!r} within {timeout_s:g} s ({error})") from error
    if data.startswith(_REFUSAL):
        connection.close()
        raise RingError(data.removeprefix(_REFUSAL).decode())
    if len(data) != _GRANT.size or not data.startswith(MAGIC) or len(fds) != 2:
        connection.close()
        for fd in fds:
            os.close(fd)
        raise RingError(f"address: {address!r} is no ring of this version; run one version on both ends")
    _, slots, units, owner, epoch, abandon_after_ns, is_atomic, is_checked = _GRANT.unpack(data)
    connection.setblocking(False)
    return (
        connection,
        Grant(Layout(slots, units), owner, epoch, abandon_after_ns, bool(is_atomic), bool(is_checked)),
        fds,
    )


def is_ended(connection: socket.socket) -> bool:
    """Whether the other end is gone. Nothing is ever sent after the grant."""
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
