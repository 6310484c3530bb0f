"""The producer's steps: reserve, write, commit.

The word of a slot decides everything. A producer that stops anywhere leaves a word from which others can go on: no
step waits for another process. docs/ring.md compares this with OnePiece, section 6.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilework.comm.ring.errors import RingCorrupted
from tilework.comm.ring.layout import Position, RingLayout, SlotState, Word
from tilework.comm.ring.verbs import Buffer, Cas64, Flush, Get, Put, Steps


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes that only this owner may write: an entry at `position`, and the `word` of its slot."""

    position: Position
    word: int


def reserve(layout: RingLayout, owner: int, units: int) -> Steps[Reservation | None]:
    """Reserve an entry of `units` at the tail; None if there is no room for it now. Raises RingCorrupted."""
    while True:
        head = Position.unpack((yield from read_word(layout.head)))
        hint = Position.unpack((yield from read_word(layout.hint)))
        tail = yield from _find_tail(layout, head, hint)
        if tail is None:
            return None
        if tail.generation_differs:
            if (yield from read_word(layout.head)) == head.pack():
                return None  # The consumer has not emptied this slot since it was last used.
            continue
        position = tail.position
        to_end = layout.to_end(position.unit)
        state, length = (SlotState.RESERVED, units) if units <= to_end else (SlotState.PAD, to_end)
        if position.units_from(head) + length > layout.units:
            return None
        empty = layout.empty(position.slot)
        word = Word(layout.generation(position.slot), state, owner, length).pack()
        if (yield Cas64(layout.slot(position.slot), empty, word)) != empty:
            continue
        # Others do the same for an owner that stops here: they walk on from the hint and move it.
        yield Cas64(layout.hint, hint.pack(), position.after(length).pack())
        if state == SlotState.RESERVED:
            return Reservation(position, word)


@dataclass(frozen=True, slots=True)
class _Tail:
    position: Position
    generation_differs: bool


def _find_tail(layout: RingLayout, head: Position, hint: Position) -> Steps[_Tail | None]:
    """Find the first slot that is not in use, from the hint on, or from the head if the hint is behind; None if full.

    A reservation sets the length, so entries that are not written yet can be stepped over, too.
    """
    position = hint if hint.distance(head) > 0 else head
    while position.distance(head) < layout.slots:
        packed = yield from read_word(layout.slot(position.slot))
        word = Word.unpack(packed)
        if word.generation != layout.generation(position.slot):
            return _Tail(position, generation_differs=True)
        if packed == layout.empty(position.slot):
            return _Tail(position, generation_differs=False)
        if word.state == SlotState.EMPTY or word.state > SlotState.ABANDONED:
            raise RingCorrupted(f"slot {position.slot} holds {packed:#018x}, which no producer writes")
        position = position.after(word.units)
    return None


def write(layout: RingLayout, reservation: Reservation, pieces: Sequence[Buffer]) -> Steps[None]:
    """Put the bytes of the entry in their place, and wait until they are there."""
    yield Put(layout.entry(reservation.position.unit), tuple(pieces))
    yield Flush()


def commit(layout: RingLayout, reservation: Reservation) -> Steps[bool]:
    """Hand the entry to the consumer. Return False if another process has abandoned it: it is never delivered.

    Comes after `write`. So an owner that is late, but lives, has written its last byte here, and frees the bytes of an
    abandoned entry itself.
    """
    word = Word.unpack(reservation.word)
    slot = layout.slot(reservation.position.slot)
    if (yield Cas64(slot, reservation.word, word.to(SlotState.READY))) == reservation.word:
        return True
    yield Cas64(slot, word.to(SlotState.ABANDONED), word.to(SlotState.PAD))
    return False


def abandon(layout: RingLayout, slot: int, word: int) -> Steps[bool]:
    """Give up the entry of an owner that has not committed in time. Any process may do so, at any time.

    `word` is what the slot held when it was last read. The bytes stay unused until the owner is known not to write any
    more: it says so itself, or is fenced.
    """
    seen = yield Cas64(layout.slot(slot), word, Word.unpack(word).to(SlotState.ABANDONED))
    return bool(seen == word)


def find_reserved(layout: RingLayout) -> Steps[tuple[tuple[int, int], ...]]:
    """Return slot numbers and words of all entries reserved now: a producer without room may abandon them later."""
    head = Position.unpack((yield from read_word(layout.head)))
    found: list[tuple[int, int]] = []
    for number in range(head.slot, head.slot + layout.slots):
        packed = yield from read_word(layout.slot(number))
        word = Word.unpack(packed)
        if word.generation == layout.generation(number) and word.state == SlotState.RESERVED:
            found.append((number, packed))
    return tuple(found)


def read_word(offset: int) -> Steps[int]:
    return int.from_bytes((yield Get(offset)), "little")
