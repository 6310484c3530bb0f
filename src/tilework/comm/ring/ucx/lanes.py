"""The lanes by which producers reach a consumer's memory: a worker of UCX for each, which can be closed alone.

Closing a lane is the fence of its producer: it ends the queue pair or the connection, so no message of the producer is
carried out any more, begun or in the buffers of the kernel. Rejected: taking back the key of the memory (over TCP there
is none: UCX writes where the message says), and ending the process, which may be on another node. A lane takes 70 kB
and six file descriptors of the consumer's process.
"""

from __future__ import annotations

import os
import select
from dataclasses import dataclass, field
from mmap import mmap
from threading import Lock, Thread

from tilework.comm.ring.ucx.library import Context, Region, Worker

_TURN = 64
"""Number of steps that a lane makes before the others get their turn."""


@dataclass(slots=True)
class Lane:
    """Access of one producer to the memory. After `close` nothing that the producer has begun is carried out."""

    address: bytes
    base: int
    key: bytes
    _worker: Worker
    _lanes: Lanes
    is_open: bool = field(default=True, init=False)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._lanes.close_lane(self._worker)


class Lanes:
    """The lanes to `memory`, and a thread that keeps them going.

    Over networks that write to memory by themselves the thread has nothing to do while messages pass. Over others (TCP)
    it carries out the verbs. It is a separate thread, not a part of receiving: else a producer would wait for its verbs
    while the consumer is busy with something else, and give them up at their deadlines.
    """

    def __init__(self, context: Context, memory: mmap) -> None:
        self._context = context
        self._region = Region(context, memory)
        self._lock = Lock()
        """Lock for using `_workers` or one of them."""
        self._workers: dict[int, Worker] = {}
        self._epoll = select.epoll()
        self._end = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._end, select.EPOLLIN)
        self._thread = Thread(target=self._run, name="tilework-ring", daemon=True)
        self._thread.start()

    def open(self) -> Lane:
        """Return a lane for one producer. Raises RingError."""
        with self._lock:
            worker = Worker(self._context)
            lane = Lane(worker.address, self._region.address, self._region.key, worker, self)
            self._workers[worker.fd] = worker
            while not worker.arm():
                worker.progress()
            self._epoll.register(worker.fd, select.EPOLLIN)
        return lane

    def close_lane(self, worker: Worker) -> None:
        with self._lock:
            del self._workers[worker.fd]
            self._epoll.unregister(worker.fd)
            worker.close()

    def close(self) -> None:
        """Close all lanes, and the memory for others."""
        os.eventfd_write(self._end, 1)
        self._thread.join()
        for worker in list(self._workers.values()):
            self.close_lane(worker)
        self._epoll.close()
        os.close(self._end)
        self._region.close()

    def _run(self) -> None:
        busy: set[int] = set()
        while True:
            ready = {fd for fd, _ in self._epoll.poll(0 if busy else None)}
            if self._end in ready:
                return
            with self._lock:
                busy = {fd for fd in busy | ready if (worker := self._workers.get(fd)) and not _is_idle(worker)}


def _is_idle(worker: Worker) -> bool:
    """Let a worker run for a turn. Return True if nothing is left to do; its descriptor then tells when there is."""
    return any(not worker.progress() for _ in range(_TURN)) and worker.arm()
