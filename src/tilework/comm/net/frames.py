"""Frames on a TCP connection: a payload with its length, its checksum and the epoch of the connection.

A frame is the bytes "TLW1", the CRC-32 of all that follows, the epoch (4 bytes), the length (8 bytes), the payload. An
epoch is one session of a node; frames of an earlier one are refused.
"""

from __future__ import annotations

import asyncio
import zlib
from struct import Struct

_MAGIC = b"TLW1"
_HEAD = Struct("!4sI")
_REST = Struct("!IQ")
_HEAD_BYTES = _HEAD.size + _REST.size

MOST_BYTES = 1 << 31
"""Largest payload. A frame may carry a clip: 81 frames of 1280x720 are 224 MB."""


class BadFrame(ConnectionError):
    """Bytes of a connection cannot be trusted any more; the message says why. The connection must be closed."""


def frame(payload: bytes, epoch: int) -> tuple[bytes, bytes]:
    """Return the pieces of a frame, to be sent one after another."""
    rest = _REST.pack(epoch, len(payload))
    return _HEAD.pack(_MAGIC, zlib.crc32(payload, zlib.crc32(rest))) + rest, payload


async def read_frame(reader: asyncio.StreamReader, epoch: int, most_bytes: int = MOST_BYTES) -> bytes | None:
    """Return the next payload; None if the connection was closed after the previous frame.

    Raises:
        BadFrame: the connection ends within a frame, or the frame is damaged, of another epoch, or longer than
            `most_bytes`.
    """
    head = await _read(reader, _HEAD_BYTES, may_end=True)
    if not head:
        return None
    magic, checksum = _HEAD.unpack_from(head)
    rest = head[_HEAD.size :]
    its_epoch, length = _REST.unpack(rest)
    if magic != _MAGIC:
        raise BadFrame(f"a frame begins with {magic!r}, not {_MAGIC!r}: the other end is no node of Tilework")
    if length > most_bytes:
        raise BadFrame(f"a frame of {length} bytes is longer than the {most_bytes} that may come here")
    payload = await _read(reader, length)
    if zlib.crc32(payload, zlib.crc32(rest)) != checksum:
        raise BadFrame(f"the checksum of a frame of {length} bytes is wrong")
    if its_epoch != epoch:
        raise BadFrame(f"a frame is of epoch {its_epoch}, and this connection of epoch {epoch}")
    return payload


async def _read(reader: asyncio.StreamReader, num_bytes: int, may_end: bool = False) -> bytes:
    try:
        return await reader.readexactly(num_bytes)
    except asyncio.IncompleteReadError as error:
        if may_end and not error.partial:
            return b""
        raise BadFrame(f"the connection ended after {len(error.partial)} of {num_bytes} bytes") from None
    except OSError as error:
        raise BadFrame(f"the connection broke: {error}") from error
