"""The parts of a picture file: a file with very many is refused before it is opened, since each part takes time."""

from __future__ import annotations

import struct

_JPEG_START, _SCAN = b"\xff\xd8", b"\xff\xda"
# Each scan goes over all pixels again, and may have only a few bytes: hundreds of thousands fit into a small file. An
# ordinary progressive JPEG has about ten.
_MOST_SCANS = 100
_PIECE = 1 << 20
_PNG_START = b"\x89PNG\r\n\x1a\n"
_MOST_CHUNKS = 10_000
"""Most chunks of a PNG. An ordinary one has one for each 8 KiB."""
_CHUNK = struct.Struct(">I4s")
_CHECK_BYTES = 4


class Undecodable(Exception):
    """The file cannot be used; the message says why, and what to give instead."""


def check_parts(content: bytes) -> None:
    """Check that a file has not too many parts. Raises Undecodable."""
    if content.startswith(_JPEG_START):
        _check_scans(content)
    elif content.startswith(_PNG_START):
        _check_chunks(content)


def _check_scans(content: bytes) -> None:
    num_scans = 0
    for start in range(0, len(content), _PIECE):
        num_scans += content.count(_SCAN, start, start + _PIECE + len(_SCAN) - 1)
        if num_scans > _MOST_SCANS:
            raise Undecodable(f"It has more than {_MOST_SCANS} scans: save it as a baseline JPEG.")


def _check_chunks(content: bytes) -> None:
    place = len(_PNG_START)
    for _ in range(_MOST_CHUNKS):
        if place + _CHUNK.size > len(content):
            return
        place += _CHUNK.size + _CHUNK.unpack_from(content, place)[0] + _CHECK_BYTES
    raise Undecodable(f"It has more than {_MOST_CHUNKS} chunks: save the image again.")
