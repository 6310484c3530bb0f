"""Producers that are killed or stopped in the middle of a message, as processes."""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

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
from tilework.comm.ring.errors import RingFull
from tilework.comm.ring.producer import Producer

if not transport.has_extension():
    pytest.skip("the C extension was not built: no compiler", allow_module_level=True)


@pytest.mark.slow
def test_a_killed_producer_holds_no_bytes() -> None:
    with Ring.create(1 << 14, 16, abandon_after_s=60) as ring:
        stopped = _stopped_producer(ring)
        stopped.kill()
        stopped.join()
        _go_on(ring)
        assert (ring.stats.lost, ring.stats.abandoned, ring.stats.quarantined_bytes) == (1, 0, 0)


def test_a_stopped_producer_is_killed_so_that_its_bytes_are_used_again() -> None:
    with Ring.create(1 << 14, 16, abandon_after_s=0.01, kill_after_s=0.02) as ring:
        stopped = _stopped_producer(ring)
        _go_on(ring)
        stopped.join()
        assert stopped.exitcode == -signal.SIGKILL
        assert (ring.stats.lost, ring.stats.killed, ring.stats.quarantined_bytes) == (1, 1, 0)


def test_bytes_that_may_still_be_written_are_not_used_again() -> None:
    with Ring.create(1 << 14, 16, abandon_after_s=0.01, kill_after_s=None) as ring:
        stopped = _stopped_producer(ring)
        while not ring.stats.quarantined_bytes:
            ring.recv(timeout_s=0.01)
        assert (ring.stats.abandoned, ring.stats.used_bytes) == (1, ring.stats.quarantined_bytes)
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGCONT)  # It ends.
        while ring.stats.used_bytes:
            ring.recv(timeout_s=0.01)
        assert (ring.stats.lost, ring.stats.killed) == (1, 0)


def _stopped_producer(ring: Ring) -> BaseProcess:
    process = start(stop_in_the_middle, ring.address())
    while not ring.stats.used_bytes:
        assert ring.recv(timeout_s=0.01) is None
    return process


def _go_on(ring: Ring) -> None:
    """Send more than the ring holds, past the entry of a producer that does not continue."""
    with connected(ring) as producer:
        got: list[tuple[bytes, bytes]] = []
        for number in range(40):
            while not _try_to_send(producer, number):
                got += ring.take()
        while len(got) < 40:
            got += ring.take()
        assert [header for header, _ in got] == [b"%d" % number for number in range(40)]


def _try_to_send(producer: Producer, number: int) -> bool:
    try:
        producer.send(b"%d" % number, bytes(3000), timeout_s=0)
    except RingFull:
        return False
    return True


PATIENCE_S = 60.0


class Checker:
    """Takes messages and holds them against what each sender says that it has sent."""

    def __init__(self, ring: Ring, num_senders: int, progress: Path) -> None:
        self.ring = ring
        progress.write_bytes(bytes(4096))
        self.progress = map_progress(str(progress))
        self.next_number = [0] * num_senders

    def sent(self, sender: int) -> int:
        return int.from_bytes(self.progress[sender * 8 : sender * 8 + 8], "little")

    def receive(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            message = self.ring.recv(timeout_s=left)
            if message is None:
                return
            with message:
                sender, number, content = NUMBER.unpack(message.header)
                assert bytes(message.payload) == payload_of(content, len(message.payload)), "a message is not intact"
                assert number == self.next_number[sender], "a message is missing, doubled or out of order"
                self.next_number[sender] += 1

    def receive_all(self, sender: int) -> None:
        """Until what an ended sender took for sent has arrived, and at most the one that it was told nothing of."""
        end = time.monotonic() + PATIENCE_S
        while self.next_number[sender] < self.sent(sender):
            assert time.monotonic() < end, "a message that was sent does not arrive"
            self.receive(0.01)
        assert self.next_number[sender] <= self.sent(sender) + 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_500_rounds_of_killed_and_stopped_producers(tmp_path: Path) -> None:
    """Every committed message arrives once, intact, and in each producer's order."""
    rng = random.Random(7)
    with Ring.create(4 * LONGEST, 32, abandon_after_s=0.02, kill_after_s=5) as ring:
        checker = Checker(ring, 3, tmp_path / "progress")
        seeds = iter(range(10_000))

        def begin(sender: int) -> BaseProcess:
            return start(send_for_ever, ring.address(), sender, str(tmp_path / "progress"), next(seeds))

        senders = [begin(sender) for sender in range(3)]
        for _ in range(500):
            checker.receive(rng.random() * 0.02)
            victim = rng.randrange(3)
            before = checker.next_number[victim]
            while checker.next_number[victim] == before:  # It may have just begun.
                checker.receive(0.002)
            if rng.random() < 0.5:
                senders[victim].kill()
                senders[victim].join()
                while ring.stats.producers == 3:
                    checker.receive(0.005)
                checker.receive_all(victim)
                checker.receive(0.005)
                _count(checker, victim)
                senders[victim] = begin(victim)
            else:
                _suspend(checker, senders[victim], 0.01 + rng.random() * 0.05)
        checker.receive(0.5)
        for sender, process in enumerate(senders):
            process.kill()
            process.join()
            checker.receive_all(sender)
        stats = ring.stats
        assert stats.damaged == 0
        assert min(stats.lost, stats.abandoned) > 5
        assert min(checker.next_number) > 50


def _count(checker: Checker, sender: int) -> None:
    """Its successor begins behind the message that arrived without the sender being told."""
    number = checker.next_number[sender]
    checker.progress[sender * 8 : sender * 8 + 8] = number.to_bytes(8, "little")


def _suspend(checker: Checker, process: BaseProcess, seconds: float) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    checker.receive(seconds)
    os.kill(process.pid, signal.SIGCONT)
