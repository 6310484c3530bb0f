"""Interface of a back end to both ends of a ring: node/site.py has the one on a node, ucx/site.py the one over UCX."""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Protocol

from tilework.comm.ring.layout import RingLayout
from tilework.comm.ring.members import Access, Members, RingMember
from tilework.comm.ring.transport import Transport

Admission = Generator[None, None, RingMember | None]
"""Takes a producer in; yields where it must wait until the connection can be read. Returns None if the producer was
refused or is gone; then, and if the generator is closed, the connection is closed.
"""


class Site(Protocol):
    """Consumer's side of a back end: the memory of a ring and the way for producers to reach it."""

    layout: RingLayout
    memory: mmap
    address: str
    """Address that producers connect to."""
    is_one_sided: bool
    listener: socket.socket

    @property
    def transport(self) -> Transport: ...

    @property
    def bell(self) -> int | None:
        """Eventfd that producers write to; None if each rings by its connection."""

    def holders(self) -> Mapping[int, tuple[int, Access]]:
        """Return the producers that a former consumer has taken in: by owner, the epoch and the access."""

    def admit(self, connection: socket.socket, members: Members, abandon_after_ns: int) -> Admission: ...

    def close(self) -> None:
        """End the ring. The memory stays for processes that still read it."""


@dataclass(slots=True)
class Attachment:
    """Producer's side of a ring until it calls `close`; after that no part of it writes."""

    owner: int
    epoch: int
    abandon_after_ns: int
    is_lasting: bool
    """True if another consumer may take over when this one ends."""
    transport: Transport
    connection: socket.socket
    """Connection that ends with the consumer, and whose end tells the consumer that this producer has left."""
    bell: int
    """Descriptor that takes eight bytes to wake the consumer."""
    close: Callable[[], None]


def is_ended(connection: socket.socket) -> bool:
    """Return whether the other end is gone. After the grant only bells are sent here; this reads them."""
    try:
        return connection.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
