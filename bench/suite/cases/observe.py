"""What it costs to watch an engine: metrics, event log and the page of a browser against none of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.stages import DIFFUSE
from suite.stats import bootstrap, extremes, median
from tilework.control.controller import ControllerConfig
from tilework.control.log import LogEntry, entry_line, read_log
from tilework.core.actions import Reject
from tilework.core.cost_row import CostRow
from tilework.core.model import SimulatedSource
from tilework.core.request import Status
from tilework.core.time import NS_PER_S
from tilework.core.wire.spec import Spec
from tilework.cost.table import CostTable
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.observer import EndedWork, Observer, Observers
from tilework.runtime.ticket import Outcome, Ticket
from tilework.server.garbage import rare_collections
from tilework.server.http.sse import event
from tilework.server.live.feed import Feed
from tilework.server.live.frames import Viewer, frame
from tilework.server.live.watchers import EVENT, PERIOD_S
from tilework.server.metrics.levels import Levels
from tilework.server.metrics.metrics import Metrics
from tilework.sets.window import UseWindow
from tilework.store.memory import MemoryStore

_PIPELINE, _SIDE = "instant", 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Steps of `step_us`; `pairs` times `requests` without and with everything."""

    name: str
    step_us: float
    requests: int
    pairs: int


SATURATED = Load(name="runs that take no time", step_us=20.0, requests=300, pairs=30)
FAST = Load(name="the fastest of models", step_us=10_000.0, requests=80, pairs=40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """The engine serves each of `loads`, `in_flight` requests at a time."""

    workers: int = 2
    policy: str = "edf"
    steps: int = 4
    in_flight: int = 16
    loads: tuple[Load, ...] = (FAST, SATURATED)
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Observe:
        return cls(loads=tuple(replace(load, requests=40, pairs=4) for load in cls().loads)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        checks: list[Check] = []
        rates: list[tuple[str, ...]] = []
        for load in self.loads:
            with TemporaryDirectory() as folder:
                log = Path(folder) / "events.jsonl"
                seconds, used, told, fresh = asyncio.run(self._run(load, log, note))
                entries = list(read_log(log.read_text("utf-8").splitlines())[1])
                log_us = _write_us(entries, Path(folder) / "again.jsonl")
            pairs = zip(seconds["off"], seconds["on"], strict=True)
            lost = bootstrap([100 * (1 - off / on) for off, on in pairs], self.seed)
            checks.append(Check(what=f"{load.name}: throughput lost", measured=lost, high=1.0, unit="%"))
            for name, values in seconds.items():
                rate = extremes([load.requests / one for one in values])
                cpu_ms = median(used[name]) / load.requests * 1e3
                row = f"{rate.value:.1f}", f"{rate.low:.1f}", f"{rate.high:.1f}", f"{cpu_ms:.3f}"
                rates.append((load.name, name, *row))
        parts = {**told.again_us(fresh), "event log: a line": log_us, "page: a work": _feed_us(told.works)}
        return Finding(
            checks=tuple(checks),
            method=self._method(),
            tables=(
                Table(
                    title="Requests per second",
                    columns=(
                        "load",
                        "watched",
                        "median",
                        "least",
                        "most",
                        "processor time of the engine, ms a request",
                    ),
                    rows=tuple(rates),
                ),
                Table(
                    title="What each takes, in µs; best of 5",
                    columns=("what", "µs"),
                    rows=tuple((name, f"{us:.2f}") for name, us in parts.items()),
                ),
            ),
            facts={"events per request": f"{len(entries) / (load.requests * (load.pairs + 1)):.2f}"},
        )

    async def _run(
        self, load: Load, log: Path, note: Note
    ) -> tuple[dict[str, list[float]], dict[str, list[float]], _Recorder, Metrics]:
        """Seconds of each part, by engine, by the clock and of this process; what one part tells an observer; metrics
        that have been told nothing.
        """
        seconds: dict[str, list[float]] = {"off": [], "on": []}
        used: dict[str, list[float]] = {"off": [], "on": []}
        recorder = _Recorder()
        async with AsyncExitStack() as stack:
            lines = stack.enter_context(log.open("w", encoding="utf-8"))
            stack.enter_context(rare_collections())
            engines = {
                "off": await stack.enter_async_context(self._engine(load, None)),
                "on": await stack.enter_async_context(self._engine(load, lines)),
            }
            engines["off"].observe(recorder)
            for engine in engines.values():
                await self._part(engine, load.requests)
            engines["off"].observe(Observer())
            feed = Feed(engines["on"].now_ns)
            engines["on"].observe(Observers(_metrics(engines["on"]), feed))
            for index in range(load.pairs):
                for name, engine in engines.items():
                    with _watching(engine, feed) if name == "on" else nullcontext():
                        before_s = time.process_time()
                        seconds[name].append(await self._part(engine, load.requests))
                        used[name].append(time.process_time() - before_s)
                off_s, on_s = seconds["off"][-1], seconds["on"][-1]
                note(f"{load.name}, pair {index + 1}: {off_s:.3f} s without, {on_s:.3f} s with")
        return seconds, used, recorder, _metrics(engines["off"])

    @asynccontextmanager
    async def _engine(self, load: Load, log: TextIO | None) -> AsyncIterator[Engine]:
        row = CostRow(pipeline=_PIPELINE, stage=DIFFUSE, height=_SIDE, width=_SIDE, seconds=load.step_us * 1e-6)
        table = CostTable(hardware="instant", rows=(row,), steps=self.steps)
        source = SimulatedSource(pipeline=_PIPELINE, hardware=table.hardware, steps=self.steps, rows=table.rows)
        executor = LocalExecutor(LocalConfig(num_workers=self.workers, sources=(source,)))
        engine = await EngineStart(
            EngineConfig(controller=ControllerConfig(policy=self.policy), table=table), executor, log
        ).start()
        try:
            yield engine
        finally:
            await engine.stop()

    async def _part(self, engine: Engine, num_requests: int) -> float:
        """Serve the requests; returns how long it took."""
        numbers = iter(range(num_requests))
        start_s = time.perf_counter()
        await asyncio.gather(*(self._client(engine, numbers) for _ in range(self.in_flight)))
        return time.perf_counter() - start_s

    async def _client(self, engine: Engine, numbers: Iterable[int]) -> None:
        for number in numbers:
            spec = Spec(
                prompt="x",
                height=_SIDE,
                width=_SIDE,
                steps=self.steps,
                guidance_scale=1.0,
                seed=number,
            )
            deadline_ns = engine.now_ns() + 60 * 10**9
            uid = f"request-{next(_uids)}"
            answer = engine.submit({uid: spec}, deadline_ns=deadline_ns)
            if isinstance(answer, Reject) or (await answer[0].outcome).status is not Status.DONE:
                raise CaseFailed(f"{uid} was not served")

    def _method(self) -> tuple[str, ...]:
        return (
            f"Two engines in one process, each with {self.workers} simulated workers and policy {self.policy}; the one "
            "with metrics, an event log in a file (each line flushed), and the events of a page that is open in a "
            f"browser, one each {PERIOD_S:g} s and one more at the begin of each part; the other with none of them. "
            "The history of each request is part of the engine and is kept by both. No HTTP.",
            f"Requests of {self.steps} steps, {self.in_flight} in flight. "
            + "; ".join(f"{load.name}: {load.step_us:g} µs a step" for load in self.loads)
            + ". With the latter nothing but the control path and the workers' own overhead takes time. The engines "
            "take turns, after one part each that does not count; lost is 1 - without / with, of each pair.",
            "Times of the parts: calls as one part made them, told again to new metrics; lines of the log, written "
            "again from their events, flushed.",
        )


_uids = count()


@contextmanager
def _watching(engine: Engine, feed: Feed) -> Iterator[None]:
    """Make the frames of one that watches while the block runs, as `Watchers` do, and as bytes."""

    async def frames() -> None:
        begin = feed.num_past
        while True:
            made = frame(engine, feed, Viewer(), begin)
            event(EVENT, {**made.fields, "devices": made.devices})
            begin = made.end
            await asyncio.sleep(PERIOD_S)

    task = asyncio.create_task(frames())
    try:
        yield
    finally:
        task.cancel()


def _feed_us(works: list[EndedWork]) -> float:
    feed = Feed(lambda: 0)

    def run() -> None:
        for ended in works:
            feed.on_work_sent(ended.work, ended.requests, ended.predicted_ns, ended.start_ns)
            feed.on_work_ended(ended)

    return _best_us(run, len(works))


def _metrics(engine: Engine) -> Metrics:
    metrics = Metrics(UseWindow(NS_PER_S))
    metrics.register(Levels(engine, MemoryStore(max_bytes=1, ttl_ns=1), lambda: None, None))
    return metrics


@dataclass(eq=False)
class _Recorder(Observer):
    """Keeps what happens often."""

    decisions: list[tuple[int, int, int]] = field(default_factory=list)
    works: list[EndedWork] = field(default_factory=list)
    ends: list[tuple[Ticket, Outcome]] = field(default_factory=list)

    def on_decided(self, now_ns: int, took_ns: int, num_waiting: int) -> None:
        self.decisions.append((now_ns, took_ns, num_waiting))

    def on_work_ended(self, ended: EndedWork) -> None:
        self.works.append(ended)

    def on_ended(self, ticket: Ticket, outcome: Outcome) -> None:
        self.ends.append((ticket, outcome))

    def again_us(self, metrics: Metrics) -> dict[str, float]:
        """Microseconds of each kind of call to metrics."""
        for device_id in {device_id for ended in self.works for device_id in ended.work.devices}:
            metrics.on_joined(device_id, 0)

        def works() -> None:
            for ended in self.works:
                metrics.on_work_ended(ended)

        def decisions() -> None:
            for decision in self.decisions:
                metrics.on_decided(*decision)

        def ends() -> None:
            for end in self.ends:
                metrics.on_ended(*end)

        return {
            "metrics: a work": _best_us(works, len(self.works)),
            "metrics: a decision": _best_us(decisions, len(self.decisions)),
            "metrics: a request": _best_us(ends, len(self.ends)),
        }


def _write_us(entries: list[LogEntry], path: Path) -> float:
    with path.open("w", encoding="utf-8") as file:

        def lines() -> None:
            for entry in entries:
                file.write(entry_line(entry.event, entry.actions, entry.now_ns) + "\n")
                file.flush()

        return _best_us(lines, len(entries))


def _best_us(run: Callable[[], None], num_calls: int) -> float:
    times = []
    for _ in range(5):
        start_ns = time.perf_counter_ns()
        run()
        times.append((time.perf_counter_ns() - start_ns) / 1e3 / num_calls)
    return min(times)
