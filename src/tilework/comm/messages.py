"""Messages between two processes over a Unix socket without a name: pickles, with large buffers beside them.

A message is the number of buffers and the length of the pickle, the lengths of the buffers, the pickle, the buffers.
Buffers are those that objects provide when they are pickled (pickle protocol 5). Neither the sender nor the receiver
copies them: they are read into the memory that the received object then uses.

Reading a pickle runs code that it names. So nothing else in Tilework reads pickles, and no path leads to one: both
ends of such a socket, or of the memory of `to_bytes`, are processes that one of them has started.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Generator, Iterator
from struct import Struct
from typing import Any

import numpy as np

Buffer = bytes | memoryview

_HEAD = Struct("!II")
_LENGTH = Struct("!Q")
_CHUNK = 1 << 16


def encode_message(message: object) -> list[Buffer]:
    """Return the message as pieces, to be sent one after another."""
    handed_out: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(message, protocol=5, buffer_callback=handed_out.append)
    buffers = [one.raw() for one in handed_out]
    lengths = b"".join(_LENGTH.pack(len(one)) for one in buffers)
    return [_HEAD.pack(len(buffers), len(pickled)) + lengths + pickled, *buffers]


def to_bytes(content: object) -> bytes:
    """Pickle `content` for `from_bytes`, to put in a message or in memory without a name. Raises if that fails."""
    return pickle.dumps(content)


def from_bytes(content: bytes | memoryview) -> Any:
    """Return the object of `to_bytes`, which a process of this server has called."""
    return pickle.loads(content)


def send_message(connection: socket.socket, message: object) -> None:
    """Send a message over a blocking socket. Raises OSError, among others BrokenPipeError."""
    pieces = encode_message(message)
    num_sent = connection.sendmsg(pieces)
    for piece in pieces:
        if num_sent < len(piece):
            connection.sendall(memoryview(piece)[num_sent:])
        num_sent = max(0, num_sent - len(piece))


def receive_messages(connection: socket.socket) -> Iterator[Any]:
    """Yield the messages that arrive over a blocking socket, until its other end is closed."""
    reader = MessageReader()
    while num_bytes := _receive(connection, reader.room()):
        yield from reader.received(num_bytes)


def _receive(connection: socket.socket, room: memoryview) -> int:
    try:
        return connection.recv_into(room)
    except ConnectionResetError:
        return 0


class MessageReader:
    """Puts messages together from the bytes of a socket, without I/O: receive into `room()`, then call `received`.

    Long pieces are received where they stay. Short ones share a chunk of memory, so that one system call gets several
    messages.
    """

    def __init__(self) -> None:
        self._chunk = memoryview(bytearray(_CHUNK))
        self._start = self._end = 0  # The filled part of the chunk.
        self._long: memoryview | None = None
        self._filled = 0  # Bytes of the long piece.
        self._message = _read_message()
        self._wanted = next(self._message)

    def room(self) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        return self._chunk[self._end :] if self._long is None else self._long[self._filled :]

    def received(self, num_bytes: int) -> list[Any]:
        """Return the messages that are complete with the next `num_bytes`, which lie in `room()`."""
        messages: list[Any] = []
        if self._long is None:
            self._end += num_bytes
        else:
            self._filled += num_bytes
            if self._filled < len(self._long):
                return messages
            piece, self._long = self._long, None
            self._take(piece, messages)
        while self._end - self._start >= self._wanted:
            start, self._start = self._start, self._start + self._wanted
            self._take(memoryview(bytes(self._chunk[start : self._start])), messages)
        self._make_room()
        return messages

    def _take(self, piece: memoryview, messages: list[Any]) -> None:
        try:
            self._wanted = self._message.send(piece)
        except StopIteration as end:
            messages.append(end.value)
            self._message = _read_message()
            self._wanted = next(self._message)

    def _make_room(self) -> None:
        """Move the beginning of a piece to a place where the rest fits behind it."""
        num_bytes = self._end - self._start
        if self._wanted > _CHUNK:
            # Not a bytearray, which would be filled with zeros first.
            self._long, self._filled = memoryview(np.empty(self._wanted, np.uint8)), num_bytes  # type: ignore[arg-type]
            self._long[:num_bytes] = self._chunk[self._start : self._end]
            self._start = self._end = 0
        elif self._start:
            self._chunk[:num_bytes] = self._chunk[self._start : self._end]
            self._start = 0
            self._end = num_bytes


def _read_message() -> Generator[int, memoryview, Any]:
    """Yield the length of the next piece, get that piece sent, and return the message at the end."""
    num_buffers, num_bytes = _HEAD.unpack((yield _HEAD.size))
    lengths = _LENGTH.iter_unpack((yield num_buffers * _LENGTH.size))
    pickled = yield num_bytes
    buffers: list[memoryview] = []
    for (length,) in lengths:
        buffers.append((yield length))
    return pickle.loads(pickled, buffers=buffers)
