"""How soon a request is accepted or refused while very many wait and very many connections are open, for ten minutes.

The client is aiohttp's, as in `frontdoor`, and runs on the same cores as the server.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.server import Server, serving_simulated
from suite.stats import bootstrap, exact, p99, percentile
from tilework.cost.shipped import shipped_path
from tilework.runtime.worker_process import resident_bytes
from tilework.server.garbage import rare_collections

GOAL_MS = 20.0
# Growth of the memory per minute, in MB, that the log's buffers and a heap that stops growing may show in ten minutes.
FLAT_MB = 1.0
_POLL_S = 4.0  # Less than after what the server closes a connection on which nothing happens.
_WARM_UP = 0.2  # Of the time, before the memory counts.
_AT_A_TIME = 20
_FAR_S, _FARTHEST_S = 500_000.0, 600_000.0
# Connections are opened one by one over this time, which is that between two comments of the server in a stream: what
# comes at regular times would else come for all of them at once.
_OPENING_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`queued` requests wait, `connections` are open, and `rate` requests a second arrive for `seconds`.

    Of the connections all but `pollers` follow the events of a call that waits; those ask for one every four seconds. A
    share `refused` of the arrivals asks for a promise that is out of reach; of the others every second one has a far
    deadline. For each that comes in, one that waits is cancelled, so that the queue keeps its length and yet is another
    one in the end; those that are followed have the farthest deadlines, and never come to its head. Afterwards calls
    arrive at `slower` rates, each for a tenth of the time.
    """

    queued: int = 20_000
    connections: int = 2_000
    pollers: int = 100
    rate: float = 200.0
    slower: tuple[float, ...] = (150.0, 100.0, 50.0)
    refused: float = 0.5
    seconds: float = 600.0
    devices: int = 8
    policy: str = "edf"
    table: str = "flux1dev_h100_eager"
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Load:
        return cls(queued=2_000, connections=200, pollers=20, seconds=20.0) if quick else cls()

    def measure(self, note: Note) -> Finding:
        with rare_collections():
            seen = asyncio.run(self._measure(note))
        checks = [
            Check(what=f"p99 until {what}", measured=bootstrap(ms, self.seed, p99), high=GOAL_MS, unit="ms")
            for what, ms in seen.answers[self.rate].by_kind()
        ]
        growth = exact(seen.gauge.growth_mb())
        checks.append(Check(what="growth of the server's memory", measured=growth, high=FLAT_MB, unit="MB/min"))
        rows = [_row(rate, what, ms) for rate, answers in seen.answers.items() for what, ms in answers.by_kind()]
        columns = ("arrivals per second", "answer", "count", "median, ms", "p99, ms", "largest, ms")
        return Finding(
            checks=tuple(checks),
            method=self._method(),
            tables=(
                Table(title="Time to the answer", columns=columns, rows=tuple(rows)),
                Table(title="The server", columns=("at, s", "memory, MB", "CPU"), rows=tuple(seen.gauge.rows())),
            ),
            facts={"client_cpu": round(seen.client_cpu, 3), "events_read": seen.num_events, "waiting": seen.waiting},
        )

    async def _measure(self, note: Note) -> _Seen:
        table = shipped_path(self.table)
        assert table is not None
        settings = {
            "max_jobs": 4 * self.queued,
            "max_backlog_s": 30 * 86400,
            "max_connections": 2 * self.connections + 1000,
        }
        with TemporaryDirectory() as folder:
            log = Path(folder) / "events.jsonl"
            with serving_simulated(self.devices, table, self.policy, log, settings) as server:
                timeout, connector = aiohttp.ClientTimeout(120), aiohttp.TCPConnector(limit=0)
                async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as http:
                    return await self._run(http, server, note)

    async def _run(self, http: aiohttp.ClientSession, server: Server, note: Note) -> _Seen:
        seen = _Seen(gauge=_Gauge(server.pid))
        crowd = _Crowd(http, server.url, Random(self.seed), seen)
        num_followed = self.connections - self.pollers
        await crowd.fill(self.queued - num_followed)
        followed = await crowd.submit_all({"slo_s": _FARTHEST_S}, num_followed)
        note(f"{len(crowd.uids) + len(followed)} wait, {resident_bytes(server.pid) or 0:,} bytes")
        watching = [asyncio.create_task(crowd.follow(uid)) for uid in followed]
        watching += [asyncio.create_task(crowd.poll(followed, index)) for index in range(self.pollers)]
        await asyncio.sleep(_OPENING_S + 1.0)
        note(f"{sum(not task.done() for task in watching)} of {self.connections} connections are open")
        with _sampling(seen.gauge):
            began_s, cpu_s = time.perf_counter(), time.process_time()
            await crowd.arrive(self.rate, self.seconds, self.refused)
            seen.client_cpu = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
        note(", ".join(f"{what}: p99 {p99(ms):.1f} ms" for what, ms in seen.answers[self.rate].by_kind()))
        for rate in self.slower:
            await crowd.arrive(rate, self.seconds / 10, self.refused)
        seen.waiting = await crowd.num_waiting()
        ended = [task for task in watching if task.done()]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        if ended:
            raise CaseFailed(f"{len(ended)} connections did not stay open; the first: {ended[0].exception()!r}")
        return seen

    def _method(self) -> tuple[str, ...]:
        return (
            f"`tilework serve --backend modelled --devices {self.devices} --cost {self.table} --policy {self.policy} "
            f"--log FILE`: everything is real but the devices. {self.queued} asynchronous calls wait.",
            f"{self.connections} connections are open: {self.connections - self.pollers} follow the events of a call "
            f"that waits (a comment every 15 s), {self.pollers} ask for one every {_POLL_S:g} s.",
            f"{self.rate:g} calls arrive per second (Poisson) for {self.seconds:g} s on further connections. "
            f"{self.refused:.0%} ask for a promise out of reach; for each that comes in, one that waits is cancelled.",
            f"Then fewer: {', '.join(f'{rate:g}' for rate in self.slower)} per second, each for a tenth of the time.",
            "Time from the client's call to its reading of the 202 or 429, over HTTP on loopback; client, server and "
            "workers share the machine's cores. Intervals: 95% bootstrap.",
            "Memory: the server's resident bytes each second; the growth is that of a line through the last "
            f"{1 - _WARM_UP:.0%} of the time.",
        )


