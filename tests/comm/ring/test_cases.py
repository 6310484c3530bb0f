"""Named cases of the ring: a producer that stops at each place, bytes that arrive late, a consumer that begins anew."""

from __future__ import annotations

import zlib
from mmap import mmap

import pytest

from tilework.comm.ring import consume, produce
from tilework.comm.ring.entry import encode
from tilework.comm.ring.layout import RingLayout, SlotState, Word
from tilework.comm.ring.transport import Message, SendOutcome, Transport
from tilework.comm.ring.verbs import Buffer, Put, Steps, carry_out

LAYOUT = RingLayout(slots=4, units=8)
FOREVER = 1 << 62


class PlainMemory:
    """Memory of this process alone."""

    def __init__(self, layout: RingLayout) -> None:
        self.memory = mmap(-1, layout.size)

    def get(self, offset: int, size: int, *, deadline_ns: int) -> bytes:
        return self.memory[offset : offset + size]

    def put(self, offset: int, buffers: tuple[Buffer, ...], *, deadline_ns: int) -> None:
        data = b"".join(buffers)
        self.memory[offset : offset + len(data)] = data

    def cas64(self, offset: int, expected: int, desired: int, *, deadline_ns: int) -> int:
        seen = int.from_bytes(self.memory[offset : offset + 8], "little")
        if seen == expected:
            self.memory[offset : offset + 8] = desired.to_bytes(8, "little")
        return seen

    def flush(self, *, deadline_ns: int) -> None:
        pass

    def checksum(self, buffer: Buffer, value: int) -> int:
        return zlib.crc32(buffer, value)


class Bench:
    """A ring with a consumer, and the steps of producers one by one."""

    def __init__(self) -> None:
        self.memory = PlainMemory(LAYOUT)
        self.transport = Transport(LAYOUT, self.memory, self.memory.memory, is_checked=True)
        self.transport.epochs[1] = self.transport.epochs[2] = 1
        self.window = self.transport.recover(FOREVER)

    def run(self, steps: Steps[object]) -> object:
        return carry_out(steps, self.memory, FOREVER)

    def reserve(self, owner: int) -> produce.Reservation:
        reservation = self.run(produce.reserve(LAYOUT, owner, 1))
        assert isinstance(reservation, produce.Reservation)
        return reservation

    def write(self, reservation: produce.Reservation, header: bytes) -> None:
        pieces = encode(reservation.position.slot, 1, header, [], zlib.crc32)
        self.run(produce.write(LAYOUT, reservation, pieces))

    def commit(self, reservation: produce.Reservation) -> bool:
        return bool(self.run(produce.commit(LAYOUT, reservation)))

    def send(self, owner: int, header: bytes) -> int:
        messages: list[Message] = [(header,)]
        return self.transport.send(owner, 1, messages, 0, -1, FOREVER)[1]

    def take(self) -> list[bytes]:
        copies, num_damaged = self.transport.take(self.window, 100, FOREVER)
        assert num_damaged == 0
        return [header for header, _ in copies]

    def give_up(self, reservation: produce.Reservation) -> None:
        assert self.transport.abandon(reservation.position.slot, reservation.word, FOREVER)

    @property
    def is_empty(self) -> bool:
        return self.window.head == self.window.scan


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("is_written", [False, True], ids=["crash after reserve", "crash after put"])
def test_others_go_on_past_an_entry_whose_owner_crashed(bench: Bench, is_written: bool) -> None:
    reservation = bench.reserve(1)
    if is_written:
        bench.write(reservation, b"never")
    assert bench.send(2, b"after") == SendOutcome.SENT
    assert bench.take() == [b"after"]
    assert not bench.is_empty
    bench.transport.drop_fenced(bench.window, 1, FOREVER)
    assert bench.is_empty


def test_a_crash_before_the_hint_hinders_no_other(bench: Bench) -> None:
    steps = produce.reserve(LAYOUT, 1, 1)
    verb = next(steps)
    while True:
        answer = bench.run(_single(verb))
        verb = steps.send(answer)
        if getattr(verb, "offset", None) == LAYOUT.hint and not hasattr(verb, "size"):
            break  # The compare-and-swap that moves the hint is not carried out.
    for number in range(20):
        assert bench.send(2, b"%d" % number) == SendOutcome.SENT
        assert bench.take() == [b"%d" % number]
        bench.transport.drop_fenced(bench.window, 1, FOREVER)


