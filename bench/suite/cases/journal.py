"""What it costs that an accepted call outlives the machine: calls that wait for the disk, each alone or together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from suite.case import Check, Finding, Note, Table
from suite.stats import extremes, median, over_repeats, p99
from tilework.core.checkpoint import Checkpoint
from tilework.store.journal import Ended, Journal, OpenCall

_PAUSE_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a call is kept: SQLite's `synchronous`, and whether the call then waits for the journal's `sync`."""

    name: str
    synchronous: str
    syncs: bool


PROCESS = Way(name="until the process ends", synchronous="NORMAL", syncs=False)
ALONE = Way(name="an fsync for each", synchronous="FULL", syncs=False)
TOGETHER = Way(name="fsyncs that are shared", synchronous="NORMAL", syncs=True)
WAYS = (PROCESS, ALONE, TOGETHER)


@dataclass(slots=True)
class Part:
    """What one way took at one time: calls per second, each call's time, and how late the loop was meanwhile."""

    per_s: float = 0.0
    call_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalCost:
    """`at_once` clients each bring in a call as soon as their last one is accepted, `calls` in all. The ways take
    turns, `repeats` times.
    """

    at_once: tuple[int, ...] = (1, 8, 64)
    calls: int = 400
    repeats: int = 10
    document_bytes: int = 2000

    @classmethod
    def make(cls, quick: bool) -> JournalCost:
        return cls(calls=64, repeats=2) if quick else cls()

    def measure(self, note: Note) -> Finding:
        parts = {(way, clients): list[Part]() for clients in self.at_once for way in WAYS}
        with TemporaryDirectory(dir=Path.cwd()) as folder:
            for turn in range(self.repeats):
                for (way, clients), some in parts.items():
                    path = Path(folder) / f"{turn}-{clients}-{way.synchronous}-{way.syncs}"
                    some.append(asyncio.run(self._part(way, clients, path)))
                note(f"turn {turn + 1} of {self.repeats}")
        most = self.at_once[-1]
        gains = [one.per_s / other.per_s for one, other in zip(parts[TOGETHER, most], parts[ALONE, most], strict=True)]
        times = over_repeats([part.call_ms for part in parts[TOGETHER, most]], p99)
        what = f"{most} at once, fsyncs shared"
        return Finding(
            checks=(
                Check(what=f"{what}: calls per second, over one each", measured=extremes(gains), low=5.0),
                Check(what=f"{what}: p99 until a call is accepted", measured=times, high=50.0, unit="ms"),
            ),
            method=self._method(),
            tables=(
                Table(
                    title="Calls that are kept before they are accepted; medians of the turns, p99 over all",
                    columns=("way", "at once", "calls per second", "p50, ms", "p99, ms", "loop late, p99, ms"),
                    rows=tuple(_row(way, clients, some) for (way, clients), some in parts.items()),
                ),
            ),
        )

    async def _part(self, way: Way, clients: int, path: Path) -> Part:
        part, numbers = Part(), iter(range(self.calls))
        with closing(Journal(path)) as journal:
            journal._connection.execute(f"PRAGMA synchronous={way.synchronous}")
            watching = asyncio.create_task(_watch(part.late_ms))
            await asyncio.sleep(0)
            start_s = time.perf_counter()
            await asyncio.gather(*(self._client(journal, way, numbers.__next__, part) for _ in range(clients)))
            part.per_s = self.calls / (time.perf_counter() - start_s)
            watching.cancel()
            await asyncio.wait({watching})
        return part

    async def _client(self, journal: Journal, way: Way, number: Callable[[], int], part: Part) -> None:
        """Each call waits for its turn on the loop, as one that has just come does, and ends when it was accepted."""
        while True:
            try:
                uid = f"{number():032}"
            except StopIteration:
                return
            came_s = time.perf_counter()
            await asyncio.sleep(0)
            images = {f"{uid}-0": Checkpoint()}
            journal.begin(OpenCall(uid=uid, model="m", document=bytes(self.document_bytes), checkpoints=images))
            if way.syncs:
                await journal.sync()
            part.call_ms.append((time.perf_counter() - came_s) * 1e3)
            journal.end(Ended(uid=uid, has_key=False, document=bytes(self.document_bytes)))

    def _method(self) -> tuple[str, ...]:
        return (
            "A journal on the disk of the working directory. Each of the clients brings in a call of "
            f"{self.document_bytes} bytes with one image when its last one was accepted, {self.calls} in all, and ends "
            f"it then. The ways take turns, {self.repeats} times.",
            f"{PROCESS.name}: SQLite's synchronous=NORMAL, which a killed process survives and a lost machine does "
            f"not. {ALONE.name}: synchronous=FULL on the event loop; the end of a call waits, too. {TOGETHER.name}: as "
            "the server does it. The loop is late by what a pause of 1 ms takes more.",
        )


async def _watch(late_ms: list[float]) -> None:
    while True:
        begin_s = time.perf_counter()
        try:
            await asyncio.sleep(_PAUSE_S)
        finally:  # Also when the part ends.
            late_ms.append(max(0.0, (time.perf_counter() - begin_s - _PAUSE_S) * 1e3))


def _row(way: Way, clients: int, parts: list[Part]) -> tuple[str, ...]:
    times = [ms for part in parts for ms in part.call_ms]
    late = [ms for part in parts for ms in part.late_ms]
    rate = median([part.per_s for part in parts])
    return way.name, str(clients), f"{rate:.0f}", f"{median(times):.2f}", f"{p99(times):.2f}", f"{p99(late):.2f}"
