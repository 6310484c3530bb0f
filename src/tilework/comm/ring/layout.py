"""Layout of the memory of a ring, and the packing of its words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

UNIT = 64
"""Bytes of a unit, a cache line: entries begin at multiples of it, and their lengths are counted in it."""
PAGE = 4096
_TURN = 1 << 32
_GENERATIONS = 1 << 24
MAX_OWNERS = 1 << 10
MAX_UNITS = 1 << 26
MAX_SLOTS = 1 << 20


class SlotState:
    """States of a slot.

    EMPTY becomes RESERVED or PAD; RESERVED becomes READY or ABANDONED; all end as EMPTY, some as PAD before.
    """

    EMPTY: Final = 0
    RESERVED: Final = 1
    READY: Final = 2
    PAD: Final = 3
    ABANDONED: Final = 4


class Word(NamedTuple):
    """A slot: `generation` (24 bits), `state` (3), `owner` (10), `units` (27), the highest bits first."""

    generation: int
    state: int
    owner: int = 0
    units: int = 0

    @classmethod
    def unpack(cls, word: int) -> Word:
        return cls(word >> 40, word >> 37 & 7, word >> 27 & 0x3FF, word & 0x7FFFFFF)

    def pack(self) -> int:
        return self.generation << 40 | self.state << 37 | self.owner << 27 | self.units

    def to(self, state: int) -> int:
        """Return the packed word with another state."""
        return self._replace(state=state).pack()


class Position(NamedTuple):
    """A place in the stream of entries: the number of its slot and of its first unit, both modulo 2**32.

    Both only grow, so a full ring differs from an empty one. One 64-bit word holds both, so they change together.
    """

    slot: int
    unit: int

    @classmethod
    def unpack(cls, word: int) -> Position:
        return cls(word >> 32, word & 0xFFFFFFFF)

    def pack(self) -> int:
        return self.slot << 32 | self.unit

    def after(self, units: int) -> Position:
        """Return the position behind an entry of `units` that begins here."""
        return Position((self.slot + 1) % _TURN, (self.unit + units) % _TURN)

    def distance(self, base: Position) -> int:
        """Return the number of slots that this is ahead of `base`; negative if behind."""
        return (self.slot - base.slot + _TURN // 2) % _TURN - _TURN // 2

    def units_from(self, base: Position) -> int:
        """Return the number of units that this is ahead of `base`."""
        return (self.unit - base.unit) % _TURN


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Offsets, in bytes, of a ring of `slots` entries at once and `units` units of data. Both are powers of two."""

    slots: int
    units: int
    data: int = field(init=False)
    """Offset of the first entry."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", -(-(self.first_slot + 8 * self.slots) // PAGE) * PAGE)
        for name, value, most in (("slots", self.slots, MAX_SLOTS), ("units", self.units, MAX_UNITS)):
            if not 2 <= value <= most or value & (value - 1):
                raise ValueError(f"{name} must be a power of two from 2 to {most}, not {value}")

    @property
    def head(self) -> int:
        """Offset of the word with the position of the oldest entry still needed. Only the consumer writes it."""
        return 0

    @property
    def hint(self) -> int:
        """Offset of the word with a position at most a little behind the tail. Any producer moves it forward."""
        return UNIT

    @property
    def bell(self) -> int:
        """Offset of the word that is 1 while the consumer sleeps and wants to be woken."""
        return 2 * UNIT

    @property
    def first_slot(self) -> int:
        return 3 * UNIT

    @property
    def size(self) -> int:
        """Bytes of the whole memory."""
        return self.data + self.units * UNIT

    def slot(self, number: int) -> int:
        """Return the offset of a slot's word."""
        return self.first_slot + 8 * (number % self.slots)

    def generation(self, number: int) -> int:
        """Return the number of times that a slot was used before it is used under this number."""
        return number // self.slots % _GENERATIONS

    def empty(self, number: int) -> int:
        """Return the word of a slot that waits to be used under this number."""
        return Word(self.generation(number), SlotState.EMPTY).pack()

    def entry(self, unit: int) -> int:
        """Return the offset of an entry's first byte."""
        return self.data + unit % self.units * UNIT

    def to_end(self, unit: int) -> int:
        """Return the units from here to the end of the data, where entries wrap to its beginning."""
        return self.units - unit % self.units
