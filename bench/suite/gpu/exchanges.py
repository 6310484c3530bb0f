"""What groups of a node's communicator exchange, and how fast: each member is a process of its own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from statistics import median

import torch

from suite.case import CaseFailed
from tilework.comm.groups import Groups
from tilework.comm.rendezvous import Rendezvous
from tilework.core.comm import COLLECTIVES, Comm
from tilework.core.wire.commands import GroupRef
from tilework.core.wire.reports import NodeFormed
from tilework.core.work import Group
from tilework.runtime.worker_process import forkserver_context

_SMALL = 256  # Values that a member has for each other one, of four bytes.
_NODE_IDS = (1, 2)  # Of all devices: entered the first time, and again.


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What the first member of a group found: milliseconds of an all-to-all of a kilobyte, the first time and again;
    and by megabytes that each member has, the gigabytes per second that it sends to the others.
    """

    first_ms: float
    again_ms: float
    rates: dict[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`rounds` one after another, the groups of each at the same time; each size is exchanged `repeats` times."""

    num_devices: int
    collectives: str
    rounds: tuple[tuple[Group, ...], ...]
    megabytes: tuple[float, ...]
    repeats: int


def exchanged(plan: Plan) -> tuple[list[float], list[dict[Group, Exchanged]]]:
    """Seconds until all members have entered the node, the first time and again; and what the groups of each round
    found.

    Raises:
        CaseFailed: a member ended early.
    """
    rendezvous, context = Rendezvous(), forkserver_context()
    pipes, members = [], []
    for device_id in range(plan.num_devices):
        ours, theirs = multiprocessing.Pipe()
        members.append(context.Process(target=_member, args=(theirs, device_id, plan, rendezvous.address), daemon=True))
        members[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        found: list[tuple[list[float], list[dict[Group, Exchanged]]]] = [ours.recv() for ours in pipes]
    except EOFError as error:
        raise CaseFailed("a member of the groups ended early") from error
    finally:
        for member in members:
            member.join(10)
            member.kill()
        rendezvous.close()
    entered_s, _ = found[0]
    return entered_s, [
        {group: of_one for _, rounds in found for group, of_one in rounds[index].items()}
        for index in range(len(plan.rounds))
    ]


def _member(connection: Connection, device_id: int, plan: Plan, address: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(COLLECTIVES[plan.collectives])
    if device.type == "cuda":
        device = torch.device("cuda", device_id)
        torch.cuda.set_device(device)
    everyone, formed = tuple(range(plan.num_devices)), SimpleQueue[NodeFormed]()
    groups = Groups(device_id, address, plan.collectives, tell=formed.put)
    entered_s = []
    for node_id in _NODE_IDS:
        with _timed(device) as seconds:
            groups.enter(GroupRef(node_id, everyone))
            if error := formed.get().error:
                raise CaseFailed(error)
        entered_s += seconds
        whole = groups.open(GroupRef(node_id + len(_NODE_IDS), everyone, node_id))
        _exchange_s(whole, 1, device)
    meet = partial(_exchange_s, whole, 1, device)
    next_id, rounds = 2 * len(_NODE_IDS) + 1, list[dict[Group, Exchanged]]()
    for at_once in plan.rounds:
        meet()
        rounds.append({})
        for group_id, group in enumerate(at_once, next_id):
            if device_id in group:
                found = _exchange_all(groups.open(GroupRef(group_id, group, _NODE_IDS[-1])), plan, device)
                if device_id == group[0]:
                    rounds[-1][group] = found
        next_id += len(at_once)
    meet()
    connection.send((entered_s, rounds))


def _exchange_all(comm: Comm, plan: Plan, device: torch.device) -> Exchanged:
    small = [_exchange_s(comm, _SMALL, device) for _ in range(1 + plan.repeats)]
    rates = {}
    for megabytes in plan.megabytes:
        count = int(megabytes * 1e6 / 4) // comm.size
        seconds = median([_exchange_s(comm, count, device) for _ in range(1 + plan.repeats)][1:])
        rates[megabytes] = 4 * count * (comm.size - 1) / seconds / 1e9
    return Exchanged(1e3 * small[0], 1e3 * median(small[1:]), rates)


def _exchange_s(comm: Comm, count: int, device: torch.device) -> float:
    """Seconds of an all-to-all in which each member has this number of values for each."""
    source, output = torch.zeros(2, comm.size * count, device=device).unbind()
    splits = [count] * comm.size
    with _timed(device) as seconds:
        comm.all_to_all(output, source, splits, splits)
    return seconds[0]


@contextmanager
def _timed(device: torch.device) -> Iterator[list[float]]:
    """A list that has the seconds until the device is done, once this is left."""
    finish: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    finish()
    start_s, seconds = time.perf_counter(), list[float]()
    yield seconds
    finish()
    seconds.append(time.perf_counter() - start_s)


def rounds_of(num_devices: int) -> tuple[tuple[Group, ...], ...]:
    """Groups of two, four and so on: the first alone, and then all of this size that are disjoint at once."""
    rounds: list[tuple[Group, ...]] = []
    size = 2
    while size <= num_devices:
        groups = [tuple(range(first, first + size)) for first in range(0, num_devices - size + 1, size)]
        rounds.append((groups[0],))
        if len(groups) > 1:
            rounds.append(tuple(groups))
        size *= 2
    return tuple(rounds)