@dataclass(slots=True)
class _Gauge:
    """The server's memory and CPU time, each second: (seconds, bytes, CPU seconds)."""

    pid: int
    samples: list[tuple[float, int, float]] = field(default_factory=list)

    async def sample(self) -> None:
        start_s = time.perf_counter()
        while True:
            self.samples.append((time.perf_counter() - start_s, resident_bytes(self.pid) or 0, _cpu_s(self.pid)))
            await asyncio.sleep(1.0)

    def growth_mb(self) -> float:
        """The slope of a line through the memory, in MB per minute."""
        kept = self.samples[int(_WARM_UP * len(self.samples)) :]
        at_s, at_mb = [at for at, _, _ in kept], [size / 1e6 for _, size, _ in kept]
        mean_s, mean_mb = fmean(at_s), fmean(at_mb)
        spread = sum((at - mean_s) ** 2 for at in at_s)
        together = sum((at - mean_s) * (mb - mean_mb) for at, mb in zip(at_s, at_mb, strict=True))
        return 60 * together / spread if spread else 0.0

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Ten of the samples, with the CPU time since the one before."""
        step = max(1, len(self.samples) // 10)
        for before, now in zip(self.samples[::step], self.samples[step::step], strict=False):
            yield f"{now[0]:.0f}", f"{now[1] / 1e6:.1f}", f"{(now[2] - before[2]) / (now[0] - before[0]):.0%}"


@dataclass(slots=True)
class _Seen:
    """What the client has measured: `answers` by the rate of arrivals, and `client_cpu`, its own share of one core."""

    gauge: _Gauge
    answers: dict[float, _Answers] = field(default_factory=dict)
    num_events: int = 0
    client_cpu: float = 0.0
    waiting: int = 0


@dataclass(slots=True)
class _Answers:
    """How long each took."""

    accepted_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)

    def by_kind(self) -> tuple[tuple[str, list[float]], ...]:
        """Raises CaseFailed if there are none of one kind."""
        if not self.accepted_ms or not self.refused_ms:
            raise CaseFailed(f"{len(self.accepted_ms)} were accepted and {len(self.refused_ms)} refused: too few")
        return ("accepted", self.accepted_ms), ("refused", self.refused_ms)


class _Crowd:
    """Clients of all kinds; `uids` are the calls that wait and may be cancelled."""

    def __init__(self, http: aiohttp.ClientSession, url: str, rng: Random, seen: _Seen) -> None:
        self._http, self._url, self._rng, self._seen = http, url, rng, seen
        self.uids: list[str] = []

    async def fill(self, count: int) -> None:
        self.uids += await self.submit_all({}, count)

    async def submit_all(self, more: dict[str, Any], count: int) -> list[str]:
        """Calls that wait, with `more` in their bodies."""
        uids: list[str] = []
        for first in range(0, count, _AT_A_TIME):
            calls = (self._submit(self._patient() | more) for _ in range(first, min(first + _AT_A_TIME, count)))
            uids += [uid for _, uid in await asyncio.gather(*calls) if uid is not None]
        if len(uids) < count:
            raise CaseFailed(f"{count - len(uids)} of {count} calls were refused while the queue was filled")
        return uids

    async def follow(self, uid: str) -> None:
        """Read a call's events until cancelled."""
        await asyncio.sleep(self._rng.uniform(0, _OPENING_S))
        async with self._http.get(f"/v1/requests/{uid}/events", timeout=aiohttp.ClientTimeout(None)) as response:
            async for _ in response.content:
                self._seen.num_events += 1
        raise CaseFailed(f"the events of {uid} have ended")

    async def poll(self, uids: list[str], index: int) -> None:
        """Ask how a call goes, again and again, on one connection."""
        await asyncio.sleep(self._rng.uniform(0, _OPENING_S))
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(self._url, connector=connector) as own:
            while True:
                async with own.get(f"/v1/requests/{uids[index % len(uids)]}") as response:
                    await response.read()
                await asyncio.sleep(_POLL_S)

    async def arrive(self, rate: float, seconds: float, refused: float) -> None:
        """Raises what the first call raised that went wrong."""
        start_s, due_s = time.perf_counter(), 0.0
        answers = self._seen.answers[rate] = _Answers()
        async with asyncio.TaskGroup() as visits:
            while due_s < seconds:
                await asyncio.sleep(max(0.0, start_s + due_s - time.perf_counter()))
                visits.create_task(self._visit(refused, answers))
                due_s += self._rng.expovariate(rate)

    async def num_waiting(self) -> int:
        async with self._http.get("/metrics") as response:
            lines = [line for line in (await response.text()).splitlines() if line.startswith("tilework_jobs_queued")]
        return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines))

    async def _visit(self, refused: float, answers: _Answers) -> None:
        body = self._patient()
        if self._rng.random() < refused:
            body |= {"slo_s": 0.1, "on_miss": "reject"}
        elif self._rng.random() < 0.5:
            body |= {"slo_s": _FAR_S}
        start_s = time.perf_counter()
        status, uid = await self._submit(body)
        taken_ms = (time.perf_counter() - start_s) * 1e3
        if status == 429:
            answers.refused_ms.append(taken_ms)
        elif status == 202 and uid is not None:
            answers.accepted_ms.append(taken_ms)
            await self._replace(uid)
        else:
            raise CaseFailed(f"a call was answered with {status}")

    async def _replace(self, uid: str) -> None:
        """Cancel a call that waits; this one may be cancelled from now on."""
        index = self._rng.randrange(len(self.uids))
        old, self.uids[index] = self.uids[index], uid
        async with self._http.delete(f"/v1/requests/{old}") as response:
            await response.read()

    async def _submit(self, body: dict[str, Any]) -> tuple[int, str | None]:
        headers = {"Prefer": "respond-async"}
        async with self._http.post("/v1/images/generations", json=body, headers=headers) as response:
            return response.status, (await response.json()).get("uid")

    def _patient(self) -> dict[str, Any]:
        side = self._rng.choice([256, 512, 1024])
        return {"prompt": "a picture", "size": f"{side}x{side}", "num_inference_steps": 20}


@contextmanager
def _sampling(gauge: _Gauge) -> Iterator[None]:
    task = asyncio.create_task(gauge.sample())
    try:
        yield
    finally:
        task.cancel()


def _cpu_s(pid: int) -> float:
    """CPU time of a process so far; 0 where nothing tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _row(rate: float, kind: str, times: list[float]) -> tuple[str, ...]:
    return (
        f"{rate:g}",
        kind,
        str(len(times)),
        f"{percentile(times, 50):.2f}",
        f"{percentile(times, 99):.2f}",
        f"{max(times):.2f}",
    )
