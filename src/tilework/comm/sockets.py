"""Groups of processes of one machine in which every pair is connected by a Unix socket."""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

from tilework.comm.exchange import PATIENCE, ExchangeComm, Piece
from tilework.core.comm import GroupBroken


class SocketComm(ExchangeComm):
    """Implements core.comm.Comm for CPU tensors of any type; `connections[r]` leads to rank r, and this object owns it.

    A piece is the bytes of its tensor and nothing else: both ends know its length, and pieces between two ranks arrive
    in order. A send returns when the kernel has taken the bytes, which may be before the receiver reads them.

    A lost member is noticed by its broken connection. Members that wait for it notice at once. The others notice when
    they wait for one of these, which has aborted by then, or at `abort`. All methods but `abort` belong to one thread.

    Rejected: torch's gloo backend. Neither its constructor nor a running call can be broken off: a member that was
    killed while the group formed held the others for 10 s and more, and a send that is under way when the connection
    breaks is never woken (9.8 s, its time limit, in 6 of 150 kills; bench/run.py forming).
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        super().__init__(rank, len(connections) + 1)
        assert sorted([rank, *connections]) == list(range(self.size))
        self._connections = dict(connections)
        self._ranks = {connection.fileno(): rank for rank, connection in connections.items()}
        self._lock = Lock()
        self._broken = False
        for connection in connections.values():
            connection.setblocking(False)

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        if self._broken:
            raise GroupBroken("the group was broken off")
        try:
            self._transfer({rank: _bytes(tensor) for rank, tensor in sends}, {r: _bytes(t) for r, t in receives})
        except OSError as error:
            self.abort()
            raise GroupBroken("the connection to a member was lost") from error

    def _transfer(self, outgoing: dict[int, memoryview], incoming: dict[int, memoryview]) -> None:
        """Write and read until nothing is left of either; pieces are removed when they are done."""
        for rank in list(outgoing):
            self._write(rank, outgoing)
        poll = select.poll()
        for rank in outgoing.keys() | incoming.keys():
            poll.register(self._connections[rank], _events(rank, outgoing, incoming))
        while outgoing or incoming:
            ready = poll.poll(PATIENCE.total_seconds() * 1000)
            if not ready:
                raise TimeoutError
            for number, event in ready:
                rank = self._ranks[number]
                if rank in incoming and event & ~select.POLLOUT:
                    self._read(rank, incoming)
                elif rank in outgoing:
                    self._write(rank, outgoing)
                if events := _events(rank, outgoing, incoming):
                    poll.modify(number, events)
                else:
                    poll.unregister(number)

    def _write(self, rank: int, outgoing: dict[int, memoryview]) -> None:
        with suppress(BlockingIOError):
            _take_off(rank, outgoing, self._connections[rank].send(outgoing[rank]))

    def _read(self, rank: int, incoming: dict[int, memoryview]) -> None:
        with suppress(BlockingIOError):
            count = self._connections[rank].recv_into(incoming[rank])
            if not count:
                raise ConnectionResetError
            _take_off(rank, incoming, count)

    def abort(self) -> None:
        with self._lock:
            self._broken = True
            for connection in self._connections.values():
                with suppress(OSError):  # The other end may have gone first.
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._broken = True
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _take_off(rank: int, pieces: dict[int, memoryview], count: int) -> None:
    if count == len(pieces[rank]):
        del pieces[rank]
    else:
        pieces[rank] = pieces[rank][count:]


def _events(rank: int, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview]) -> int:
    return (select.POLLOUT if rank in outgoing else 0) | (select.POLLIN if rank in incoming else 0)
