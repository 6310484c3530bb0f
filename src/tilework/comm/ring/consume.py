"""The consumer's steps: look, release, fence, recover.

The consumer never waits: it steps over a reserved slot and looks at it again later. It delivers each entry while its
bytes lie in the ring; `release` frees them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.comm.ring.errors import RingCorrupted
from tilework.comm.ring.layout import Position, RingLayout, SlotState, Word
from tilework.comm.ring.produce import abandon, read_word
from tilework.comm.ring.verbs import Put, Steps


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """A slot as the consumer saw it."""

    position: Position
    word: int

    @property
    def state(self) -> int:
        return self.word >> 37 & 7

    @property
    def owner(self) -> int:
        return self.word >> 27 & 0x3FF

    @property
    def units(self) -> int:
        return Word.unpack(self.word).units


@dataclass(slots=True)
class Window:
    """The consumer's state: the entries from `head` on, in order; those in `open` are still needed.

    `scan` is the first position that the consumer has not looked at. `open` holds READY entries, which are delivered
    and not released, and the entries of `undecided`: RESERVED and ABANDONED ones, which belong to their owners.
    """

    head: Position
    scan: Position
    open: dict[int, SlotEntry] = field(default_factory=dict)
    undecided: dict[int, SlotEntry] = field(default_factory=dict)

    def see(self, entry: SlotEntry) -> None:
        slot = entry.position.slot
        self.open[slot] = entry
        if entry.state == SlotState.READY:
            self.undecided.pop(slot, None)
        else:
            self.undecided[slot] = entry

    def forget(self, slot: int) -> SlotEntry:
        self.undecided.pop(slot, None)
        return self.open.pop(slot)


def look(layout: RingLayout, window: Window, limit: int) -> Steps[list[SlotEntry]]:
    """Return at most `limit` entries that are committed and were not delivered before, in each owner's order.

    Steps over entries that are not committed. If a later one of the same owner is committed, the owner has decided the
    earlier one in between; then the next call looks at the earlier one first.
    """
    ready: list[SlotEntry] = []
    waiting = list(window.undecided.values())
    for entry in waiting:
        if len(ready) == limit:
            break
        seen = SlotEntry(entry.position, (yield from read_word(layout.slot(entry.position.slot))))
        if not is_later_word(entry.word, seen.word):
            raise RingCorrupted(f"slot {entry.position.slot} went from {entry.word:#018x} to {seen.word:#018x}")
        if seen.state == SlotState.PAD:
            window.forget(entry.position.slot)
            continue
        window.see(seen)
        if seen.state == SlotState.READY:
            ready.append(seen)
    owners = {entry.owner for entry in window.undecided.values()}
    while len(ready) < limit and window.scan.distance(window.head) < layout.slots:
        entry = SlotEntry(window.scan, (yield from read_word(layout.slot(window.scan.slot))))
        if not in_use(layout, entry) or (entry.state == SlotState.READY and entry.owner in owners):
            break
        window.scan = entry.position.after(entry.units)
        if entry.state == SlotState.PAD:
            continue
        window.see(entry)
        if entry.state == SlotState.READY:
            ready.append(entry)
        else:
            owners.add(entry.owner)
    yield from advance(layout, window)
    return ready


def in_use(layout: RingLayout, entry: SlotEntry) -> bool:
    """Return whether the slot was reserved since it was last emptied.

    Raises:
        RingCorrupted: the protocol never writes this word.
    """
    word = Word.unpack(entry.word)
    if word.generation != layout.generation(entry.position.slot) or word.state > SlotState.ABANDONED:
        raise RingCorrupted(f"slot {entry.position.slot} holds {entry.word:#018x}, which no producer writes")
    if word.state == SlotState.EMPTY:
        return False
    if not 0 < word.units <= layout.to_end(entry.position.unit):
        raise RingCorrupted(f"slot {entry.position.slot} has a length of {word.units} units, more than fit there")
    return True


def is_later_word(before: int, after: int) -> bool:
    """Return whether an uncommitted entry may change to this word: the same one, in a state that may follow."""
    old, new = Word.unpack(before), Word.unpack(after)
    if old.state == SlotState.ABANDONED and new.state not in (SlotState.ABANDONED, SlotState.PAD):
        return False
    return SlotState.RESERVED <= new.state <= SlotState.ABANDONED and old._replace(state=new.state) == new


def release(layout: RingLayout, window: Window, slot: int) -> Steps[None]:
    """Free the bytes of a delivered entry. If it lies behind an open entry, it becomes padding.

    So no consumer that starts after a crash delivers it again.
    """
    entry = window.forget(slot)
    if first_needed(window) == window.head:
        pad = Word.unpack(entry.word).to(SlotState.PAD)
        yield Put(layout.slot(slot), (pad.to_bytes(8, "little"),))
    yield from advance(layout, window)


def advance(layout: RingLayout, window: Window) -> Steps[None]:
    """Move the head to the first entry that is needed, then empty the slots behind it.

    The order matters, since a new consumer needs only the head's word to continue (`recover`).
    """
    head, window.head = window.head, first_needed(window)
    if head == window.head:
        return
    yield Put(layout.head, (window.head.pack().to_bytes(8, "little"),))
    numbers = range(head.slot, head.slot + window.head.distance(head))
    for number in numbers:
        yield Put(layout.slot(number), (layout.empty(number + layout.slots).to_bytes(8, "little"),))


def first_needed(window: Window) -> Position:
    """Return the position to which the head should move."""
    return next((entry.position for entry in window.open.values()), window.scan)


def drop_fenced(layout: RingLayout, window: Window, owner: int) -> Steps[list[SlotEntry]]:
    """Free what a fenced owner has reserved and not committed. Return these entries.

    Fenced means that nothing which this owner has begun can write any more, already before this call.
    """
    dropped: list[SlotEntry] = []
    waiting = list(window.undecided.values())
    for entry in waiting:
        if entry.owner != owner:
            continue
        slot = entry.position.slot
        if entry.state == SlotState.RESERVED and not (yield from abandon(layout, slot, entry.word)):
            continue  # It was committed, or abandoned by a peer: the next look finds out.
        window.see(SlotEntry(entry.position, Word.unpack(entry.word).to(SlotState.ABANDONED)))
        yield from release(layout, window, slot)
        dropped.append(entry)
    return dropped


def find_owners(layout: RingLayout, window: Window) -> Steps[set[int]]:
    """Return the owners of the entries from the window's `scan` on. Raises RingCorrupted."""
    owners: set[int] = set()
    position = window.scan
    while position.distance(window.head) < layout.slots:
        entry = SlotEntry(position, (yield from read_word(layout.slot(position.slot))))
        if not in_use(layout, entry):
            break
        owners.add(entry.owner)
        position = position.after(entry.units)
    return owners


def recover(layout: RingLayout) -> Steps[Window]:
    """Return the window of a starting consumer, even if its predecessor crashed at any point.

    Entries that were delivered and not released are delivered again. Raises RingCorrupted.
    """
    head = Position.unpack((yield from read_word(layout.head)))
    for number in range(head.slot, head.slot + layout.slots):
        generation = Word.unpack((yield from read_word(layout.slot(number)))).generation
        if generation == layout.generation(number):
            continue
        if generation != layout.generation(number - layout.slots):
            raise RingCorrupted(f"slot {number} has generation {generation}, which does not fit the head")
        yield Put(layout.slot(number), (layout.empty(number).to_bytes(8, "little"),))
    return Window(head, head)
