"""A consumer that ends is replaced by another process, which goes on with the same memory."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

import pytest

from comm.ring.team import (
    LONGEST,
    NUMBER,
    connected,
    map_progress,
    payload_of,
    send_for_ever,
    start,
    stop_in_the_middle,
)
from tilework.comm.ring import transport
from tilework.comm.ring.consumer import Ring
from tilework.comm.ring.errors import RingClosed, RingCorrupted, RingError, RingFull
from tilework.comm.ring.producer import Producer
from waiting import PATIENCE_S, eventually


@pytest.fixture(params=["extension", "lock"])
def directory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """For a lasting ring, on both back ends. Also the consumers' own processes heed the environment."""
    if request.param == "lock":
        monkeypatch.setitem(sys.modules, "tilework.comm.ring._native", None)
    elif not transport.has_extension():
        pytest.skip("the C extension was not built: no compiler")
    return tmp_path / "ring"


def abandon(ring: Ring) -> None:
    """Leave a ring as a process does that is killed: nothing is told to anyone."""
    ring._members.close()
    ring._selector.close()
    ring._site.listener.close()
    ring._site._place.close()
    ring._is_open = False


def create(directory: Path, **options: float | None) -> Ring:
    return Ring.create(1 << 14, 16, directory=directory, **options)  # type: ignore[arg-type]


def receive(ring: Ring, count: int) -> list[bytes]:
    """The headers of the next messages."""
    got: list[bytes] = []
    while len(got) < count:
        copies = ring.take(count - len(got), timeout_s=PATIENCE_S)
        assert copies
        got += [header for header, _ in copies]
    return got


def test_what_was_not_released_comes_again_and_what_is_sent_meanwhile_comes_too(directory: Path) -> None:
    ring = create(directory)
    with connected(ring) as producer:
        for name in (b"a", b"b", b"c"):
            producer.send(name)
        first, second = ring.poll(), ring.poll()
        assert first is not None
        assert second is not None
        first.release()
        abandon(ring)
        producer.send(b"d")
        with Ring.resume(directory) as again:
            assert again.stats.producers == 1
            assert receive(again, 3) == [b"b", b"c", b"d"]
            assert (again.stats.used_bytes, again.stats.damaged, again.stats.lost) == (0, 0, 0)


def test_producers_go_on_and_connect_to_the_new_consumer(directory: Path) -> None:
    ring = create(directory)
    with connected(ring) as producer:
        producer.send(b"old")
        abandon(ring)
        with pytest.raises(RingFull):
            producer.send_all([(b"%d" % number, bytes(1000)) for number in range(40)], timeout_s=0.05)
        num_sent = producer.stats.sent
        with Ring.resume(directory) as again:
            assert receive(again, num_sent) == [b"old", *(b"%d" % number for number in range(num_sent - 1))]
            thread = Thread(target=lambda: _send_until_rejoined(producer))
            thread.start()
            got: list[bytes] = []
            while got[-1:] != [b"rejoined"]:
                got += receive(again, 1)
            thread.join()
            assert got[:-1] == [b"%d" % number for number in range(len(got) - 1)]
            eventually(lambda: again.poll() is None and again.stats.producers == 1)
            assert not again._members.adopted


def test_a_consumer_that_does_not_answer_is_written_to_as_before(directory: Path) -> None:
    """It is busy; what it has accepted meanwhile has left when it looks."""
    ring = create(directory)
    with connected(ring) as producer:
        abandon(ring)
        before = producer.owner
        with Ring.resume(directory) as again:
            producer._look_at_ns = 0
            producer.send(b"in vain")
            assert (producer.owner, receive(again, 1)) == (before, [b"in vain"])
            eventually(lambda: again.poll() is None and not again._members.ended)
            assert again.stats.producers == 1


def _send_until_rejoined(producer: Producer) -> None:
    before, numbers = producer.owner, count()

    def has_rejoined() -> bool:
        producer.send(b"%d" % next(numbers))
        return producer.owner != before

    eventually(has_rejoined)
    producer.send(b"rejoined")


