"""Processes that form groups with each other, for tests of what a group does together."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from tilework.comm.groups import Groups
from tilework.comm.rendezvous import Rendezvous
from tilework.comm.sockets import SocketComm
from tilework.core.comm import Comm
from tilework.core.wire.commands import GroupRef
from tilework.runtime.worker_process import forkserver_context
from waiting import PATIENCE_S


class Ranks:
    """`num_ranks` processes, each of which is the rank of its number in every group."""

    def __init__(self, num_ranks: int) -> None:
        self._rendezvous = Rendezvous()
        context = forkserver_context()  # A process has one forkserver: what the first of its tests preloads stays.
        self._pipes = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._rendezvous.address, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._num_groups = 0

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What function(comm, *arguments) returns on each of the first `size` ranks, in a new group of them.

        `function` must be importable by name. Raises AssertionError with the traces of the ranks on which it failed.
        """
        self._num_groups += 1
        ref = GroupRef(self._num_groups, tuple(range(size)))
        for pipe in self._pipes[:size]:
            pipe.send((ref, function, arguments))
        results: Sequence[tuple[Any, str]] = [pipe.recv() for pipe in self._pipes[:size]]
        errors = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(results) if error]
        assert not errors, "\n".join(errors)
        return [result for result, _ in results]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(PATIENCE_S)
            process.kill()
        self._rendezvous.close()


class Threads:
    """The same in threads of this process, which start at once: for what draws no numbers from torch's generator."""

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """As that of `Ranks`; an error of the first rank that failed is raised."""
        pairs = {(low, high): socket.socketpair() for high in range(size) for low in range(high)}
        comms = [
            SocketComm(rank, {sum(pair) - rank: pairs[pair][pair[1] == rank] for pair in pairs if rank in pair})
            for rank in range(size)
        ]

        def on_rank(comm: SocketComm) -> Any:
            try:
                return function(comm, *arguments)
            except BaseException:
                comm.abort()  # The others must not wait.
                raise

        with ThreadPoolExecutor(size) as pool, ExitStack() as stack:
            for comm in comms:
                stack.callback(comm.close)
            return list(pool.map(on_rank, comms))


class Counting:
    """A communicator that counts its collectives."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.num_calls = 0

    def all_to_all(self, *arguments: Any) -> None:
        self.num_calls += 1
        self._comm.all_to_all(*arguments)

    def all_gather(self, *arguments: Any) -> None:
        self.num_calls += 1
        self._comm.all_gather(*arguments)


class Spoilt(Counting):
    """A communicator that gives the pieces of two ranks in the wrong order."""

    def all_to_all(self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int]) -> None:
        super().all_to_all(output, source, output_splits, source_splits)
        pieces = list(output.clone().split(output_splits))
        output.copy_(torch.cat([pieces[1], pieces[0], *pieces[2:]]))


def _serve(rank: int, address: str, pipe: Any) -> None:
    import tiny

    tiny.prepare()
    groups = Groups(rank, address)
    while (order := pipe.recv()) is not None:
        ref, function, arguments = order
        try:
            pipe.send((function(groups.open(ref), *arguments), ""))
        except Exception:
            groups.break_off(ref.group_id)  # The others must not wait.
            pipe.send((None, traceback.format_exc()))
        groups.close(ref.group_id)
