"""Processes that send through a ring, for the tests of what happens when they are stopped or killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from threading import Thread

from tilework.comm.ring.consumer import Ring
from tilework.comm.ring.errors import RingError
from tilework.comm.ring.produce import reserve
from tilework.comm.ring.producer import Producer
from tilework.comm.ring.transport import Transport
from tilework.comm.ring.verbs import Buffer, carry_out
from waiting import eventually

CONTEXT = multiprocessing.get_context("forkserver")
NUMBER = struct.Struct("<IQI")
"""Header: the sender, its message's number, and what the payload is made of."""
LONGEST = 60_000


def payload_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(16) * (size // 16)


class Hesitating:
    """A memory whose user is slow: it may be stopped between any two verbs, and in the middle of a put."""

    def __init__(self, memory: object, rng: random.Random) -> None:
        self._memory, self._rng = memory, rng
        self.checksum = memory.checksum  # type: ignore[attr-defined]

    def get(self, offset: int, size: int, *, deadline_ns: int) -> bytes:
        return self._memory.get(offset, size, deadline_ns=deadline_ns)  # type: ignore[attr-defined, no-any-return]

    def put(self, offset: int, buffers: tuple[Buffer, ...], *, deadline_ns: int) -> None:
        data = b"".join(buffers)
        for start in range(0, len(data), 4096):
            self._pause()
            part = data[start : start + 4096]
            self._memory.put(offset + start, (part,), deadline_ns=deadline_ns)  # type: ignore[attr-defined]

    def cas64(self, offset: int, expected: int, desired: int, *, deadline_ns: int) -> int:
        self._pause()
        return self._memory.cas64(offset, expected, desired, deadline_ns=deadline_ns)  # type: ignore[attr-defined, no-any-return]

    def flush(self, *, deadline_ns: int) -> None:
        pass

    def _pause(self) -> None:
        if self._rng.random() < 0.3:
            time.sleep(self._rng.random() * 1e-3)


def map_progress(path: str) -> mmap:
    """What each sender has sent: eight bytes each in this file."""
    with open(path, "r+b") as file:
        return mmap(file.fileno(), 4096)


def send_for_ever(address: str, sender: int, progress_path: str, seed: int) -> None:
    """Numbered messages of random length; the count of those that were sent stands in the shared file."""
    rng = random.Random(seed)
    progress = map_progress(progress_path)
    producer = Producer.connect(address)
    if seed % 4:
        _hesitate(producer, rng)
    number = int.from_bytes(progress[sender * 8 : sender * 8 + 8], "little")
    while True:
        content = rng.getrandbits(32)
        payload = payload_of(content, rng.choice((0, 100, 5000, LONGEST)))
        try:
            producer.send(NUMBER.pack(sender, number, content), payload, timeout_s=60)
        except RingError:
            return
        number += 1
        progress[sender * 8 : sender * 8 + 8] = number.to_bytes(8, "little")


def _hesitate(producer: Producer, rng: random.Random) -> None:
    ring = producer._transport
    memory = Hesitating(ring._memory, rng)
    producer._transport = Transport(ring.layout, memory, ring._view, ring._is_checked)


def stop_in_the_middle(address: str) -> None:
    """Reserve an entry, then stop as by SIGSTOP."""
    producer = Producer.connect(address)
    ring = producer._transport
    carry_out(reserve(ring.layout, producer.owner[0], 4), ring._memory, 1 << 62)
    os.kill(os.getpid(), signal.SIGSTOP)


def start(target: object, *args: object) -> multiprocessing.process.BaseProcess:
    process = CONTEXT.Process(target=target, args=args, daemon=True)  # type: ignore[arg-type]
    process.start()
    return process


@contextmanager
def connected(ring: Ring) -> Iterator[Producer]:
    """A producer of this process; the ring must be idle."""
    found: list[Producer] = []
    thread = Thread(target=lambda: found.append(Producer.connect(ring.address())))
    thread.start()
    while thread.is_alive():
        assert ring.poll() is None
    with found[0] as producer:
        yield producer


class Checker:
    """Takes messages and holds them against what each sender says that it has sent."""

    def __init__(self, ring: Ring, num_senders: int, progress: Path) -> None:
        self.ring = ring
        progress.write_bytes(bytes(4096))
        self.progress = map_progress(str(progress))
        self.next_number = [0] * num_senders
        self.owners = [-1] * num_senders
        """By sender: the producer of its last message."""

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
                self.owners[sender] = message.producer[0]

    def is_in_the_middle(self, sender: int) -> bool:
        """Whether it had begun a message at the last look, and not ended it."""
        return any(entry.owner == self.owners[sender] for entry in self.ring._window.undecided.values())

    def receive_all(self, sender: int) -> None:
        """Until what an ended sender took for sent has arrived, and at most the one that it was told nothing of."""

        def has_all() -> bool:
            self.receive(0.01)
            return self.next_number[sender] >= self.sent(sender)

        eventually(has_all)
        assert self.next_number[sender] <= self.sent(sender) + 1

    def go_on_behind(self, sender: int) -> None:
        """Its successor begins behind the message that arrived without the sender being told."""
        self.progress[sender * 8 : sender * 8 + 8] = self.next_number[sender].to_bytes(8, "little")
