"""What front ends change: how soon a call is answered, what it costs the controller, and how soon one is back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import aiohttp

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.door import Door
from suite.server import Server, cpu_s, serving_simulated
from suite.stats import extremes, median, over_repeats, p99, percentile
from tilework.cost.shipped import shipped_path
from tilework.server.garbage import rare_collections

GOAL_MS, BACK_S = 20.0, 1.0
_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One server under a steady load, then under as much as it takes. CPU is that of a call and its cancellation."""

    answers_ms: list[float]
    controller_ms: float
    front_ends_ms: float
    calls_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnds:
    """`rate` calls and as many cancellations a second for `seconds`, in turns without and with `number` front ends.

    Then `clients` come again and again for `seconds`. A lone front end is killed `kills` times.
    """

    number: int = 2
    rate: float = 200.0
    seconds: float = 10.0
    clients: int = 16
    queued: int = 20
    repeats: int = 3
    kills: int = 10
    devices: int = 8
    policy: str = "edf"
    table: str = "flux1dev_h100_eager"

    @classmethod
    def make(cls, quick: bool) -> FrontEnds:
        return cls(rate=50.0, seconds=2.0, repeats=1, kills=2, devices=2) if quick else cls()

    def measure(self, note: Note) -> Finding:
        turns: dict[int, list[Turn]] = {0: [], self.number: []}
        for repeat in range(self.repeats):
            for number, measured in turns.items():
                with self._serving(number) as server, rare_collections():
                    turn = asyncio.run(self._turn(server, number, Random(repeat)))
                measured.append(turn)
                note(f"repeat {repeat + 1}, {number} front ends: {_shown(turn)}")
        with self._serving(1) as server:
            back_s = asyncio.run(self._back(server))
            note(f"back after {', '.join(f'{one:.3f}' for one in back_s)} s")
        return self._finding(turns[0], turns[self.number], back_s)

    @contextmanager
    def _serving(self, number: int) -> Iterator[Server]:
        table = shipped_path(self.table)
        assert table is not None
        with TemporaryDirectory() as folder:
            settings = {"frontends": number, "drain_s": 0.2}
            with serving_simulated(self.devices, table, self.policy, Path(folder) / "log", settings) as server:
                yield server

    async def _turn(self, server: Server, number: int, rng: Random) -> Turn:
        front_ends = _front_ends(server)
        if len(front_ends) != number:
            raise CaseFailed(f"{len(front_ends)} front ends run instead of {number}")
        async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(60)) as http:
            door = Door(http, rng)
            await door.fill(self.queued, 0.0)
            before = [cpu_s([server.pid]), cpu_s(front_ends)]
            answers = await door.arrivals(self.rate, self.seconds, 0.0)
            after = [cpu_s([server.pid]), cpu_s(front_ends)]
            if wrong := [one.status for one in answers if one.status != 202]:
                raise CaseFailed(f"{len(wrong)} of {len(answers)} calls were answered with {set(wrong)}")
            controller_ms, front_ends_ms = (
                1e3 * (late - early) / len(answers) for early, late in zip(before, after, strict=True)
            )
            num_visits = await door.as_many_as_can(self.clients, self.seconds)
        return Turn(
            answers_ms=[one.answer_ms for one in answers],
            controller_ms=controller_ms,
            front_ends_ms=front_ends_ms,
            calls_per_s=num_visits / self.seconds,
        )

    async def _back(self, server: Server) -> list[float]:
        """From the kill of the only front end to the answer to a client that calls on a new connection."""
        times_s = []
        for _ in range(self.kills):
            (front_end,) = _front_ends(server)
            start_s = time.perf_counter()
            os.kill(front_end, signal.SIGKILL)
            await _answered(server.url, front_end)
            times_s.append(time.perf_counter() - start_s)
        return times_s

    def _finding(self, without: list[Turn], with_them: list[Turn], back_s: list[float]) -> Finding:
        checks = [
            Check(
                what=f"p99 until accepted, {self.rate:g} calls and cancellations/s, {name}",
                measured=over_repeats([one.answers_ms for one in turns], p99),
                high=GOAL_MS,
                unit="ms",
            )
            for name, turns in (("no front end", without), (f"{self.number} front ends", with_them))
        ]
        pairs = list(zip(without, with_them, strict=True))
        checks += [
            Check(
                what="CPU of the controller's process for a call: with front ends / without",
                measured=extremes([with_one.controller_ms / alone.controller_ms for alone, with_one in pairs]),
                high=1.0,
            ),
            Check(
                what="calls per second, as many as can be: with front ends / without",
                measured=extremes([with_one.calls_per_s / alone.calls_per_s for alone, with_one in pairs]),
                low=1.0,
            ),
            Check(
                what="a killed front end is back, median",
                measured=over_repeats([[one] for one in back_s], median),
                high=BACK_S,
                unit="s",
            ),
        ]
        rows = [
            _row(f"{name}, turn {turn + 1}", one)
            for turn, pair in enumerate(pairs)
            for name, one in zip(("no front end", f"{self.number} front ends"), pair, strict=True)
        ]
        columns = ("turn", "median, ms", "p99, ms", "controller, CPU ms", "front ends, CPU ms", "calls/s, at most")
        table = Table(title="Each turn", columns=columns, rows=tuple(rows))
        return Finding(checks=tuple(checks), method=self._method(), tables=(table,))

    def _method(self) -> tuple[str, ...]:
        return (
            f"`tilework serve --frontends N --backend modelled --devices {self.devices} --cost {self.table} --policy "
            f"{self.policy} --log FILE`: all is real but the devices (simulated). {self.queued} requests are waiting.",
            f"{self.rate:g} calls a second (Poisson) with `Prefer: respond-async` for {self.seconds:g} s, each "
            "cancelled as soon as it is accepted; the time is from the client's call to its reading of the 202. "
            "Client, controller, front ends and workers share the machine's cores. CPU is that of the processes, by "
            "/proc, for a call and its cancellation.",
            f"At most: {self.clients} clients that call, cancel and come again, for {self.seconds:g} s.",
            f"Servers in turns, {self.repeats} of each; ratios are of neighbours. Intervals: extremes.",
            f"Back: `--frontends 1`, {self.kills} kills (SIGKILL); the time ends with the answer to /health on a new "
            "connection.",
        )


async def _answered(url: str, killed: int) -> None:
    """Wait for an answer on a new connection that the killed process cannot have taken. Raises CaseFailed."""
    end_s = time.perf_counter() + _ANSWER_S
    while time.perf_counter() < end_s:
        try:
            async with aiohttp.ClientSession(url) as http, http.get("/health") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            await asyncio.sleep(0.001)
    raise CaseFailed(f"no answer {_ANSWER_S:g} s after front end {killed} was killed")


def _front_ends(server: Server) -> list[int]:
    """Process ids."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"front end" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _shown(turn: Turn) -> str:
    return f"p99 {p99(turn.answers_ms):.1f} ms, CPU {turn.controller_ms:.2f} ms, {turn.calls_per_s:.0f}/s"


def _row(name: str, turn: Turn) -> tuple[str, ...]:
    return (
        name,
        f"{percentile(turn.answers_ms, 50):.2f}",
        f"{p99(turn.answers_ms):.2f}",
        f"{turn.controller_ms:.2f}",
        f"{turn.front_ends_ms:.2f}",
        f"{turn.calls_per_s:.0f}",
    )
