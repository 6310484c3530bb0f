"""The C extension does what the steps do: from every state of a small ring, and in random sequences."""

from __future__ import annotations

import random
from mmap import mmap
from threading import Thread

import pytest

from comm.ring.cases import QUICK
from comm.ring.explorer import Explorer
from comm.ring.programs import setting
from tilework.comm.ring import produce
from tilework.comm.ring.consume import Window
from tilework.comm.ring.errors import RingCorrupted
from tilework.comm.ring.layout import Position, RingLayout
from tilework.comm.ring.transport import Found, Message, SendOutcome, Transport, has_extension, spans
from tilework.comm.ring.verbs import carry_out

if not has_extension():
    pytest.skip("the C extension was not built: no compiler", allow_module_level=True)

from tilework.comm.ring import _native
from tilework.comm.ring.atomic import AtomicMemory, AtomicTransport

FOREVER = 1 << 62
CRC32C = {b"": 0, b"123456789": 0xE3069283, bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43}
"""RFC 3720, section B.4."""


@pytest.mark.parametrize("data", CRC32C)
def test_the_checksum_is_crc32c(data: bytes) -> None:
    assert _native.crc32c(data, 0) == CRC32C[data]


def test_the_checksum_of_parts_is_that_of_the_whole() -> None:
    data = random.Random(1).randbytes(100_000)
    whole = _bitwise(data)
    for cut in (0, 1, 7, 767, 768, 6144, 50_001):
        assert _native.crc32c(data[cut:], _native.crc32c(data[:cut], 0)) == whole


def _bitwise(data: bytes) -> int:
    table = []
    for index in range(256):
        value = index
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


class Twins:
    """Two rings of equal memory: one is used step by step, the other by the C extension."""

    def __init__(self, layout: RingLayout, is_checked: bool) -> None:
        self.layout = layout
        self.memories = [mmap(-1, layout.size) for _ in range(2)]
        self.stepped = Transport(layout, AtomicMemory(self.memories[0]), self.memories[0], is_checked)
        self.native = AtomicTransport(layout, AtomicMemory(self.memories[1]), self.memories[1], is_checked)
        self.both: tuple[Transport, Transport] = (self.stepped, self.native)
        for transport in self.both:
            for owner in range(8):
                transport.epochs[owner] = 1
        self.begin()

    def fill(self, data: bytes) -> None:
        for memory in self.memories:
            memory[:] = data

    def begin(self) -> None:
        self.windows = [transport.recover(FOREVER) for transport in self.both]

    def send(self, owner: int, messages: list[Message]) -> tuple[int, int]:
        return self._same(transport.send(owner, 1, messages, 0, -1, FOREVER) for transport in self.both)

    def look(self, limit: int) -> list[Found]:
        return self._same(transport.look(self.windows[i], limit, FOREVER) for i, transport in enumerate(self.both))

    def take(self, limit: int) -> tuple[list[tuple[bytes, bytes]], int]:
        return self._same(transport.take(self.windows[i], limit, FOREVER) for i, transport in enumerate(self.both))

    def release(self, slot: int) -> None:
        self._same(transport.release(self.windows[i], slot, FOREVER) for i, transport in enumerate(self.both))

    def drop_fenced(self, owner: int) -> None:
        self._same(transport.drop_fenced(self.windows[i], owner, FOREVER) for i, transport in enumerate(self.both))

    def step(self, steps: object) -> object:
        """The same steps in both memories."""
        return self._same(carry_out(steps(), AtomicMemory(memory), FOREVER) for memory in self.memories)  # type: ignore[operator]

    def _same(self, results: object) -> object:  # type: ignore[no-untyped-def]
        first, second = results  # type: ignore[misc, attr-defined]
        assert first == second
        assert self.windows[0] == self.windows[1]
        assert self.memories[0][:] == self.memories[1][:]
        return first


@pytest.mark.parametrize("name", ["two messages that wrap", "two producers", "late bytes"])
def test_from_every_state_of_a_small_ring_both_do_the_same(name: str) -> None:
    chosen = setting(**QUICK[name])
    explorer = Explorer(chosen)
    explorer.run()
    memories = {state.memory for state in explorer.states}
    layout = chosen.layout
    twins = Twins(layout, is_checked=False)
    assert len(memories) > 20
    for memory in memories:
        data = _bytes(layout, memory)
        twins.fill(data)
        twins.windows = [Window(*(Position.unpack(memory[0]),) * 2) for _ in range(2)]
        twins.send(3, [(b"x",), (b"header", bytes(range(64)) if layout.units > 2 else b"")])
        twins.fill(data)
        twins.begin()
        for _ in range(3):
            for found in twins.look(limit=2):
                twins.release(found.slot)


