"""What a back end gives to both ends of a ring: node/site.py has the one on a node, ucx/site.py the one over UCX."""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Protocol

from tilework.comm.ring.layout import Layout
from tilework.comm.ring.members import Access, Member, Members
from tilework.comm.ring.transport import Transport

Admission = Generator[None, None, Member | None]
"""Takes a producer in; yields where it must wait until the connection can be read. None: the producer was refused or
is gone, and the connection is closed, as it is if the generator is closed."""


class Site(Protocol):
    """Where a ring is, for its consumer."""

    layout: Layout
    memory: mmap
    address: str
    """What producers connect to."""
    is_one_sided: bool
    listener: socket.socket

    @property
    def transport(self) -> Transport: ...

    @property
    def bell(self) -> int | None:
        """An eventfd that producers write to; None if each rings by its connection."""

    def holders(self) -> Mapping[int, tuple[int, Access]]:
        """Producers that a former consumer has taken in: by owner, the epoch and what it may write by."""

    def admit(self, connection: socket.socket, members: Members, abandon_after_ns: int) -> Admission: ...

    def close(self) -> None:
        """End the ring. The memory stays for those who still read it."""


@dataclass(slots=True)
class Attachment:
    """What a producer has of a ring, until it calls `close`: nothing of it writes after that."""

    owner: int
    epoch: int
    abandon_after_ns: int
    is_lasting: bool
    """Whether another consumer may take over when this one ends."""
    transport: Transport
    connection: socket.socket
    """Ends with the consumer, and by this producer's end the consumer knows that it has left."""
    bell: int
    """The descriptor to which eight bytes are written to wake the consumer."""
    close: Callable[[], None]


def is_ended(connection: socket.socket) -> bool:
    """Whether the other end is gone. After the grant nothing is sent but the ring of a bell, which is taken here."""
    try:
        return connection.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
