"""What a picture takes from the worker's next run: sent before that begins, or by a thread beside it."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median

import torch

from tilework.comm.messages import receive_messages, send_message
from tilework.comm.sender import Sender
from tilework.core.wire.spec import Image

_CONTEXT = multiprocessing.get_context("fork")
_RUN_S = 0.05


HOSTS = ("launches", "waits")
"""What the host does in the next run: launches small kernels all the time, or waits for its device."""
WHEN = ("before", "beside")


@dataclass(frozen=True, slots=True)
class Cost:
    """In milliseconds: by how much the next run ends later, and from the start of sending to the arrival."""

    lost: float
    latency: float


class PictureBesideRuns:
    """A worker that sends a picture of so many bytes to an engine, a process that receives it at once."""

    def __init__(self, size: int) -> None:
        ours, self._theirs = socket.socketpair()
        self._arrivals, told = _CONTEXT.Pipe()
        self._engine = _CONTEXT.Process(target=_receive, args=(ours, self._theirs, told), daemon=True)
        self._engine.start()
        self._image = Image(1, size // 3, os.urandom(size))
        torch.set_num_threads(1)
        self._runs: dict[str, Callable[[], object]] = {"launches": _launching(), "waits": lambda: time.sleep(_RUN_S)}

    def cost(self, host: str, when: str, count: int) -> Cost:
        """The medians of so many pictures; `host` is one of HOSTS, `when` of WHEN."""
        costs = [self._sent(self._runs[host], when) for _ in range(count)]
        return Cost(median(one.lost for one in costs), median(one.latency for one in costs))

    def close(self) -> None:
        self._theirs.close()
        self._engine.join()

    def _sent(self, run: Callable[[], object], when: str) -> Cost:
        """Of one picture, after a run of which the time is that of one alone."""
        alone_ns = _timed_ns(run)
        sender = Sender[Image](lambda image: send_message(self._theirs, image), print)
        start_ns = time.monotonic_ns()
        if when == "before":
            sender.send(self._image)
        else:
            sender.send_made(lambda: self._image)
        run()
        lost_ns = time.monotonic_ns() - start_ns - alone_ns
        sender.finish()
        return Cost(lost_ns / 1e6, (self._arrivals.recv() - start_ns) / 1e6)


def _launching() -> Callable[[], object]:
    """A run in which the host launches small kernels all the time: it takes about `_RUN_S` alone."""
    small = torch.randn(8, 8)

    def launch(num_kernels: int) -> None:
        for _ in range(num_kernels):
            torch.add(small, 1)

    start_s, num_kernels = time.monotonic(), 10_000
    launch(num_kernels)
    per_run = int(num_kernels * _RUN_S / (time.monotonic() - start_s))
    return lambda: launch(per_run)


def _timed_ns(run: Callable[[], object]) -> int:
    start_ns = time.monotonic_ns()
    run()
    return time.monotonic_ns() - start_ns


def _receive(ours: socket.socket, theirs: socket.socket, told: Connection) -> None:
    """The engine: tells when each picture has come, in monotonic nanoseconds."""
    theirs.close()  # Else it would not see that the worker has closed it.
    for _ in receive_messages(ours):
        told.send(time.monotonic_ns())
