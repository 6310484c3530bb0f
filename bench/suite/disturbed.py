"""What happens to messages when a sender is killed or stopped in the middle of one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from mmap import mmap
from multiprocessing.process import BaseProcess
from threading import Timer
from typing import Any

from suite.message_transports import Way, open_sender

_CONTEXT = multiprocessing.get_context("fork")  # A sender that is started otherwise imports all cases first.


class Disturbed:
    """Two senders: one of long messages, to which something happens, and one of short ones, 10,000 a second at most.

    `fault` is SIGKILL or SIGSTOP; a stopped sender goes on after `stopped_s`.
    """

    def __init__(self, way: Way, fault: str, stopped_s: float) -> None:
        self._fault, self._stopped_s = fault, stopped_s
        self._ours = way.receiver(2, 1 << 20)
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self._file.write(bytes(4096))
        self._file.flush()
        self._progress = mmap(self._file.fileno(), 4096)
        self._senders: list[BaseProcess] = [
            _CONTEXT.Process(
                target=_send_numbered, args=(way, self._ours.addresses, index, size, self._file.name), daemon=True
            )
            for index, size in enumerate((1 << 20, 1 << 10))
        ]
        self._got: dict[int, list[int]] = {0: [], 1: []}
        self._damaged = 0
        self._last_s = 0.0
        self._longest_s = 0.0

    def run(self) -> tuple[tuple[int, int, int], float]:
        """How many messages `send` returned for and never came, came twice, and came damaged; and for how long the
        other sender's messages stood still, at most, in milliseconds."""
        for sender in self._senders:
            sender.start()
        self._ours.hand_over()
        while not (self._got[0] and self._got[1]):
            self._receive(0.01)
        self._receive(0.2)
        self._longest_s = 0.0
        victim = self._senders[0]
        assert victim.pid is not None
        os.kill(victim.pid, getattr(signal, self._fault))
        # Of its own, since a receiver in the middle of a message may wait for the rest.
        Timer(self._stopped_s, os.kill, (victim.pid, signal.SIGCONT)).start()
        self._receive(self._stopped_s + 0.3)
        for sender in self._senders:
            os.kill(sender.pid or 0, signal.SIGUSR1)
        self._receive(1.0)
        for sender in self._senders:
            sender.kill()
            sender.join()
        before = -1
        while before < (before := sum(map(len, self._got.values()))):  # What is on its way is not lost.
            self._receive(0.3)
        self._ours.close()
        self._file.close()
        missing = sum(
            self._sent(index) - len(set(got) & set(range(self._sent(index)))) for index, got in self._got.items()
        )
        doubled = sum(len(got) - len(set(got)) for got in self._got.values())
        return (missing, doubled, self._damaged), self._longest_s * 1e3

    def _sent(self, index: int) -> int:
        return int.from_bytes(self._progress[index * 8 : index * 8 + 8], "little")

    def _receive(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < end_s:
            for message in self._ours.receive(end_s - now_s):
                index, number = message[0], int.from_bytes(message[1:9], "little")
                if index not in self._got or bytes(message[9:16]) != b"intact.":
                    self._damaged += 1
                    continue
                self._got[index].append(number)
                if index == 1:
                    self._longest_s = max(self._longest_s, time.monotonic() - self._last_s)
                    self._last_s = time.monotonic()


def _send_numbered(way: Way, addresses: Sequence[Any], index: int, size: int, path: str) -> None:
    """Until SIGUSR1. The shared file has the number of messages for which `send` has returned."""
    is_stopped = False

    def stop(*_: object) -> None:
        nonlocal is_stopped
        is_stopped = True

    signal.signal(signal.SIGUSR1, stop)
    with open(path, "r+b") as file:
        progress = mmap(file.fileno(), 4096)
    sender, number = open_sender(way, addresses, index), 0
    while not is_stopped:
        sender.send((bytes([index]) + number.to_bytes(8, "little") + b"intact." + bytes(size - 16),))
        number += 1
        progress[index * 8 : index * 8 + 8] = number.to_bytes(8, "little")
        if index:
            time.sleep(1e-4)
    time.sleep(60)
