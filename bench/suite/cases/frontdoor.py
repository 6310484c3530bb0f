"""How soon a request is accepted or refused while many are waiting.

The client is aiohttp's: our own (httpx) takes as much CPU for a request as the server, on the same cores.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import aiohttp

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.door import Answer, Door
from suite.server import Server, cpu_s, serving_simulated
from suite.stats import extremes, over_repeats, p99, percentile
from tilework.cost.shipped import shipped_path
from tilework.server.garbage import rare_collections

GOAL_MS, GOAL_CPU_MS = 10.0, 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontDoor:
    """`queued` requests wait; others arrive for `seconds` at each of `rates` a second, `repeats` times on one server.

    The goal is for the last of the rates, the others show how the time grows.

    Of the arrivals a share `promises` asks for a promise; most of these, all but `reachable`, for one that is out of
    reach, as with such a queue they are. What comes in is asynchronous and cancelled at once, so that the queue keeps
    its length.

    What a call and its cancellation take of the server's CPU is that of `visits`, one after another, while
    `visits_queued` wait for a single device: with more devices their reports would count, too.
    """

    queued: int = 1000
    rates: tuple[float, ...] = (50.0, 100.0, 200.0)
    seconds: float = 10.0
    repeats: int = 3
    promises: float = 0.8
    reachable: float = 0.1
    queued_promises: float = 0.3
    devices: int = 8
    policies: tuple[str, ...] = ("edf", "tetriserve")
    table: str = "flux1dev_h100_eager"
    visits: int = 2000
    visits_queued: int = 100

    @classmethod
    def make(cls, quick: bool) -> FrontDoor:
        if not quick:
            return cls()
        return cls(queued=100, rates=(20.0, 50.0), seconds=2.0, repeats=1, policies=("edf",), visits=500)

    def measure(self, note: Note) -> Finding:
        checks: list[Check] = []
        rows: list[tuple[str, ...]] = []
        for policy in self.policies:
            with rare_collections():
                answers = asyncio.run(self._measure(policy, note))
            for rate in self.rates:
                for status, what in ((202, "accepted"), (429, "refused")):
                    times = [[one.answer_ms for one in some if one.status == status] for some in answers[rate]]
                    if not all(times):
                        raise CaseFailed(f"{policy}: at {rate:g}/s not one request was {what}")
                    if rate == self.rates[-1]:
                        name = f"{policy}: p99 until {what}, {rate:g}/s"
                        checks.append(Check(what=name, measured=over_repeats(times, p99), high=GOAL_MS, unit="ms"))
                    rows.append(_row(f"{policy}, {rate:g}/s: {what}", [one for some in times for one in some]))
            checks.append(self._cpu_check(policy, note))
        columns = ("answer", "count", "median, ms", "p99, ms", "largest, ms")
        return Finding(
            checks=tuple(checks),
            method=self._method(),
            tables=(Table(title="Time to the answer", columns=columns, rows=tuple(rows)),),
        )

    def _cpu_check(self, policy: str, note: Note) -> Check:
        with rare_collections():
            cpu_ms = asyncio.run(self._cpu_ms(policy))
        note(f"{policy}: {', '.join(f'{one:.2f}' for one in cpu_ms)} ms of CPU for a call and its cancellation")
        name = f"{policy}: CPU of the server for a call and its cancellation, {self.visits_queued} waiting"
        return Check(what=name, measured=extremes(cpu_ms), high=GOAL_CPU_MS, unit="ms")

    async def _cpu_ms(self, policy: str) -> list[float]:
        """For a call and its cancellation, in each repeat."""
        cpu_ms = []
        with self._serving(1, policy) as server:
            async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(60)) as http:
                door = Door(http, Random(1))
                await door.fill(self.visits_queued, 0.0)
                await door.one_by_one(self.visits // 10)
                for _ in range(self.repeats):
                    before_s = cpu_s([server.pid])
                    await door.one_by_one(self.visits)
                    cpu_ms.append(1e3 * (cpu_s([server.pid]) - before_s) / self.visits)
        return cpu_ms

    @contextmanager
    def _serving(self, devices: int, policy: str) -> Iterator[Server]:
        table = shipped_path(self.table)
        assert table is not None
        settings = {"drain_s": 0.2}
        with (
            TemporaryDirectory() as folder,
            serving_simulated(devices, table, policy, Path(folder) / "events.jsonl", settings) as server,
        ):
            yield server

    async def _measure(self, policy: str, note: Note) -> dict[float, list[list[Answer]]]:
        """The answers of each repeat, by rate."""
        answers: dict[float, list[list[Answer]]] = {rate: [] for rate in self.rates}
        with self._serving(self.devices, policy) as server:
            async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(60)) as http:
                door = Door(http, Random(1), self.reachable)
                await door.fill(self.queued, self.queued_promises)
                for repeat in range(self.repeats):
                    for rate in self.rates:
                        some = await door.arrivals(rate, self.seconds, self.promises)
                        answers[rate].append(some)
                        counts = dict(Counter(one.status for one in some))
                        waiting = await door.num_waiting()
                        note(f"{policy}, repeat {repeat + 1}, {rate:g}/s: {counts}, {waiting} waiting")
        return answers

    def _method(self) -> tuple[str, ...]:
        return (
            f"`tilework serve --backend modelled --devices {self.devices} --cost {self.table} --log FILE`: all is "
            f"real but the devices. {self.queued} requests are waiting, {self.queued_promises:.0%} of them promised; "
            f"others arrive (Poisson), {self.promises:.0%} of which ask for a promise, {self.reachable:.0%} of these "
            "within reach.",
            "Time from the client's call to its reading of the 202 or 429, over HTTP on loopback; client, server and "
            "workers share the machine's cores. What was accepted is cancelled at once, outside the time.",
            f"CPU: `--devices 1`, {self.visits_queued} requests are waiting, none is promised. One client brings in "
            f"and cancels {self.visits} more, each after the one before. The time is that of the server's process, by "
            "/proc, its threads and what the kernel does for it included. The event log is written.",
            f"Intervals: extremes over {self.repeats} repeats of {self.seconds:g} s; of CPU, as many times.",
        )


def _row(name: str, times: list[float]) -> tuple[str, ...]:
    return (
        name,
        str(len(times)),
        f"{percentile(times, 50):.2f}",
        f"{percentile(times, 99):.2f}",
        f"{max(times):.2f}",
    )
