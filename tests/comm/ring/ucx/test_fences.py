"""Producers of a ring over UCX that are killed, and stopped and fenced: nothing of them reaches the memory any more."""

from __future__ import annotations

import os
import random
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from comm.ring.team import Checker, connected, send_for_ever, start, stop_in_the_middle
from tilework.comm.ring.consumer import Message, Ring
from tilework.comm.ring.errors import RingClosed, VerbFailed
from tilework.comm.ring.network import Network
from tilework.comm.ring.produce import reserve, write
from tilework.comm.ring.producer import Producer
from tilework.comm.ring.verbs import carry_out

pytest.importorskip("tilework.comm.ring._native", reason="the C extension was not built: no compiler")
pytest.importorskip("libucx", reason="the extra ucx is not installed")

TCP, SHARED = Network(host="127.0.0.1"), Network(host="127.0.0.1", transports="posix,self")
RING_BYTES = 1 << 16
LATE = b"late" * 4096


def write_late(address: str) -> None:
    """Reserve an entry, stop, and write it when continued. The exit status is 0 if all that is found out."""
    producer = Producer.connect(address)
    ring = producer._transport
    reservation = carry_out(reserve(ring.layout, producer.owner[0], len(LATE) // 64), ring._memory, 1 << 62)
    assert reservation is not None
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        carry_out(write(ring.layout, reservation, [LATE]), ring._memory, 1 << 62)  # At once, not by a deadline.
    except VerbFailed:
        try:
            producer.send(b"after it was fenced")
        except RingClosed:
            return
    sys.exit("the producer did not learn that it was fenced")


@pytest.mark.parametrize("network", [TCP, pytest.param(SHARED, marks=pytest.mark.slow)])
def test_late_bytes_of_a_fenced_producer_damage_nothing(network: Network) -> None:
    with Ring.create(RING_BYTES, 16, network=network, abandon_after_s=0.01, fence_after_s=0.02) as ring:
        stopped = start(write_late, ring.address())
        while not ring.stats.fenced:
            assert ring.recv(timeout_s=0.01) is None
        while ring.stats.producers:
            assert ring.recv(timeout_s=0.01) is None
        assert (ring.stats.lost, ring.stats.quarantined_bytes, ring.stats.used_bytes) == (1, 0, 0)
        with connected(ring) as producer:
            held = _fill(ring, producer)
            assert stopped.pid is not None
            os.kill(stopped.pid, signal.SIGCONT)
            while stopped.is_alive():
                assert ring.recv(timeout_s=0.01) is None
            assert [bytes(message.payload) for message in held] == [bytes([number]) * 16_000 for number in range(4)]
        assert stopped.exitcode == 0


def _fill(ring: Ring, producer: Producer) -> list[Message]:
    """Messages that lie everywhere in the ring, and are not released."""
    held = []
    for number in range(4):
        producer.send(b"", bytes([number]) * 16_000)
        message = ring.poll()
        assert message is not None
        held.append(message)
    return held


@pytest.mark.slow
@pytest.mark.parametrize("network", [TCP, SHARED])
def test_a_killed_producer_holds_no_bytes(network: Network) -> None:
    with Ring.create(RING_BYTES, 16, network=network, abandon_after_s=60) as ring:
        stopped = start(stop_in_the_middle, ring.address())
        while not ring.stats.used_bytes:
            assert ring.recv(timeout_s=0.01) is None
        stopped.kill()
        while ring.stats.used_bytes:
            assert ring.recv(timeout_s=0.01) is None
        assert (ring.stats.lost, ring.stats.abandoned, ring.stats.fenced) == (1, 0, 0)


@pytest.mark.slow
def test_4_rounds_of_killed_and_fenced_producers(tmp_path: Path) -> None:
    """Every committed message arrives once, intact, and in each producer's order."""
    rng = random.Random(3)
    progress = tmp_path / "progress"
    with Ring.create(1 << 18, 32, network=TCP, abandon_after_s=0.5, fence_after_s=1.0) as ring:
        checker = Checker(ring, 3, progress)
        seeds = iter(range(10_000))

        def begin(sender: int) -> BaseProcess:
            return start(send_for_ever, ring.address(), sender, str(progress), next(seeds))

        senders = [begin(sender) for sender in range(3)]
        num_told = 0
        for number in range(4):
            victim = rng.randrange(3)
            before = checker.next_number[victim]
            while checker.next_number[victim] == before and senders[victim].is_alive():  # It may have just begun.
                checker.receive(0.002)
            checker.receive(rng.random() * 0.02)
            if number % 2:
                senders[victim].kill()
            else:
                _stop(checker, victim, senders[victim])
            while senders[victim].is_alive():
                checker.receive(0.005)
            checker.receive(0.05)  # Its end is seen.
            num_told += senders[victim].exitcode == 0
            checker.receive_all(victim)
            checker.go_on_behind(victim)
            senders[victim] = begin(victim)
        for sender, process in enumerate(senders):
            process.kill()
            process.join()
            checker.receive_all(sender)
        stats = ring.stats
        assert stats.damaged == 0
        assert 1 < num_told <= stats.fenced, "a sender ends by itself only if it is told that it was fenced"


def _stop(checker: Checker, sender: int, process: BaseProcess) -> None:
    """Stop it in the middle of a message until it is fenced, and let it find that out."""
    assert process.pid is not None
    before = checker.ring.stats.fenced
    while process.is_alive() and checker.ring.stats.fenced == before:
        checker.receive(0.001)
        if checker.is_in_the_middle(sender):
            os.kill(process.pid, signal.SIGSTOP)
            checker.receive(0.02)  # What is under way arrives: it may just have ended its message.
            while checker.is_in_the_middle(sender):
                checker.receive(0.02)
            os.kill(process.pid, signal.SIGCONT)
