"""Ways to send messages to one receiver, under one interface: rings, pipes, ZeroMQ; network_transports.py has more."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import zmq

from tilework.comm.ring.consumer import Ring
from tilework.comm.ring.producer import Producer

RING_BYTES = 64 << 20
SLOTS = 4096
SMALL = 8192
"""Shorter messages are sent and received many at once, where that is possible."""


class Receiver(Protocol):
    """The receiving end. `addresses` has one for each sender."""

    @property
    def addresses(self) -> Sequence[Any]: ...

    def hand_over(self) -> None:
        """The senders have their addresses."""

    def receive(self, timeout_s: float) -> Sequence[Any]:
        """Some messages that have come; none if there are none within the time, or not yet all of one."""

    def close(self) -> None: ...


class Sender(Protocol):
    def send(self, messages: Sequence[bytes]) -> None: ...
    def close(self) -> None:
        """Return when all messages are on their way, whatever happens to this process."""


class RingReceiver:
    """A ring for all senders. Long messages are received in place. Sleeps when there is nothing, as the others do."""

    def __init__(self, num_senders: int, size: int, *, is_checked: bool) -> None:
        self.ring = Ring.create(RING_BYTES, SLOTS, is_checked=is_checked, abandon_after_s=0.2, fence_after_s=10.0)
        self.addresses: Sequence[Any] = [self.ring.address()] * num_senders
        self._size = size

    def hand_over(self) -> None:
        pass

    def receive(self, timeout_s: float) -> Sequence[Any]:
        if self._size < SMALL:
            return [payload for _, payload in self.ring.take(512, timeout_s)]
        message = self.ring.recv(timeout_s)
        if message is None:
            return ()
        with message:
            return (bytes(message.payload[:16]),)

    def close(self) -> None:
        self.ring.close()


class RingSender:
    def __init__(self, address: str) -> None:
        self._producer = Producer.connect(address)

    def send(self, messages: Sequence[bytes]) -> None:
        self._producer.send_all([(b"", message) for message in messages], timeout_s=60)

    def close(self) -> None:
        self._producer.close()


class PipeReceiver:
    """A pipe of `multiprocessing` for each sender, as between the runtime and its workers."""

    def __init__(self, num_senders: int, size: int) -> None:
        pairs = [multiprocessing.Pipe(duplex=False) for _ in range(num_senders)]
        self._ours = [ours for ours, _ in pairs]
        self.addresses = [theirs for _, theirs in pairs]

    def hand_over(self) -> None:
        for connection in self.addresses:
            connection.close()  # Else the end of a sender is not seen.

    def receive(self, timeout_s: float) -> Sequence[Any]:
        got = []
        for connection in wait(self._ours, timeout_s):
            assert isinstance(connection, Connection)
            try:
                got.append(connection.recv_bytes())
            except (EOFError, OSError):
                self._ours.remove(connection)
        return got

    def close(self) -> None:
        for connection in self._ours:
            connection.close()


class PipeSender:
    def __init__(self, address: Connection) -> None:
        self._connection = address

    def send(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self._connection.send_bytes(message)

    def close(self) -> None:
        self._connection.close()


class ZmqReceiver:
    """ZeroMQ's PUSH and PULL over a Unix socket, with its queues as they are by default, without copies in Python."""

    def __init__(self, num_senders: int, size: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="zmq-")
        self.addresses = [f"ipc://{self._folder}/socket"] * num_senders
        self._is_copied = size < SMALL

    def hand_over(self) -> None:
        """Senders are forked before, since a context of ZeroMQ does not outlive that; they find the socket later."""
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._socket.bind(self.addresses[0])

    def receive(self, timeout_s: float) -> Sequence[Any]:
        if not self._socket.poll(round(timeout_s * 1000)):
            return ()
        return list(self._waiting())

    def _waiting(self) -> Iterator[Any]:
        for _ in range(512):
            try:
                message: Any = self._socket.recv(zmq.NOBLOCK, copy=self._is_copied)
            except zmq.Again:
                return
            yield message if self._is_copied else bytes(message.buffer[:16])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


class ZmqSender:
    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.connect(address)

    def send(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self._socket.send(message, 0, copy=len(message) < SMALL)

    def close(self) -> None:
        self._socket.close()
        zmq.Context.instance().term()


@dataclass(frozen=True, slots=True)
class Way:
    """`receiver` is made with the number of senders and the bytes of a message, `sender` with one of its addresses."""

    receiver: Callable[[int, int], Receiver]
    sender: Callable[[Any], Sender]


NODE_WAYS = {
    "ring": Way(partial(RingReceiver, is_checked=False), RingSender),
    "ring, checked": Way(partial(RingReceiver, is_checked=True), RingSender),
    "pipe": Way(PipeReceiver, PipeSender),
    "ZeroMQ": Way(ZmqReceiver, ZmqSender),
}


def open_sender(way: Way, addresses: Sequence[Any], index: int) -> Sender:
    """The sender of this number, in its forked process."""
    for other, address in enumerate(addresses):
        if other != index and isinstance(address, Connection):
            address.close()  # Else the end of the other sender is not seen.
    return way.sender(addresses[index])
