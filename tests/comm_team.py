"""Processes that have `Groups`, and what the tests have them do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch

from tilework.comm.groups import Groups
from tilework.comm.rendezvous import Rendezvous
from tilework.core.comm import COLLECTIVES, SOCKETS, Comm, GroupBroken
from tilework.core.wire.commands import GroupRef
from tilework.core.wire.reports import NodeFormed
from tilework.runtime.worker_process import forkserver_context
from waiting import PATIENCE_S

CONTEXT = forkserver_context()
ANSWER_S = PATIENCE_S
FORMED: SimpleQueue[NodeFormed] = SimpleQueue()


class Member:
    """A process with its `Groups`. It answers each call in turn; `break_off` overtakes, as in a worker."""

    def __init__(self, device_id: int, address: str, collectives: str) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, device_id, address, collectives), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, call: Callable[..., Any], *args: Any) -> None:
        self._connection.send((call, args))

    def answer(self, within_s: float = ANSWER_S) -> Any:
        assert self._connection.poll(within_s), "no answer"
        return self._connection.recv()

    def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        self.tell(call, *args)
        return self.answer()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self._connection.close()
        self.process.join(PATIENCE_S)
        assert self.process.exitcode is not None


def let_them_wait() -> None:
    """Let members that were told something come to where they wait for others. Nothing shows that they have.

    One that comes there later is told the same when it does, so a test that is early is right, too.
    """
    time.sleep(0.2)


class Team:
    """Members that share a rendezvous. Numbers of groups are never used twice."""

    def __init__(self, collectives: str, size: int) -> None:
        self.rendezvous, self._last_id = Rendezvous(), 0
        self._collectives, self._node_id = collectives, None
        self.members = [Member(device_id, self.rendezvous.address, collectives) for device_id in range(size)]
        self.enter(*range(size))

    def enter(self, *devices: int) -> None:
        """Let these members be a new node, if groups are parts of one."""
        if self._collectives != SOCKETS:
            self._node_id = None
            node = self.new_group(*devices)
            assert self.ask(devices, enter, node) == [""] * len(devices)
            self._node_id = node.group_id

    def new_group(self, *devices: int) -> GroupRef:
        self._last_id += 1
        return GroupRef(self._last_id, devices, self._node_id)

    def tell(self, devices: Sequence[int], call: Callable[..., Any], *args: Any) -> None:
        for device_id in devices:
            self.members[device_id].tell(call, *args)

    def ask(self, devices: Sequence[int], call: Callable[..., Any], *args: Any) -> list[Any]:
        self.tell(devices, call, *args)
        return [self.members[device_id].answer() for device_id in devices]

    def end(self) -> None:
        for member in self.members:
            member.end()
        self.rendezvous.close()


# In the members. Calls get the member's `Groups` first; what they raise is their answer.


def serve(connection: Connection, device_id: int, address: str, collectives: str) -> None:
    torch.set_num_threads(1)
    if COLLECTIVES[collectives] == "cuda":
        torch.cuda.set_device(device_id)
    groups = Groups(device_id, address, collectives, tell=FORMED.put)
    calls: SimpleQueue[Any] = SimpleQueue()
    Thread(target=receive, args=(connection, groups, calls), daemon=True).start()
    while (item := calls.get()) is not None:
        call, args = item
        try:
            answer = call(groups, *args)
        except Exception as error:
            answer = type(error)(str(error))
        groups.rest()
        connection.send(answer)


def receive(connection: Connection, groups: Groups, calls: SimpleQueue[Any]) -> None:
    try:
        while True:
            call, args = connection.recv()
            if call is break_off:
                groups.break_off(*args)
            elif call is break_all:
                groups.break_all()
            else:
                calls.put((call, args))
    except EOFError:
        calls.put(None)


def enter(groups: Groups, node: GroupRef) -> str:
    """Why the node could not form; empty if it stands."""
    groups.enter(node)
    return FORMED.get(timeout=ANSWER_S).error


def break_off(groups: Groups, group_id: int) -> None:
    raise AssertionError("overtakes")


def break_all(groups: Groups) -> None:
    raise AssertionError("overtakes")


def close(groups: Groups, *group_ids: int) -> None:
    for group_id in group_ids:
        groups.close(group_id)


def device_of(groups: Groups) -> str:
    return COLLECTIVES[groups._collectives]


def values(rank: int, target: int, length: int) -> np.ndarray[Any, Any]:
    """What `rank` has for `target`: whole numbers that every type of tensor holds exactly."""
    return (np.arange(length) * 7 + rank * 31 + target * 13) % 101


def tensor(array: np.ndarray[Any, Any], dtype: torch.dtype, groups: Groups) -> torch.Tensor:
    return torch.from_numpy(array).to(dtype).to(device_of(groups))


def all_to_all(groups: Groups, ref: GroupRef, dtype: torch.dtype, pieces: list[list[int]]) -> list[float]:
    comm = groups.open(ref)
    rank, size = comm.rank, comm.size
    ours = np.concatenate([values(rank, target, pieces[rank][target]) for target in range(size)])
    splits = [pieces[source][rank] for source in range(size)]
    output = torch.empty(sum(splits), dtype=dtype, device=device_of(groups))
    comm.all_to_all(output, tensor(ours, dtype, groups), splits, pieces[rank][:size])
    return output.tolist()


def all_gather(groups: Groups, ref: GroupRef, dtype: torch.dtype, length: int) -> list[float]:
    comm = groups.open(ref)
    output = torch.empty(comm.size * length, dtype=dtype, device=device_of(groups))
    comm.all_gather(output, tensor(values(comm.rank, 0, length), dtype, groups))
    return output.tolist()


def broadcast(groups: Groups, ref: GroupRef, dtype: torch.dtype, length: int, root: int) -> list[float]:
    comm = groups.open(ref)
    both = tensor(values(comm.rank, 0, 2 * length), dtype, groups).reshape(2, length)
    comm.broadcast(both, root)
    return both.flatten().tolist()


def relay(groups: Groups, ref: GroupRef, dtype: torch.dtype, length: int) -> list[float]:
    """Each rank passes on what the one before it said; the first begins."""
    comm = groups.open(ref)
    heard = tensor(values(9, 9, length), dtype, groups)
    if comm.rank > 0:
        comm.recv(heard.zero_(), comm.rank - 1)
    if comm.rank + 1 < comm.size:
        comm.send(heard, comm.rank + 1)
    return heard.tolist()


def talk(groups: Groups, ref: GroupRef) -> bool:
    """Whether a collective gives what it should."""
    comm = groups.open(ref)
    return gathered(comm, device_of(groups)) == list(range(comm.size))


def talk_late(groups: Groups, ref: GroupRef, delay_s: float) -> bool:
    time.sleep(delay_s)
    return talk(groups, ref)


def talk_for_ever(groups: Groups, ref: GroupRef) -> None:
    comm = groups.open(ref)
    while True:
        gathered(comm, device_of(groups))


def gathered(comm: Comm, device: str) -> list[int]:
    output = torch.empty(comm.size, dtype=torch.int64, device=device)
    comm.all_gather(output, torch.tensor([comm.rank], device=device))
    heard: list[int] = output.tolist()
    if comm.has_aborted_calls:
        raise GroupBroken("while it talked")
    return heard


def open_and_close(groups: Groups, refs: list[GroupRef]) -> tuple[int, int]:
    """How many descriptors and threads the process has afterwards."""
    for ref in refs:
        assert talk(groups, ref)
        groups.close(ref.group_id)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def raised(groups: Groups, ref: GroupRef) -> list[str]:
    """What two calls of the group raise, the second after the first."""
    comm = groups.open(ref)
    kinds = []
    for _ in range(2):
        try:
            gathered(comm, device_of(groups))
        except GroupBroken:
            kinds.append("broken")
    return kinds


_KEPT: list[GroupBroken] = []


def keep_error(groups: Groups, ref: GroupRef) -> None:
    """Waits for an answer that does not come."""
    comm = groups.open(ref)
    try:
        comm.recv(torch.empty(1), 1)
    except GroupBroken as error:
        _KEPT.append(error)


def remembered(groups: Groups) -> int:
    return len(groups._broken) + len(groups._comms)
