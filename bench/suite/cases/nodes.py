"""What works and states cost that cross from one node to another, and how soon a standby goes on with all nodes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from suite.case import Check, Finding, Note, Table
from suite.chain import Chains, chains, chains_over
from suite.lost_nodes import LostNode, lose_nodes
from suite.stats import Interval, extremes, median
from suite.takeover import Takeover, servers
from tilework.comm.messages import MessageReader, encode_message
from tilework.core.model import ModelSource
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Execute, GroupRef
from tilework.core.wire.reports import Ended
from tilework.core.wire.spec import Image, Spec
from tilework.core.work import Group
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.nodes.config import NodesConfig
from tilework.runtime.nodes.executor import NodesExecutor
from tilework.runtime.nodes.messages import node_codec

_TOKEN = "for this bench"
_CODEC_RUNS = 200
_SOURCE = ModelSource(path="shapes")
_EACH = LocalConfig(num_workers=1, sources=(_SOURCE,))
FIRST: Group = (0,)
CROSSING: tuple[Group, ...] = ((0,), (1,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Two workers of the model `shapes` on this machine: of one server's own, and of two agents, in turn.

    In each of `rounds`, by each way: `alone` works of one step, each sent when the one before has been reported, and
    `works` works of one step, all queued at once, that cross to the other worker after each.

    Then `kills` times a server over two agents is killed under `calls` requests, while a standby waits; and as often
    the node that runs a request of `lost_steps` steps.
    """

    side: int = 64
    alone: int = 40
    works: int = 40
    rounds: int = 5
    kills: int = 10
    calls: int = 6
    lost_steps: int = 60
    seed: int = 0

    @classmethod
    def make(cls, quick: bool) -> Nodes:
        return cls(alone=8, works=8, rounds=2, kills=2) if quick else cls()

    def measure(self, note: Note) -> Finding:
        return asyncio.run(self._measure(note))

    async def _measure(self, note: Note) -> Finding:
        alone: dict[str, list[float]] = {"pipes": [], "agents": []}
        gaps: dict[str, list[float]] = {"pipes": [], "agents": []}
        async with chains(2, _SOURCE) as here, _agents() as there:
            note("two workers and two agents are up")
            for driver in (here, there):
                await self._gaps(driver, CROSSING)  # The first works are slow.
            for number in range(self.rounds):
                note(f"round {number + 1}")
                for name, driver in (("pipes", here), ("agents", there)):
                    alone[name].append(await self._overhead_ms(driver))
                    gaps[name].append(median(await self._gaps(driver, CROSSING)))
        ratio = extremes([after / before for before, after in zip(alone["pipes"], alone["agents"], strict=True)])
        taken_over = await asyncio.to_thread(self._take_over, note)
        lost = await lose_nodes(self.kills, self._spec(self.lost_steps), _EACH, self.seed, note)
        return Finding(
            checks=(
                Check(what="a work on another node, over one on a worker of its own", measured=ratio, high=2),
                *_takeover_checks(taken_over),
                Check(
                    what="from the kill of a node until another makes a step of its request",
                    measured=extremes([one.goes_on_s for one in lost]),
                    high=5,
                    unit="s",
                ),
            ),
            method=_METHOD,
            tables=(_table(alone, gaps), _codec_table(self.rounds), _takeover_table(taken_over), _lost_table(lost)),
        )

    def _take_over(self, note: Note) -> list[Takeover]:
        rng, found = Random(self.seed), list[Takeover]()
        with servers() as running:
            for number in range(self.kills):
                found.append(running.take_over(self.calls, rng.random()))
                note(f"kill {number + 1}: the standby answers after {found[-1].answers_s:.2f} s")
        return found

    async def _overhead_ms(self, driver: Chains) -> float:
        """The median of what a work takes from its command to its report, without its run."""
        found: list[float] = []
        for _ in range(self.alone):
            start_ns = time.monotonic_ns()
            (report,) = await driver.run(self._spec(1), [FIRST], 1)
            assert driver.encoded is not None
            whole_ns = time.monotonic_ns() - start_ns
            run_ns = sum(one.end_ns - one.start_ns for one in (driver.encoded, report))
            found.append((whole_ns - run_ns) / 2 / 1e6)
        return median(found)

    async def _gaps(self, driver: Chains, cycle: Sequence[Group]) -> list[float]:
        """Milliseconds from the end of each work to the start of the next, on the other worker."""
        route = [cycle[index % len(cycle)] for index in range(self.works)]
        reports = await driver.run(self._spec(self.works), route, 1)
        return [(after.start_ns - before.end_ns) / 1e6 for before, after in pairwise(reports)]

    def _spec(self, steps: int) -> Spec:
        return Spec(
            prompt="a red circle",
            height=self.side,
            width=self.side,
            steps=steps,
            guidance_scale=4.0,
            seed=1,
        )