def _single(verb: object) -> Steps[object]:
    return (yield verb)  # type: ignore[misc]


def test_a_put_that_comes_after_the_entry_was_abandoned_changes_no_other(bench: Bench) -> None:
    late = bench.reserve(1)
    bench.take()
    bench.give_up(late)
    sent = []
    while bench.send(2, b"%d" % len(sent)) == SendOutcome.SENT:
        sent.append(b"%d" % len(sent))
    assert bench.take() == sent
    assert bench.send(2, b"more") == SendOutcome.FULL  # The bytes of the late one are kept free for it.
    bench.write(late, b"late")
    assert not bench.commit(late)
    assert bench.take() == []
    assert bench.is_empty
    assert bench.send(2, b"more") == SendOutcome.SENT
    assert bench.take() == [b"more"]


def test_a_late_commit_after_the_owner_was_fenced_is_a_known_loss(bench: Bench) -> None:
    late = bench.reserve(1)
    bench.take()
    bench.transport.drop_fenced(bench.window, 1, FOREVER)
    for number in range(LAYOUT.slots):
        assert bench.send(2, b"%d" % number) == SendOutcome.SENT
        assert not bench.commit(late)
        assert bench.take() == [b"%d" % number]


def test_a_consumer_that_begins_anew_gets_what_was_not_released(bench: Bench) -> None:
    open_entry = bench.reserve(1)
    for header in (b"a", b"b"):
        bench.send(2, header)
    first, second = bench.transport.look(bench.window, 2, FOREVER)
    bench.transport.release(bench.window, first.slot, FOREVER)
    bench.window = bench.transport.recover(FOREVER)
    assert bench.take() == [b"b"]
    bench.write(open_entry, b"c")
    assert bench.commit(open_entry)
    assert bench.take() == [b"c"]
    assert bench.is_empty
    assert second.owner == 2


def test_a_consumer_that_crashed_before_it_emptied_slots_is_continued(bench: Bench) -> None:
    bench.send(1, b"a")
    (found,) = bench.transport.look(bench.window, 1, FOREVER)
    steps = consume.release(LAYOUT, bench.window, found.slot)
    verb = next(steps)
    assert isinstance(verb, Put)
    bench.run(_single(verb))  # The head; the slot is not emptied.
    assert bench.send(1, b"b") == SendOutcome.SENT
    bench.window = bench.transport.recover(FOREVER)
    assert bench.take() == [b"b"]
    for number in range(2 * LAYOUT.slots):
        assert bench.send(1, b"%d" % number) == SendOutcome.SENT
        assert bench.take() == [b"%d" % number]


def test_positions_and_words_wrap() -> None:
    """A ring whose counters are about to overflow works as any other."""
    bench = Bench()
    last = (1 << 32) - 2
    start = last << 32 | last
    for offset in (LAYOUT.head, LAYOUT.hint):
        bench.memory.put(offset, (start.to_bytes(8, "little"),), deadline_ns=FOREVER)
    for number in range(last, last + LAYOUT.slots):
        word = LAYOUT.empty(number % (1 << 32))
        bench.memory.put(LAYOUT.slot(number), (word.to_bytes(8, "little"),), deadline_ns=FOREVER)
    bench.window = bench.transport.recover(FOREVER)
    for number in range(3 * LAYOUT.slots):
        assert bench.send(1, b"%d" % number) == SendOutcome.SENT
        assert bench.take() == [b"%d" % number]
    assert bench.window.head.slot < LAYOUT.slots * 4


def test_a_word_has_its_parts_where_the_page_says() -> None:
    word = Word(0xABCDEF, SlotState.ABANDONED, 0x3FF, 0x7FFFFFF)
    assert word.pack() == 0xABCDEF << 40 | 4 << 37 | 0x3FF << 27 | 0x7FFFFFF
    assert Word.unpack(word.pack()) == word
