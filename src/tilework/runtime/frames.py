"""The framing of multiprocessing connections, for an event loop: a `Connection` blocks until a message is complete."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("!i")  # Messages beyond 2 GiB have another header; Tilework sends none.


def encode_frame(message: bytes) -> bytes:
    """The message as `Connection.recv_bytes` expects it."""
    return _LENGTH.pack(len(message)) + message


class FrameDecoder:
    """Decodes the messages that `Connection.send_bytes` has sent."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes; yields the complete messages."""
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
