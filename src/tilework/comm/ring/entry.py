"""The bytes of an entry: a prologue, the header and the payload, with one checksum over all of them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tilework.comm.ring.layout import UNIT
from tilework.comm.ring.verbs import Buffer

PROLOGUE = struct.Struct("<IIIIQ")
"""Checksum of all that follows it (0 for a ring without checksums), slot number, epoch of the owner, bytes of the
header, bytes of the payload.
"""
_CHECKED = struct.Struct("<IIIQ")
Checksum = Callable[[Buffer, int], int]
"""Continues a checksum over a buffer."""


class Content(NamedTuple):
    """Sizes of an entry's header and payload, and the epoch of its owner."""

    epoch: int
    header_bytes: int
    payload_bytes: int

    @property
    def payload_offset(self) -> int:
        return payload_offset(self.header_bytes)


def payload_offset(header_bytes: int) -> int:
    """Return the offset of the payload, a multiple of UNIT, so that arrays can be read in place."""
    return -(-(PROLOGUE.size + header_bytes) // UNIT) * UNIT


def units_of(header_bytes: int, payload_bytes: int) -> int:
    """Return the length of an entry in units."""
    end = payload_offset(header_bytes) + payload_bytes if payload_bytes else PROLOGUE.size + header_bytes
    return -(-end // UNIT)


def encode(slot: int, epoch: int, header: Buffer, buffers: Sequence[Buffer], checksum: Checksum | None) -> list[Buffer]:
    """Return the pieces of an entry; only the header is copied. `buffers` are flat, of bytes."""
    payload_bytes = sum(len(buffer) for buffer in buffers)
    checked = _CHECKED.pack(slot, epoch, len(header), payload_bytes)
    value = 0
    if checksum is not None:
        for piece in (checked, header, *buffers):
            value = checksum(piece, value)
    gap = payload_offset(len(header)) - PROLOGUE.size - len(header) if payload_bytes else 0
    return [value.to_bytes(4, "little") + checked + bytes(header) + bytes(gap), *buffers]


def decode(slot: int, entry: memoryview, checksum: Checksum | None) -> Content | None:
    """Return what the prologue of an `entry` (all its units) says; None if no producer wrote it for this slot."""
    value, number, epoch, header_bytes, payload_bytes = PROLOGUE.unpack_from(entry)
    if number != slot or units_of(header_bytes, payload_bytes) * UNIT != len(entry):
        return None
    content = Content(epoch, header_bytes, payload_bytes)
    if checksum is not None:
        start = content.payload_offset
        seen = checksum(entry[4 : PROLOGUE.size + header_bytes], 0)
        if payload_bytes:
            seen = checksum(entry[start : start + payload_bytes], seen)
        if seen != value:
            return None
    return content
