"""How long it takes a group of workers to come together, and to exchange a megabyte."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from suite.case import Check, Finding, Note, Table
from suite.stats import Interval, bootstrap
from tilework.comm.groups import Groups
from tilework.comm.rendezvous import Rendezvous
from tilework.core.comm import Comm
from tilework.core.wire.commands import GroupRef
from tilework.runtime.worker_process import forkserver_context


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTime:
    """Groups of each size, all members on this machine, each formed, opened again `cached` times and used."""

    sizes: tuple[int, ...] = (2, 3, 4)
    groups: int = 50
    cached: int = 100
    exchanges: int = 20
    megabytes: float = 1.0
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> GroupTime:
        return cls(groups=10) if quick else cls()

    def measure(self, note: Note) -> Finding:
        checks, rows = [], []
        for size in self.sizes:
            note(f"groups of {size}")
            formed, cached, exchanged = (bootstrap(times, self.seed) for times in self._times(size))
            checks.append(Check(what=f"{size} members: forming, first time", measured=formed, high=50, unit="ms"))
            checks.append(Check(what=f"{size} members: from the cache", measured=cached, high=0.1, unit="ms"))
            rows.append((str(size), _shown(exchanged)))
        table = Table(
            title=f"All to all, {self.megabytes:g} MB per member, in ms",
            columns=("members", "median"),
            rows=tuple(rows),
        )
        return Finding(checks=tuple(checks), method=self._method(), tables=(table,))

    def _times(self, size: int) -> tuple[list[float], list[float], list[float]]:
        """Milliseconds of the first member: to form each group, to open it again, and of each exchange in it."""
        rendezvous = Rendezvous()
        pipes = [multiprocessing.Pipe() for _ in range(size)]
        context = forkserver_context()
        members = [
            context.Process(target=_member, args=(theirs, device_id, size, rendezvous.address, self))
            for device_id, (_, theirs) in enumerate(pipes)
        ]
        for member in members:
            member.start()
        times: tuple[list[float], list[float], list[float]] = pipes[0][0].recv()
        for member in members:
            member.join()
        rendezvous.close()
        return times

    def _method(self) -> tuple[str, ...]:
        return (
            "Forming: from the end of an exchange among all to `Groups.open` returning at the first member, so all "
            "members begin within a fraction of a millisecond.",
            "Unix sockets, one thread per member; more members than cores take turns.",
            "Intervals: 95% bootstrap of the median.",
        )


def _member(connection: Connection, device_id: int, size: int, address: str, config: GroupTime) -> None:
    torch.set_num_threads(1)
    groups = Groups(device_id, address)
    all_devices = tuple(range(size))
    start_line = groups.open(GroupRef(0, all_devices))
    output, source = torch.zeros(2, size, int(config.megabytes * 1e6 / 4) // size)
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for group_id in range(1, config.groups + 1):
        ref = GroupRef(group_id, all_devices)
        _exchange(start_line, output, source)
        times[0].append(_milliseconds(groups.open, ref))
        times[1].extend(_milliseconds(groups.open, ref) for _ in range(config.cached))
        comm = groups.open(ref)
        times[2].extend(_milliseconds(_exchange, comm, output, source) for _ in range(config.exchanges))
        groups.close(group_id)
    connection.send(times)


def _exchange(comm: Comm, output: torch.Tensor, source: torch.Tensor) -> None:
    splits = [output.shape[1]] * comm.size
    comm.all_to_all(output.flatten(), source.flatten(), splits, splits)


def _milliseconds(call: Callable[..., object], *args: object) -> float:
    start_ns = time.perf_counter_ns()
    call(*args)
    return (time.perf_counter_ns() - start_ns) / 1e6


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"