_METHOD = (
    "A work: from its command to its report, without its run; the mean of an encode and the step after it.",
    "A state: from the end of a step to the start of the next on the other worker, which was queued before; the clocks "
    "of both nodes are that of this machine, and are aligned as if they were not.",
    "Both agents and the engine are on this machine and talk over its loopback: there is no network in between.",
    "Medians of each round; the two ways take turns. Intervals: the lowest and the highest round.",
    "A kill: SIGKILL of a server over two agents, up to a second after its first request has begun, with a standby of "
    "the same --durable directory. It answers when it knows the status of the last request. Measured: median, lowest "
    "and highest.",
    "A node: SIGKILL of an agent and its worker, up to half a second after the first step of the only request. What "
    "the node kept of it is lost with it. Its connection breaks at once. Measured: median, lowest and highest.",
)


def _takeover_checks(taken_over: Sequence[Takeover]) -> tuple[Check, ...]:
    lost, twice = sum(one.lost for one in taken_over), sum(one.twice for one in taken_over)
    return (
        Check(
            what="from the kill of a server until its standby answers",
            measured=extremes([one.answers_s for one in taken_over]),
            high=10,
            unit="s",
        ),
        Check(what="requests that were accepted and lost", measured=extremes([lost]), high=0),
        Check(what="requests that were done twice", measured=extremes([twice]), high=0),
    )


def _takeover_table(taken_over: Sequence[Takeover]) -> Table:
    return _kills_table(
        "A server that is killed",
        {
            "until the standby answers, s": [one.answers_s for one in taken_over],
            "until all requests are done, s": [one.done_s for one in taken_over],
            "steps made again": [float(one.steps_again) for one in taken_over],
        },
    )


def _lost_table(lost: Sequence[LostNode]) -> Table:
    return _kills_table(
        "A node that is killed",
        {
            "until another node makes a step, s": [one.goes_on_s for one in lost],
            "until the request is done, s": [one.done_s for one in lost],
            "steps made again": [float(one.steps_again) for one in lost],
        },
    )


def _kills_table(title: str, rows: Mapping[str, Sequence[float]]) -> Table:
    return Table(
        title=title,
        columns=("", "of all kills"),
        rows=tuple((name, _shown(extremes(values))) for name, values in rows.items()),
    )


def _table(alone: dict[str, list[float]], gaps: dict[str, list[float]]) -> Table:
    return Table(
        title="Milliseconds, medians of rounds",
        columns=("", "own workers, pipes", "agents, TCP"),
        rows=(
            ("a work, without its run", *(_shown(extremes(alone[name])) for name in ("pipes", "agents"))),
            ("a state to the other worker", *(_shown(extremes(gaps[name])) for name in ("pipes", "agents"))),
        ),
    )


def _codec_table(rounds: int) -> Table:
    """Microseconds of messages there and back, as they go through a pipe and over a network."""
    spec = Spec(prompt="a red circle", height=64, width=64, steps=20, guidance_scale=4.0, seed=1)
    messages = {
        "command": Execute(1, "shapes", "steps", ((3, 0),), 5, {3: spec}, GroupRef(3, (0, 1))),
        "report": Ended(1, 1, 2, 5, blobs={3: StateBlob("0-123-abc-1", 66_000)}),
        "report with a picture of 1024 px": Ended(1, 1, 2, 1, images={3: Image(1024, 1024, bytes(3 << 20))}),
    }
    codec = node_codec()
    rows = []
    for name, message in messages.items():
        ways = (_pickled, lambda one: codec.decode(codec.encode(one)))
        times = [[_microseconds(way, message) for way in ways] for _ in range(rounds)]
        rows.append((name, *(_shown(extremes([one[index] for one in times])) for index in range(2))))
    return Table(
        title="Microseconds of a message, there and back, without its way",
        columns=("", "pickle, pixels beside it", "by schema"),
        rows=tuple(rows),
    )


def _pickled(message: object) -> object:
    """The message after its way through a pipe."""
    reader, received = MessageReader(), list[object]()
    for piece in encode_message(message):
        left = memoryview(piece)
        while left:
            room = reader.room()
            part = left[: len(room)]
            room[: len(part)] = part
            received += reader.received(len(part))
            left = left[len(part) :]
    return received[0]


def _microseconds(way: Callable[[object], object], message: object) -> float:
    start_ns = time.perf_counter_ns()
    for _ in range(_CODEC_RUNS):
        way(message)
    return (time.perf_counter_ns() - start_ns) / 1e3 / _CODEC_RUNS


def _shown(interval: Interval) -> str:
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"


@asynccontextmanager
async def _agents() -> AsyncIterator[Chains]:
    """The workers of two agents on this machine, one each."""
    executor = NodesExecutor(NodesConfig(num_nodes=2, each=_EACH, token=_TOKEN.encode()))
    await executor.listen()
    command = [sys.executable, "-m", "tilework", "agent", f"127.0.0.1:{executor.port}"]
    environment = os.environ | {"TILEWORK_CLUSTER_TOKEN": _TOKEN}
    agents = [subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        async with chains_over(executor) as driver:
            yield driver
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait()
