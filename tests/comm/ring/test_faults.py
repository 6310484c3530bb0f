"""Producers that are killed or stopped in the middle of a message, as processes."""

from __future__ import annotations

import os
import random
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from comm.ring.team import LONGEST, Checker, connected, send_for_ever, start, stop_in_the_middle
from tilework.comm.ring import transport
from tilework.comm.ring.consumer import Ring
from tilework.comm.ring.errors import RingFull
from tilework.comm.ring.producer import Producer
from waiting import eventually

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


@pytest.mark.slow
def test_a_stopped_producer_is_killed_so_that_its_bytes_are_used_again() -> None:
    with Ring.create(1 << 14, 16, abandon_after_s=0.01, fence_after_s=0.02) as ring:
        stopped = _stopped_producer(ring)
        _go_on(ring)
        stopped.join()
        assert stopped.exitcode == -signal.SIGKILL
        assert (ring.stats.lost, ring.stats.fenced, ring.stats.quarantined_bytes) == (1, 1, 0)


@pytest.mark.slow
def test_bytes_that_may_still_be_written_are_not_used_again() -> None:
    with Ring.create(1 << 14, 16, abandon_after_s=0.01, fence_after_s=None) as ring:
        stopped = _stopped_producer(ring)
        eventually(lambda: ring.poll() is None and ring.stats.quarantined_bytes)
        assert (ring.stats.abandoned, ring.stats.used_bytes) == (1, ring.stats.quarantined_bytes)
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGCONT)  # It ends.
        eventually(lambda: ring.poll() is None and not ring.stats.used_bytes)
        assert (ring.stats.lost, ring.stats.fenced) == (1, 0)


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


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_500_rounds_of_killed_and_stopped_producers(tmp_path: Path) -> None:
    """Every committed message arrives once, intact, and in each producer's order."""
    rng = random.Random(7)
    with Ring.create(4 * LONGEST, 32, abandon_after_s=0.02, fence_after_s=5) as ring:
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
                checker.go_on_behind(victim)
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


def _suspend(checker: Checker, process: BaseProcess, seconds: float) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    checker.receive(seconds)
    os.kill(process.pid, signal.SIGCONT)