def test_a_new_consumer_wakes_for_a_producer_that_rings_the_old_bell(directory: Path) -> None:
    ring = create(directory)
    with connected(ring) as producer:
        abandon(ring)
        with Ring.resume(directory) as again:
            assert again.recv(timeout_s=0.01) is None
            producer._look_at_ns = 1 << 62  # It does not notice that it has another consumer.
            thread = Thread(target=lambda: (time.sleep(0.02), producer.send(b"ding")))
            thread.start()
            message = again.recv(timeout_s=PATIENCE_S)
            assert message is not None
            assert message.header == b"ding"
            message.release()
            thread.join()


@pytest.mark.slow
def test_an_entry_of_a_producer_that_ended_meanwhile_is_given_up_at_once(directory: Path) -> None:
    ring = create(directory, abandon_after_s=60)
    stopped = _stopped_producer(ring)
    abandon(ring)
    stopped.kill()
    stopped.join()
    with Ring.resume(directory, abandon_after_s=60) as again:
        eventually(lambda: again.poll() is None and not again.stats.used_bytes)
        assert (again.stats.lost, again.stats.abandoned, again.stats.producers) == (1, 0, 0)


@pytest.mark.slow
def test_an_entry_of_a_producer_that_still_lives_is_kept_free_until_it_is_killed(directory: Path) -> None:
    ring = create(directory)
    stopped = _stopped_producer(ring)
    abandon(ring)
    with Ring.resume(directory, abandon_after_s=0.01, fence_after_s=None) as again:
        eventually(lambda: again.poll() is None and again.stats.quarantined_bytes)
        assert again.stats.producers == 1
        abandon(again)
    with Ring.resume(directory, abandon_after_s=0.01, fence_after_s=0.02) as again:
        eventually(lambda: again.poll() is None and not again.stats.used_bytes)
        stopped.join()
        assert stopped.exitcode == -signal.SIGKILL
        assert (again.stats.fenced, again.stats.lost, again.stats.producers) == (1, 1, 0)


@pytest.mark.slow
def test_a_process_of_the_same_number_is_not_killed_for_another(directory: Path) -> None:
    """An owner's file is held by a fork of its process, and the number is a later process's."""
    ring = create(directory)
    stopped = _stopped_producer(ring)
    abandon(ring)
    (file,) = directory.glob("owner-*")
    record = bytearray(file.read_bytes())
    record[-8:] = (12345).to_bytes(8, "little")  # It began at another time.
    file.write_bytes(record)
    with Ring.resume(directory, abandon_after_s=0.01, fence_after_s=0.01) as again:
        eventually(lambda: again.poll() is None and again.stats.quarantined_bytes)
        for _ in range(50):
            assert again.recv(timeout_s=1e-3) is None
        assert (again.stats.fenced, stopped.exitcode) == (0, None)
        stopped.kill()
        stopped.join()


def test_ids_of_former_producers_are_given_away_again(directory: Path) -> None:
    ring = create(directory)
    with connected(ring) as producer:
        producer.send(b"last words")
    abandon(ring)
    with Ring.resume(directory) as again:
        assert producer.owner[0] not in again._members._free, "its message is in the ring"
        assert receive(again, 1) == [b"last words"]
        eventually(lambda: again.poll() is None and not again._members.ended)
        assert producer.owner[0] in again._members._free


def test_a_second_consumer_is_refused_while_the_first_one_lives(directory: Path) -> None:
    with create(directory), pytest.raises(RingError, match="has a consumer that lives; end it first"):
        Ring.resume(directory)


def test_where_there_is_no_ring_none_is_resumed(directory: Path) -> None:
    with pytest.raises(RingError, match="there is no ring"):
        Ring.resume(directory)
    with create(directory) as ring:
        ring.close()
    with pytest.raises(RingError, match="there is no ring"):
        Ring.resume(directory)


def test_a_damaged_ring_is_refused_each_time(directory: Path) -> None:
    """Not because the first try had a consumer that lives."""
    ring = create(directory)
    slot = ring._layout.first_slot
    ring._memory[slot : slot + 8] = (5 << 40).to_bytes(8, "little")  # Of a generation that is to come.
    abandon(ring)
    for _ in range(2):
        with pytest.raises(RingCorrupted, match="slot 0"):
            Ring.resume(directory)


def test_a_ring_is_not_made_where_one_is(directory: Path) -> None:
    abandon(create(directory))
    with pytest.raises(RingError, match="is not empty; resume the ring there"):
        create(directory)


