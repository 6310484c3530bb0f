"""A producer that does not follow the protocol cannot crash the consumer: it gets messages, or an error."""

from __future__ import annotations

import random
from contextlib import suppress
from mmap import mmap

import pytest

from tilework.comm.ring.consume import Window
from tilework.comm.ring.errors import RingCorrupted
from tilework.comm.ring.layout import RingLayout, SlotState, Word
from tilework.comm.ring.transport import Message, Transport, spans, transport

LAYOUT = RingLayout(slots=8, units=32)
FOREVER = 1 << 62


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("is_atomic", [True, False])
def test_random_words_and_bytes_never_crash_the_consumer(is_atomic: bool, is_checked: bool, tmp_path: object) -> None:
    if is_atomic:
        pytest.importorskip("tilework.comm.ring._native", reason="the C extension was not built: no compiler")
    num_messages = num_errors = 0
    with open(f"{tmp_path}/memory", "w+b") as file:
        file.truncate(LAYOUT.size)
        for seed in range(300):
            rng = random.Random(seed)
            with mmap(file.fileno(), LAYOUT.size) as memory:
                memory[:] = bytes(LAYOUT.size)
                ring = transport(LAYOUT, memory, file.fileno(), is_atomic, is_checked)
                ring.epochs[1] = 1
                window = ring.recover(FOREVER)
                for _ in range(20):
                    try:
                        _disturb(rng, memory, ring, window)
                        num_messages += _use(rng, memory, ring, window)
                    except RingCorrupted:
                        num_errors += 1
                        break
    assert num_messages > 100
    assert num_errors > 100


def _disturb(rng: random.Random, memory: mmap, ring: Transport, window: Window) -> None:
    messages: list[Message] = [(rng.randbytes(8), rng.randbytes(100))] * 3
    ring.send(1, 1, messages, 0, -1, FOREVER)
    match rng.randrange(4):
        case 0:  # A word of the right generation, with anything else in it.
            number = window.scan.slot + rng.randrange(2)
            word = Word(LAYOUT.generation(number), rng.randrange(8), rng.randrange(1024), rng.randrange(64))
            memory[LAYOUT.slot(number) : LAYOUT.slot(number) + 8] = word.pack().to_bytes(8, "little")
        case 1:
            start = rng.randrange(LAYOUT.slots) * 8 + LAYOUT.first_slot
            memory[start : start + 8] = rng.randbytes(8)
        case 2:  # Prologues, whose lengths are not to be believed.
            start = LAYOUT.entry(window.scan.unit) + rng.randrange(24)
            memory[start : start + 8] = rng.choice((rng.randbytes(8), b"\xff" * 8))
        case 3:
            number = window.scan.slot
            word = Word(LAYOUT.generation(number), SlotState.RESERVED, 1, 1)
            memory[LAYOUT.slot(number) : LAYOUT.slot(number) + 8] = word.pack().to_bytes(8, "little")


def _use(rng: random.Random, memory: mmap, ring: Transport, window: Window) -> int:
    if rng.random() < 0.3:
        return len(ring.take(window, 4, FOREVER)[0])
    found = ring.look(window, 4, FOREVER)
    for one in found:
        if one.header_bytes >= 0:
            header, payload = spans(LAYOUT, one)
            assert len(memory[header]) == one.header_bytes
            assert len(memory[payload]) == one.payload_bytes
        with suppress(KeyError):
            ring.release(window, one.slot, FOREVER)
    ring.drop_fenced(window, rng.randrange(4), FOREVER)
    return len(found)