def _bytes(layout: RingLayout, memory: tuple[object, ...]) -> bytes:
    head, hint, *rest = memory
    data = bytearray(layout.size)
    words = {layout.head: head, layout.hint: hint}
    words.update((layout.slot(number), rest[number]) for number in range(layout.slots))
    for offset, word in words.items():
        assert isinstance(word, int)
        data[offset : offset + 8] = word.to_bytes(8, "little")
    data[layout.data :] = b"".join(cell for cell in rest[layout.slots :] if isinstance(cell, bytes))
    return bytes(data)


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_random_sequences_do_the_same(seed: int, is_checked: bool) -> None:
    rng = random.Random(seed)
    twins = Twins(RingLayout(slots=8, units=32), is_checked)
    reserved: dict[int, produce.Reservation] = {}
    held: list[Found] = []
    for _ in range(400):
        free = [owner for owner in range(4) if owner not in reserved]
        match rng.randrange(8):
            case 0 | 1:
                # Now and then by an owner that has not decided an earlier entry, as if it had done so just now.
                owner = rng.choice(free) if free and rng.random() < 0.8 else rng.randrange(4)
                buffers = tuple(rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(3)))
                twins.send(owner, [(rng.randbytes(rng.randrange(80)), *buffers)] * rng.randrange(1, 3))
            case 2 if free:
                owner = rng.choice(free)
                reservation = twins.step(lambda owner=owner: produce.reserve(twins.layout, owner, rng.choice((1,))))
                if reservation is not None:
                    assert isinstance(reservation, produce.Reservation)
                    reserved[owner] = reservation
            case 3 if reserved:
                one = reserved.pop(rng.choice(list(reserved)))
                twins.step(lambda one=one: produce.commit(twins.layout, one))
            case 4 if reserved:
                one = rng.choice(list(reserved.values()))
                twins.step(lambda one=one: produce.abandon(twins.layout, one.position.slot, one.word))
            case 5:
                held += twins.look(rng.randrange(1, 4))
            case 6 if held:
                twins.release(held.pop(rng.randrange(len(held))).slot)
            case 7 if rng.random() < 0.3:
                twins.drop_fenced(rng.randrange(4))
            case 7 if not held:
                twins.take(rng.randrange(1, 6))


def test_an_entry_that_is_abandoned_while_the_extension_writes_it_is_lost_and_given_back() -> None:
    layout = RingLayout(slots=4, units=1 << 19)
    memory = mmap(-1, layout.size)
    ring = AtomicTransport(layout, AtomicMemory(memory), memory, is_checked=True)
    messages: list[Message] = [(b"", bytes(15 << 20))]
    window = ring.recover(FOREVER)
    for _ in range(200):
        results: list[tuple[int, int]] = []
        thread = Thread(target=lambda results=results: results.append(ring.send(1, 1, messages, 0, -1, FOREVER)))
        thread.start()
        while not (reserved := ring.find_reserved(FOREVER)) and thread.is_alive():
            pass
        is_abandoned = all(ring.abandon(slot, word, FOREVER) for slot, word in reserved) and bool(reserved)
        thread.join()
        assert results == [(0, SendOutcome.LOST) if is_abandoned else (1, SendOutcome.SENT)]
        ring.take(window, 1, FOREVER)
        assert window.head == window.scan
        if is_abandoned:
            return
    pytest.fail("the entry was always committed before it could be abandoned")


def test_both_read_what_was_sent() -> None:
    twins = Twins(RingLayout(slots=4, units=64), is_checked=True)
    parts = [b"a" * 100, memoryview(b"bcd" * 30), bytearray(b"e")]
    twins.send(1, [(b"header", *parts)])
    (found,) = twins.look(1)
    header, payload = spans(twins.layout, found)
    for memory in twins.memories:
        assert memory[header] == b"header"
        assert memory[payload] == b"".join(parts)
        assert payload.start % 64 == 0


def test_damaged_bytes_are_noticed_by_both() -> None:
    for is_checked in (True, False):
        twins = Twins(RingLayout(slots=4, units=64), is_checked)
        twins.send(1, [(b"header", b"payload" * 20)])
        for memory in twins.memories:
            memory[twins.layout.data + 100] ^= 1
        copies, num_damaged = twins.take(1)
        assert (len(copies), num_damaged) == ((0, 1) if is_checked else (1, 0))


def test_a_word_that_no_producer_writes_is_an_error() -> None:
    for bad in (5 << 37, 3 << 40, 2 << 37, (2 << 37) | 100):
        for index in range(2):
            twins = Twins(RingLayout(slots=4, units=64), is_checked=True)
            for memory in twins.memories:
                memory[twins.layout.slot(0) : twins.layout.slot(0) + 8] = bad.to_bytes(8, "little")
            with pytest.raises(RingCorrupted):
                twins.both[index].look(twins.windows[index], 1, FOREVER)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("get", (0, 1 << 40)),
        ("get", (1 << 63, 8)),
        ("put", (4300, b"x" * 100)),
        ("cas64", (4, 0, 0)),
        ("send", (3, 4, 0, 0, True, -1, [], 0)),
        ("send", (2, 1 << 20, 0, 0, True, -1, [], 0)),
        ("send", (2, 4, 0, 0, True, -1, [()], 0)),
        ("send", (2, 4, 0, 0, True, -1, [(b"", bytes(300))], 0)),
        ("send", (2, 4, 2000, 0, True, -1, [], 0)),
    ],
)
def test_calls_outside_the_memory_are_errors(call: str, arguments: tuple[object, ...]) -> None:
    memory = mmap(-1, RingLayout(2, 4).size)
    with pytest.raises((ValueError, OverflowError)):
        getattr(_native, call)(memory, *arguments)
