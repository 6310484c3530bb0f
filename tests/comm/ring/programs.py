"""The programs that are explored: producers that send messages, a consumer, and a peer that abandons entries."""

from __future__ import annotations

import zlib
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from comm.ring.explorer import (
    Ask,
    Asked,
    Choose,
    Deliver,
    Done,
    Fence,
    Grant,
    Pause,
    Released,
    Sending,
    Setting,
    Told,
)
from tilework.comm.ring import consume, entry, produce
from tilework.comm.ring.layout import UNIT, RingLayout, SlotState
from tilework.comm.ring.verbs import Get

Steps = Generator[Any, Any, None]
OTHER = 9
"""The owner id that a producer gets when it asks for another."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """The modules whose steps are run: the real ones, or ones with a mistake."""

    produce: ModuleType = produce
    consume: ModuleType = consume
    entry: ModuleType = entry
    layout: type[RingLayout] = RingLayout


def message(owner: int, index: int, units: int) -> tuple[bytes, bytes]:
    """Header and payload of an owner's message, whose entry takes `units`."""
    header = bytes([owner, index]) * 4
    return header, header * (UNIT // len(header)) * (units - 1)


def setting(
    sizes: tuple[tuple[int, ...], ...],
    slots: int,
    units: int,
    protocol: Protocol | None = None,
    has_peer: bool = False,
    rejoins: int | None = None,
    limit: int = 1,
    **faults: Any,
) -> Setting:
    """Producers that send messages of these sizes, in units, one behind the other.

    Before its last message the first one asks for another owner id, `rejoins` messages earlier, if that is given.
    """
    protocol = protocol or Protocol()
    layout = protocol.layout(slots, units)
    return Setting(
        layout=layout,
        consumer=partial(consumer, protocol, layout, limit, rejoins is not None),
        producers=tuple(
            partial(producer, protocol, layout, owner, one, rejoins if owner == 1 else None)
            for owner, one in enumerate(sizes, 1)
        ),
        contents={
            b"".join(message(owner, index, units)): (owner, index)
            for owner, messages in enumerate(sizes, 1)
            for index, units in enumerate(messages)
        },
        probe=partial(producer, protocol, layout, len(sizes) + 1, (1,)),
        peer=partial(peer, protocol, layout) if has_peer else None,
        **faults,
    )


def producer(
    protocol: Protocol, layout: RingLayout, owner: int, sizes: tuple[int, ...], rejoins: int | None = None
) -> Steps:
    holder, last = owner, len(sizes) - 1
    for index, units in enumerate(sizes):
        if rejoins is not None and index == last - rejoins:
            yield Ask()
        if rejoins is not None and index == last:
            yield Asked()
            holder = OTHER
        yield Sending(index)
        reservation = yield from protocol.produce.reserve(layout, holder, units)
        if reservation is None:
            yield Told(index, "full")
            continue
        header, payload = message(owner, index, units)
        pieces = protocol.entry.encode(reservation.position.slot, 1, header, [payload], zlib.crc32)
        yield from protocol.produce.write(layout, reservation, pieces)
        is_sent = yield from protocol.produce.commit(layout, reservation)
        yield Told(index, "sent" if is_sent else "lost")


def consumer(protocol: Protocol, layout: RingLayout, limit: int, grants: bool) -> Steps:
    consume = protocol.consume
    window = yield from consume.recover(layout)
    while True:
        if grants:
            yield Grant()
        ready = yield from consume.look(layout, window, limit)
        for one in ready:
            yield from _deliver(protocol, layout, one)
            slot = one.position.slot
            yield Done(slot)
            yield from consume.release(layout, window, slot)
            yield Released(slot)
        waiting = list(window.undecided.values())
        for one in waiting:
            if (yield Choose("dead", one.owner)) or (
                one.state == SlotState.ABANDONED and (yield Choose("kill", one.owner))
            ):
                yield Fence(one.owner)
                yield from consume.drop_fenced(layout, window, one.owner)
            elif one.state == SlotState.RESERVED and (yield Choose("abandon", one.owner)):
                yield from protocol.produce.abandon(layout, one.position.slot, one.word)
        yield Pause()


def _deliver(protocol: Protocol, layout: RingLayout, one: consume.SlotEntry) -> Steps:
    offset, size = layout.entry(one.position.unit), one.units * UNIT
    data = yield Get(offset, size)
    content = protocol.entry.decode(one.position.slot, memoryview(data), zlib.crc32)
    if content is None:
        yield Deliver(one.position.slot, offset, size, None)
        return
    header = data[entry.PROLOGUE.size :][: content.header_bytes]
    payload = data[content.payload_offset :][: content.payload_bytes]
    yield Deliver(one.position.slot, offset, size, header + payload)


def peer(protocol: Protocol, layout: RingLayout) -> Steps:
    """Abandons what it finds reserved, once each."""
    found = yield from protocol.produce.find_reserved(layout)
    for slot, word in found:
        yield from protocol.produce.abandon(layout, slot, word)