def test_a_ring_that_has_no_room_leaves_nothing_behind(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RingError, match="has no room for a ring of"):
        create(directory)
    assert not list(directory.iterdir())


def test_a_closed_ring_is_noticed_although_it_could_have_been_resumed(directory: Path) -> None:
    ring = create(directory)
    with connected(ring) as producer:
        ring.close()
        producer._look_at_ns = 0
        with pytest.raises(RingClosed, match="has closed the ring"):
            producer.send(b"")


def _stopped_producer(ring: Ring) -> BaseProcess:
    process = start(stop_in_the_middle, ring.address())
    while not ring.stats.used_bytes:
        assert ring.recv(timeout_s=0.01) is None
    return process


def consume_for_ever(directory: str, received_path: str, is_first: bool, seed: int) -> None:
    """Write down each message that comes, then release it; sometimes hold several."""
    rng = random.Random(seed)
    options = {"abandon_after_s": 0.02, "fence_after_s": 5.0}
    if is_first:
        ring = Ring.create(4 * LONGEST, 32, directory=Path(directory), **options)  # type: ignore[arg-type]
    else:
        ring = Ring.resume(Path(directory), **options)
    held = []
    with open(received_path, "ab", buffering=0) as received:
        while True:
            message = ring.recv(timeout_s=0.01)
            if message is not None:
                _, _, content = NUMBER.unpack(message.header)
                assert bytes(message.payload) == payload_of(content, len(message.payload)), "it is not intact"
                received.write(message.header)
                held.append(message)
            if message is None or rng.random() < 0.5:
                rng.shuffle(held)
                for one in held:
                    one.release()
                held.clear()


def _received(path: Path, num_senders: int) -> list[list[int]]:
    """Numbers of messages by sender, in the order in which they came."""
    numbers: list[list[int]] = [[] for _ in range(num_senders)]
    for sender, number, _ in NUMBER.iter_unpack(_whole(path.read_bytes())):
        numbers[sender].append(number)
    return numbers


def _whole(data: bytes) -> bytes:
    return data[: len(data) - len(data) % NUMBER.size]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not transport.has_extension(), reason="the C extension was not built: no compiler")
def test_60_rounds_of_killed_consumers_and_producers(tmp_path: Path) -> None:
    """What senders were told is sent arrives, in each one's order, but for what came again after a kill."""
    rng, place, received = random.Random(11), tmp_path / "ring", tmp_path / "received"
    progress_path = tmp_path / "progress"
    progress_path.write_bytes(bytes(4096))
    received.touch()
    progress = map_progress(str(progress_path))
    seeds: Iterator[int] = iter(range(10_000))

    def sent(sender: int) -> int:
        return int.from_bytes(progress[sender * 8 : sender * 8 + 8], "little")

    consumer = start(consume_for_ever, str(place), str(received), True, next(seeds))
    eventually((place / "ring").exists)
    senders = [start(send_for_ever, str(place / "ring"), one, str(progress_path), next(seeds)) for one in range(3)]
    eventually(lambda: all(sent(one) > 5 for one in range(3)))
    killed = set()
    for number in range(60):
        time.sleep(rng.random() * 0.05)
        consumer.kill()
        consumer.join()
        if number % 20 == 10:
            victim = number // 20
            killed.add(victim)
            senders[victim].kill()
            senders[victim].join()
        time.sleep(rng.random() * 0.02)
        consumer = start(consume_for_ever, str(place), str(received), False, next(seeds))
        size = received.stat().st_size
        eventually(lambda size=size: received.stat().st_size > size or len(killed) == 3)  # type: ignore[misc]
    for process in senders:
        process.kill()
        process.join()
    eventually(lambda: all(max(got, default=-1) >= sent(one) - 1 for one, got in enumerate(_received(received, 3))))
    consumer.kill()
    consumer.join()
    for sender, got in enumerate(_received(received, 3)):
        seen = -1
        for number in got:
            assert number <= seen + 1, f"messages of {sender} are missing or out of order"
            seen = max(seen, number)
        assert sent(sender) - 1 <= seen <= sent(sender), "a message is lost, or was never sent"
        assert len(got) < 3 * seen, "messages come again that were released"
