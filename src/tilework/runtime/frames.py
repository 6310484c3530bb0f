"""The messages of multiprocessing's connections, for an event loop: theirs blocks until a message is complete."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("!i")  # Theirs have another one beyond 2 GiB, which no message of ours is.


def framed(message: bytes) -> bytes:
    """What `Connection.recv_bytes` takes for this message."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Puts together what `Connection.send_bytes` has sent."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take what has come; yields the messages that are complete."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            assert length >= 0, f"a message of {length} bytes"
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            message = bytes(memoryview(self._bytes)[_LENGTH.size : end])
            del self._bytes[:end]
            yield message
