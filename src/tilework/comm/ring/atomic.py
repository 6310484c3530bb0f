"""A ring on shared memory with atomic instructions; no step of Python lies on the path of messages."""

from __future__ import annotations

from mmap import mmap

from tilework.comm.ring import _native, consume
from tilework.comm.ring.consume import SlotEntry, Window
from tilework.comm.ring.layout import Position, SlotState
from tilework.comm.ring.transport import Found, Message, Transport
from tilework.comm.ring.verbs import Buffer

_Seen = tuple[int, int, int, int, int, int]


class AtomicMemory:
    """Verbs as processor instructions. All are done when they return, whatever other processes do."""

    is_one_sided = True

    def __init__(self, memory: mmap) -> None:
        self._memory = memory

    def get(self, offset: int, size: int, *, deadline_ns: int) -> bytes:
        return _native.get(self._memory, offset, size)

    def put(self, offset: int, buffers: tuple[Buffer, ...], *, deadline_ns: int) -> None:
        for buffer in buffers:
            _native.put(self._memory, offset, buffer)
            offset += len(buffer)

    def cas64(self, offset: int, expected: int, desired: int, *, deadline_ns: int) -> int:
        return _native.cas64(self._memory, offset, expected, desired)

    def flush(self, *, deadline_ns: int) -> None:
        pass

    @staticmethod
    def checksum(buffer: Buffer, value: int) -> int:
        return _native.crc32c(buffer, value)


class AtomicTransport(Transport):
    """A transport that runs the steps of producer and consumer in one native call each.

    tests/comm/ring checks that they equal those of produce.py and consume.py.
    """

    _view: mmap

    def send(
        self, owner: int, epoch: int, messages: list[Message], first: int, bell: int, deadline_ns: int
    ) -> tuple[int, int]:
        layout = self.layout
        return _native.send(
            self._view, layout.slots, layout.units, owner, epoch, self._is_checked, bell, messages, first
        )

    def look(self, window: Window, limit: int, deadline_ns: int) -> list[Found]:
        scan = window.scan
        seen = self._look(window, limit)
        if not seen and window.scan is scan:
            return []
        found = self._see(window, seen)
        self._advance(window)
        return found

    def _see(self, window: Window, seen: list[_Seen]) -> list[Found]:
        """Note what was seen; return the entries that are committed."""
        found = []
        for one in map(Found._make, seen):
            entry = SlotEntry(Position(one.slot, one.unit), one.word)
            if entry.state == SlotState.PAD:
                window.forget(one.slot)
                continue
            window.see(entry)
            if entry.state == SlotState.READY:
                found.append(one)
        return found

    def _look(self, window: Window, limit: int) -> list[_Seen]:
        """Return the entries that have changed. Moves the window's `scan` and nothing else."""
        layout = self.layout
        slot, unit = window.scan
        waiting = [(*entry.position, entry.word) for entry in window.undecided.values()]
        seen, *scan = _native.look(
            self._view,
            layout.slots,
            layout.units,
            self._is_checked,
            window.head.slot,
            slot,
            unit,
            waiting,
            limit,
            self.epochs,
        )
        if scan[0] != slot:
            window.scan = Position(*scan)
        return seen

    def _advance(self, window: Window) -> None:
        if window.head.slot in window.open:
            return
        head, window.head = window.head, consume.first_needed(window)
        if head != window.head:
            _native.advance(self._view, self.layout.slots, self.layout.units, head.slot, *window.head)

    def release(self, window: Window, slot: int, deadline_ns: int) -> None:
        if slot == window.head.slot:
            window.forget(slot)
            self._advance(window)
        else:
            super().release(window, slot, deadline_ns)

    def take(self, window: Window, limit: int, deadline_ns: int) -> tuple[list[tuple[bytes, bytes]], int]:
        if window.open:
            return super().take(window, limit, deadline_ns)
        seen = self._look(window, limit)
        copies = _native.copies(self._view, self.layout.slots, self.layout.units, seen)
        if all(word >> 37 & 7 == SlotState.READY for _, _, word, *_ in seen):
            self._advance(window)
            return copies, len(seen) - len(copies)
        found = self._see(window, seen)
        for one in found:
            self.release(window, one.slot, deadline_ns)
        self._advance(window)
        return copies, len(found) - len(copies)
