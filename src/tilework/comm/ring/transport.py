"""The protocol on a memory: step by step over any verbs, or in one call each on shared memory."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from mmap import MAP_POPULATE, MAP_SHARED, mmap
from typing import Final, NamedTuple

from tilework.comm.ring import consume, produce
from tilework.comm.ring.consume import SlotEntry, Window
from tilework.comm.ring.entry import PROLOGUE, Checksum, Content, decode, encode, payload_offset, units_of
from tilework.comm.ring.layout import MAX_OWNERS, UNIT, RingLayout
from tilework.comm.ring.locked import LockedMemory
from tilework.comm.ring.verbs import Buffer, Memory, Result, Steps, carry_out

Message = tuple[Buffer, ...]
"""A header, then the buffers of the payload; all contiguous."""


_RING = (1).to_bytes(8, "little")


class SendOutcome:
    """Outcomes of trying a message. LOST: another process abandoned it before it was committed; it is not delivered."""

    SENT: Final = 0
    FULL: Final = 1
    LOST: Final = 2


class Found(NamedTuple):
    """A committed entry. `header_bytes` is -1 if its bytes are damaged."""

    slot: int
    unit: int
    word: int
    epoch: int
    header_bytes: int
    payload_bytes: int

    @property
    def owner(self) -> int:
        return self.word >> 27 & 0x3FF


class Transport:
    """Carries out the steps of the protocol by verbs on `memory`.

    `view` is the same memory mapped here: a consumer always has it, a producer over a network has none (b"").
    """

    def __init__(self, layout: RingLayout, memory: Memory, view: mmap | bytes, is_checked: bool) -> None:
        self.layout = layout
        self._memory = memory
        self._view = view
        self._is_checked = is_checked
        self._checksum: Checksum | None = memory.checksum if is_checked else None
        self.epochs = array("I", [0] * MAX_OWNERS)
        """Epochs of the present holders, by owner id: the consumer takes no entry of a former holder."""

    def send(
        self, owner: int, epoch: int, messages: list[Message], first: int, bell: int, deadline_ns: int
    ) -> tuple[int, int]:
        """Send `messages[first:]`; return the number sent, and the outcome of the message behind them.

        Writes eight bytes to the descriptor `bell` if the consumer sleeps (-1: it never does).

        Raises:
            ValueError: a message is longer than half of the ring.
            VerbFailed: it is not known whether the message was sent.
        """
        for index in range(first, len(messages)):
            outcome = self._send_one(owner, epoch, messages[index], deadline_ns)
            if outcome != SendOutcome.SENT:
                return index - first, outcome
            self._ring(bell, deadline_ns)
        return len(messages) - first, SendOutcome.SENT

    def _send_one(self, owner: int, epoch: int, message: Message, deadline_ns: int) -> int:
        header, *buffers = (memoryview(buffer).cast("B") for buffer in message)
        units = units_of(len(header), sum(map(len, buffers)))
        if units > self.layout.units // 2:
            half = self.layout.units // 2 * UNIT
            raise ValueError(f"a message of {units * UNIT} bytes is longer than half of the ring, {half} bytes")
        reservation = self._run(produce.reserve(self.layout, owner, units), deadline_ns)
        if reservation is None:
            return SendOutcome.FULL
        pieces = encode(reservation.position.slot, epoch, header, buffers, self._checksum)
        self._run(produce.write(self.layout, reservation, pieces), deadline_ns)
        is_sent = self._run(produce.commit(self.layout, reservation), deadline_ns)
        return SendOutcome.SENT if is_sent else SendOutcome.LOST

    def _ring(self, bell: int, deadline_ns: int) -> None:
        memory = self._memory
        offset = self.layout.bell
        if bell >= 0 and memory.cas64(offset, 1, 0, deadline_ns=deadline_ns) == 1:
            with suppress(OSError):  # The bell's buffer is full, or the consumer is gone.
                os.write(bell, _RING)

    def set_bell(self, is_set: bool, deadline_ns: int) -> None:
        """Say whether the consumer wants to be woken. After setting it, the consumer looks once more, then sleeps."""
        self._memory.put(self.layout.bell, (int(is_set).to_bytes(8, "little"),), deadline_ns=deadline_ns)

    def look(self, window: Window, limit: int, deadline_ns: int) -> list[Found]:
        """Do `consume.look`; return the entries together with the fields of their prologues."""
        entries = self._run(consume.look(self.layout, window, limit), deadline_ns)
        return [self._found(entry) for entry in entries]

    def _found(self, entry: SlotEntry) -> Found:
        start = self.layout.entry(entry.position.unit)
        with memoryview(self._view) as view, view[start : start + entry.units * UNIT] as data:
            content = decode(entry.position.slot, data, self._checksum)
        if content is None or content.epoch != self.epochs[entry.owner]:
            content = Content(0, -1, 0)
        return Found(*entry.position, entry.word, *content)

    def release(self, window: Window, slot: int, deadline_ns: int) -> None:
        self._run(consume.release(self.layout, window, slot), deadline_ns)

    def take(self, window: Window, limit: int, deadline_ns: int) -> tuple[list[tuple[bytes, bytes]], int]:
        """Copy and release at most `limit` entries; return the copies (header, payload) and the number of damaged."""
        found = self.look(window, limit, deadline_ns)
        copies = self._copies([one for one in found if one.header_bytes >= 0])
        for one in found:
            self.release(window, one.slot, deadline_ns)
        return copies, len(found) - len(copies)

    def _copies(self, found: Sequence[Found]) -> list[tuple[bytes, bytes]]:
        places = [spans(self.layout, one) for one in found]
        return [(self._view[header], self._view[payload]) for header, payload in places]

    def recover(self, deadline_ns: int) -> Window:
        return self._run(consume.recover(self.layout), deadline_ns)

    def find_owners(self, window: Window, deadline_ns: int) -> set[int]:
        return self._run(consume.find_owners(self.layout, window), deadline_ns)

    def is_all_seen(self, window: Window, deadline_ns: int) -> bool:
        """Return whether the consumer has looked at all entries."""
        word = self._run(produce.read_word(self.layout.slot(window.scan.slot)), deadline_ns)
        return word == self.layout.empty(window.scan.slot)

    def find_reserved(self, deadline_ns: int) -> tuple[tuple[int, int], ...]:
        return self._run(produce.find_reserved(self.layout), deadline_ns)

    def abandon(self, slot: int, word: int, deadline_ns: int) -> bool:
        return self._run(produce.abandon(self.layout, slot, word), deadline_ns)

    def drop_fenced(self, window: Window, owner: int, deadline_ns: int) -> list[SlotEntry]:
        return self._run(consume.drop_fenced(self.layout, window, owner), deadline_ns)

    def _run(self, steps: Steps[Result], deadline_ns: int) -> Result:
        return carry_out(steps, self._memory, deadline_ns)


def spans(layout: RingLayout, found: Found) -> tuple[slice, slice]:
    """Return where the header and the payload of a valid entry lie in the memory."""
    start = layout.entry(found.unit)
    header, payload = start + PROLOGUE.size, start + payload_offset(found.header_bytes)
    return slice(header, header + found.header_bytes), slice(payload, payload + found.payload_bytes)


def map_memory(fd: int, size: int) -> mmap:
    """Map the memory with all its pages present: an entry should not wait for them."""
    return mmap(fd, size, flags=MAP_SHARED | MAP_POPULATE)


def has_extension() -> bool:
    """Return whether the C extension was built at installation."""
    try:
        import_module("tilework.comm.ring._native")
    except ImportError:
        return False
    return True


def transport(layout: RingLayout, memory: mmap, fd: int, is_atomic: bool, is_checked: bool) -> Transport:
    """Return the protocol on shared memory; `fd` is the file behind it.

    All processes of a ring have the same `is_atomic`: atomic instructions ignore a lock.
    """
    if is_atomic:
        from tilework.comm.ring.atomic import AtomicMemory, AtomicTransport

        return AtomicTransport(layout, AtomicMemory(memory), memory, is_checked)
    return Transport(layout, LockedMemory(memory, fd), memory, is_checked)
