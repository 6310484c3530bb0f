"""What a picture costs on its way from a worker to the engine: through a pipe, the ring, or a file."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from suite.beside_runs import HOSTS, WHEN, Cost, PictureBesideRuns
from suite.case import Check, Finding, Note, Table
from suite.report_transports import WAYS, Way
from suite.stats import Interval, extremes
from tilework.core.wire.spec import Image

_CONTEXT = multiprocessing.get_context("fork")  # A worker that is started otherwise imports all cases first.
_WARM = 3


@dataclass(frozen=True, slots=True)
class _Cost:
    """Medians and means of a round, in microseconds: from before it is sent to the engine's having it; CPU of each."""

    latency: float
    engine: float
    worker: float


_Costs = dict[tuple[str, int], list[_Cost]]
_Beside = dict[tuple[str, str], list[Cost]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCost:
    """`counts` pictures of each of `sizes` (bytes of pixels) by each way, one by one, in each of `rounds`."""

    sizes: tuple[int, ...] = (12 << 10, 64 << 10, 3 << 20, 60 << 20)
    counts: tuple[int, ...] = (200, 200, 40, 6)
    rounds: int = 5
    beside_size: int = 3 << 20
    beside_count: int = 15

    @classmethod
    def make(cls, quick: bool) -> ReportCost:
        return cls(counts=(20, 20, 5, 1), rounds=2, beside_count=3) if quick else cls()

    def measure(self, note: Note) -> Finding:
        costs: _Costs = {}
        for number in range(self.rounds):
            for size, count in zip(self.sizes, self.counts, strict=True):
                note(f"round {number + 1}, {size >> 10} KB")
                for name in WAYS:
                    costs.setdefault((name, size), []).append(asyncio.run(_measured(name, size, count)))
        beside = self._beside_runs(note)
        return Finding(
            checks=(*(check for size in self.sizes for check in _checks(costs, size)), *_beside_checks(beside)),
            method=_METHOD,
            tables=(_table(costs), _beside_table(beside)),
        )

    def _beside_runs(self, note: Note) -> _Beside:
        costs: _Beside = {}
        runs = PictureBesideRuns(self.beside_size)
        for number in range(self.rounds):
            note(f"round {number + 1}, beside the next run")
            for host, when in product(HOSTS, WHEN):
                costs.setdefault((host, when), []).append(runs.cost(host, when, self.beside_count))
        runs.close()
        return costs


async def _measured(name: str, size: int, count: int) -> _Cost:
    way = WAYS[name](size)
    ours, theirs = multiprocessing.Pipe()
    worker = _CONTEXT.Process(target=_send, args=(way, theirs, size), daemon=True)
    worker.start()
    receive = await way.open_receiver()
    latencies, start_s = [], 0.0
    for number in range(_WARM + count):
        if number == _WARM:
            start_s = time.process_time()
        ours.send_bytes(b"go" if number >= _WARM else b"warm")
        image = await receive()
        done_ns = time.monotonic_ns()
        _read(image)
        latencies.append(done_ns - ours.recv())
    engine_s = time.process_time() - start_s
    ours.send_bytes(b"end")
    worker_s = ours.recv()
    worker.join()
    way.close()
    return _Cost(statistics.median(latencies[_WARM:]) / 1e3, engine_s / count * 1e6, worker_s / count * 1e6)


def _read(image: Image) -> Any:
    """Read all pixels once, as an encoder does."""
    return np.frombuffer(image.pixels, np.uint8).max()


def _send(way: Way, theirs: Connection, size: int) -> None:
    """The worker: a picture at each word, the time at which it was sent behind it, and its CPU time at the end."""
    send, image, used_s = way.open_sender(), Image(1, size // 3, os.urandom(size)), 0.0
    while (word := theirs.recv_bytes()) != b"end":
        start_ns, start_s = time.monotonic_ns(), time.process_time()
        send(image)
        used_s += time.process_time() - start_s if word == b"go" else 0.0
        theirs.send(start_ns)
    theirs.send(used_s)


def _checks(costs: _Costs, size: int) -> tuple[Check, ...]:
    """The pipe against the ring, and against what it was. A ring that is twice as good would be used."""
    label = f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB"
    checks = [
        Check(what=f"{label}: {part}, pipe over ring", measured=_ratio(costs, size, "ring", part), high=2.0, unit="x")
        for part in ("latency", "engine")
    ]
    if size >= 1 << 20:
        measured = _ratio(costs, size, "pipe, one piece", "engine")
        checks.append(Check(what=f"{label}: engine, pipe over one piece", measured=measured, high=0.5, unit="x"))
    return tuple(checks)


def _ratio(costs: _Costs, size: int, other: str, part: str) -> Interval:
    rounds = zip(costs["pipe", size], costs[other, size], strict=True)
    return extremes([getattr(ours, part) / getattr(theirs, part) for ours, theirs in rounds])


def _table(costs: _Costs) -> Table:
    rows = []
    for (name, size), rounds in sorted(costs.items(), key=lambda item: item[0][1]):
        shown = [f"{statistics.median(getattr(one, part) for one in rounds):,.0f}" for part in _PARTS]
        rows.append((name, f"{size >> 10:,} KB", *shown))
    return Table(
        title="One picture, medians of the rounds",
        columns=("way", "pixels", "latency, us", "CPU of the engine, us", "CPU of the worker, us"),
        rows=tuple(rows),
    )


_MOST_LOST = {"launches": 1.0, "waits": 0.5}
"""A host that launches all the time shares Python's lock with the thread: it may gain little, but must not lose."""


def _beside_checks(costs: _Beside) -> tuple[Check, ...]:
    return tuple(
        Check(
            what=f"lost by the next run, whose host {host}: by a thread over before",
            measured=extremes(
                [
                    ours.lost / theirs.lost
                    for ours, theirs in zip(costs[host, "beside"], costs[host, "before"], strict=True)
                ]
            ),
            high=_MOST_LOST[host],
            unit="x",
        )
        for host in HOSTS
    )


def _beside_table(costs: _Beside) -> Table:
    rows = []
    for (host, when), rounds in costs.items():
        lost, latency = (statistics.median(getattr(one, part) for one in rounds) for part in ("lost", "latency"))
        rows.append((host, "before it" if when == "before" else "by a thread", f"{lost:.2f}", f"{latency:.2f}"))
    return Table(
        title="What a picture of 3 MB takes from the next run",
        columns=("the host", "sent", "the run ends later by, ms", "latency, ms"),
        rows=tuple(rows),
    )


_PARTS = ("latency", "engine", "worker")
_METHOD = (
    "A worker and an engine, each a process; the engine receives on an event loop. One picture at a time; in each "
    "round all ways take turns. 12 KB is a preview of 64 x 64, 3 MB a picture of 1024 x 1024, 60 MB a clip.",
    "pipe: what Tilework does (comm/messages.py). one piece: what it did before: the pixels in the pickle, put "
    "together from what asyncio's data_received gets.",
    "ring: four times as long as the pixels, since a message may take half of it; copied out, since an encoder may "
    "keep them for long. checked: with CRC32C.",
    "file: the pixels in a new file in /dev/shm, which the engine maps; its name through the pipe.",
    "Latency: from before the worker sends to when the engine has the picture. CPU: user and system time for one "
    "picture; the engine's includes reading all pixels once.",
    "By a thread: what Tilework does (comm/sender.py), here with a new thread for each picture. A run "
    "takes 50 ms alone; its host launches small kernels all the time, or waits for its device, for which it sleeps.",
    "Intervals: smallest and largest of the ratios of the rounds.",
)
