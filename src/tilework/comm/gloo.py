"""A group of processes that talk over sockets of the loopback interface, by torch's gloo backend."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from threading import Lock
from typing import Any

from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from tilework.comm.exchange import PATIENCE, ExchangeComm, Piece
from tilework.core.comm import GroupBroken

_CONNECT_LIMIT = timedelta(seconds=10)  # For each connection. `Connecting` waits for all of them for less.

# gloo sometimes forgets to wake a thread that waits for a sending when the connection breaks at that moment. Once all
# pieces have been received, all ranks are known to be ready for ours: long enough for members in lockstep.
_SEND_LIMIT = timedelta(seconds=10)


class GlooComm(ExchangeComm):
    """core.comm.Comm for CPU tensors of any type. Its members form it without a global process group.

    Two members of a group of `size` may not be the same process. The constructor returns when all are connected, and
    raises GroupBroken if one cannot be reached for long (see `connecting`). No member needs `store` any more once
    `meet` has returned.

    What is lost is seen by a broken connection: at once by those that wait for the lost member, by the others when
    one of these, having aborted, is waited for, or by `abort`. All methods but `abort` belong to one thread.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._lock = Lock()
        self._broken = False
        options = _options()  # Before we look: a shut listening socket would end the process.
        others = _open_sockets()
        try:
            self._backend: Any = ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise GroupBroken(f"the group could not connect: {error}") from error
        # torch has no call that interrupts a gloo operation, so we keep a handle on each connection of our own: a
        # duplicate, since the backend's descriptor may have been closed, and its number used again, when we need it.
        opened = [number for name, number in _open_sockets().items() if name not in others]
        self._connections = [socket.socket(fileno=os.dup(number)) for number in opened]

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        if self._broken:
            raise GroupBroken("the group was broken off")
        try:
            receiving = [self._backend.recv([tensor], rank, 0) for rank, tensor in receives]
            sending = [self._backend.send([tensor], rank, 0) for rank, tensor in sends]
            for work in receiving:
                work.wait(PATIENCE)
            for work in sending:
                work.wait(_SEND_LIMIT)
        except RuntimeError as error:
            self.abort()
            raise GroupBroken("the connection to a member was lost") from error

    def abort(self) -> None:
        with self._lock:
            self._broken = True
            for connection in self._connections:
                with suppress(OSError):  # The other end may have gone first.
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._broken = True
            self._backend = None
            for connection in self._connections:
                connection.close()
            self._connections.clear()


def _options() -> Any:
    """Options without threads: these serve the backend's own collectives, which are not used here."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_device()]
    options._threads = 0
    options._timeout = _CONNECT_LIMIT
    return options


@cache
def _device() -> Any:
    """One listening socket and one thread for all groups of this process; not the host's name, which others reach."""
    return ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)


def _open_sockets() -> dict[str, int]:
    """Names and descriptors of this process's sockets. Numbers alone would not do: listing them uses one, too."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                found[name] = int(number)
    return found
