"""Both ends of a ring: what is sent arrives, in place, and what goes wrong is said."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from threading import Thread

import numpy as np
import pytest

from comm.ring.team import connected
from tilework.comm.ring import transport
from tilework.comm.ring.consumer import Ring
from tilework.comm.ring.errors import RingClosed, RingCorrupted, RingError, RingFull
from tilework.comm.ring.network import Network
from tilework.comm.ring.producer import Producer
from waiting import eventually


@pytest.fixture(params=["extension", "lock", pytest.param("network", marks=pytest.mark.slow)])
def ring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> object:
    """On all back ends."""
    network = None
    if request.param == "lock":
        monkeypatch.setattr("tilework.comm.ring.consumer.has_extension", lambda: False)
    elif not transport.has_extension():
        pytest.skip("the C extension was not built: no compiler")
    elif request.param == "network":
        pytest.importorskip("libucx", reason="the extra ucx is not installed")
        network = Network(host="127.0.0.1")
    with Ring.create(1 << 16, 16, network=network, fence_after_s=None) as made:
        assert made.is_one_sided == (request.param != "lock")
        yield made


def test_a_message_is_gathered_and_read_in_place(ring: Ring) -> None:
    with connected(ring) as producer:
        pixels = np.arange(600, dtype=np.float32).reshape(20, 30)
        producer.send(b"shape", pixels, b"tail")
        message = ring.poll()
        assert message is not None
        assert (message.header, message.producer) == (b"shape", producer.owner)
        seen = np.frombuffer(message.payload[:-4], np.float32).reshape(20, 30)
        assert np.array_equal(seen, pixels)
        assert message.payload[-4:] == b"tail"
        with pytest.raises(ValueError, match="read-only"):
            seen[0] = 1
        del seen
        message.release()
        assert ring.poll() is None
        assert (ring.stats.delivered, ring.stats.used_bytes, producer.stats.sent) == (1, 0, 1)


def test_a_payload_keeps_its_bytes_until_it_is_released(ring: Ring) -> None:
    with connected(ring) as producer:
        producer.send(b"", b"x" * 20_000)
        message = ring.poll()
        assert message is not None
        with pytest.raises(RingFull):
            producer.send_all([(b"", b"y" * 20_000)] * 10, timeout_s=0.01)
        assert bytes(message.payload) == b"x" * 20_000
        message.release()
        with pytest.raises(ValueError, match="released"):
            message.payload.tobytes()
        producer.send(b"", b"y" * 20_000)


def test_order_and_contents_over_many_laps(ring: Ring) -> None:
    with connected(ring) as producer:
        sent = [(b"%d" % number, bytes([number % 251]) * (number * 37 % 3000)) for number in range(300)]
        got: list[tuple[bytes, bytes]] = []
        for message in sent:
            producer.send(*message)
            if len(message[1]) % 2:
                got += ring.take(5)
            else:
                while (found := ring.poll()) is not None:
                    with found:
                        got.append((found.header, bytes(found.payload)))
        assert got + ring.take(100) == sent


def test_a_full_ring_makes_producers_wait(ring: Ring) -> None:
    with connected(ring) as producer:
        with pytest.raises(RingFull, match="timeout_s"):
            producer.send_all([(b"", bytes(20_000))] * 10, timeout_s=0.1)
        sent = producer.stats.sent
        assert 1 < sent < 10
        assert producer.stats.waits == 1
        assert len(ring.take()) == sent
        producer.send(b"", bytes(20_000))


def test_a_message_longer_than_half_of_the_ring_is_refused(ring: Ring) -> None:
    with connected(ring) as producer:
        with pytest.raises(ValueError, match="half of the ring, 32768 bytes"):
            producer.send(b"", bytes(40_000))
        producer.send(b"", bytes(32_000))
        assert len(ring.take()) == 1


def test_a_sleeping_consumer_is_woken(ring: Ring) -> None:
    with connected(ring) as producer:
        thread = Thread(target=lambda: producer.send(b"wake", b""))
        got = []
        for _ in range(20):
            thread = Thread(target=lambda: producer.send(b"wake", b""))
            thread.start()
            message = ring.recv(timeout_s=30)
            assert message is not None
            got.append(message.header)
            message.release()
            thread.join()
        assert got == [b"wake"] * 20


def test_asyncio_on_both_ends(ring: Ring) -> None:
    async def talk(producer: Producer) -> list[bytes]:
        async def send() -> None:
            for number in range(50):
                await producer.asend(b"%d" % number, bytes(10_000))

        task = asyncio.create_task(send())
        got = []
        for _ in range(50):
            message = await ring.arecv()
            got.append(message.header)
            message.release()
        await task
        return got

    with connected(ring) as producer:
        assert asyncio.run(talk(producer)) == [b"%d" % number for number in range(50)]


def test_what_a_producer_sent_before_it_left_arrives(ring: Ring) -> None:
    with connected(ring) as producer:
        producer.send(b"last", b"words")
    assert ring.take() == [(b"last", b"words")]
    eventually(lambda: ring.poll() is None and not ring.stats.producers)
    with connected(ring) as again:
        assert again.owner != producer.owner


def test_a_closed_ring_is_noticed_by_its_producers(ring: Ring) -> None:
    with connected(ring) as producer:
        ring.close()
        with pytest.raises(RingClosed):
            producer.send_all([(b"", bytes(20_000))] * 10)
        with pytest.raises(RingClosed):
            producer.send(b"", b"")
    with pytest.raises(RingClosed):
        ring.poll()
    with pytest.raises(RingClosed, match="no consumer answers"):
        Producer.connect(ring.address())


def test_payloads_outlive_a_closed_ring(ring: Ring) -> None:
    with connected(ring) as producer:
        producer.send(b"", b"still here")
    message = ring.recv()
    assert message is not None
    ring.close()
    assert bytes(message.payload) == b"still here"
    message.release()


def test_an_entry_of_a_producer_there_is_not_is_an_error(ring: Ring) -> None:
    slot, units = ring._layout.slot(0), 1
    word = 1 << 37 | 77 << 27 | units  # Reserved by owner 77.
    ring._memory[slot : slot + 8] = word.to_bytes(8, "little")
    with pytest.raises(RingCorrupted, match="producer 77"):
        ring.recv(timeout_s=10)


@pytest.mark.parametrize("size", [(1 << 33, 16), (1 << 16, 1 << 21)])
def test_sizes_that_words_cannot_hold_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Ring.create(*size)


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.comm.ring.node.site.peer_of", lambda connection: (os.getpid(), 12345))
    with Ring.create(1 << 16) as ring:
        errors: list[Exception] = []

        def connect() -> None:
            try:
                Producer.connect(ring.address())
            except RingError as error:
                errors.append(error)

        thread = Thread(target=connect)
        thread.start()
        while thread.is_alive():
            ring.poll()
        assert "not to user 12345" in str(errors[0])


def test_the_ring_needs_no_torch() -> None:
    code = "import sys, tilework.comm.ring.consumer, tilework.comm.ring.producer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
