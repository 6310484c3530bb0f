"""How soon other workers go on when one is killed, and how soon groups form again, while another runs for minutes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.stats import bootstrap, exact
from suite.waiting import until
from tilework.control.controller import ControllerConfig
from tilework.core.cost_row import CostRow
from tilework.core.model import SimulatedSource
from tilework.core.request import Status
from tilework.core.wire.reports import Ended, Progress, Report
from tilework.core.wire.spec import Spec
from tilework.cost.table import CostTable
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.ticket import Ticket

_SMALL, _LARGE, _STEPS, _STEP_S = 256, 512, 500, 0.02
_WATCHED_S = 1.0  # After a kill.
_RECENT_S = 0.5
_LONG_S = 3000.0  # Of the decode that goes on from the start of the measurement to its end.
_WAYS = ("sockets", "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Of `workers` one decodes all the time, and the others run steps alone; one of these is killed in each round.

    Once by sockets, where a loss concerns only groups of the lost worker, and once as with NCCL, where the node's
    communicator has to form again.
    """

    rounds: int = 40
    workers: int = 4
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Links:
        return cls(rounds=6) if quick else cls()

    def measure(self, note: Note) -> Finding:
        found = {way: asyncio.run(self._rounds(way, note)) for way in _WAYS}
        checks = [
            check
            for way, one in found.items()
            for check in (
                Check(
                    what=f"the longest wait for a step of another worker, {way}, median",
                    measured=bootstrap(one.silence_s, self.seed),
                    high=0.1,
                    unit="s",
                ),
                Check(what=f"workers lost that were not killed, {way}", measured=exact(one.num_needless), high=0),
                Check(what=f"requests that failed, {way}", measured=exact(one.num_failed), high=0),
            )
        ]
        linked = bootstrap(found["gloo"].linked_s, self.seed)
        checks.append(Check(what="until the others can form groups again, gloo", measured=linked, high=1, unit="s"))
        return Finding(
            checks=tuple(checks),
            method=(
                f"{self.workers} simulated devices with real processes; steps of {1000 * _STEP_S:g} ms, each reported, "
                f"and a decode of 50 minutes. A worker is watched for {_WATCHED_S:g} s after each kill.",
                f"{self.rounds} workers each way killed by SIGKILL, the next when all are up and connected again.",
                "Intervals: 95% bootstrap of the median.",
            ),
            tables=(
                Table(
                    title="The longest wait for a step of another worker, in seconds",
                    columns=("quantile", *_WAYS),
                    rows=tuple(
                        (f"{percent}%", *(f"{_quantile(one.silence_s, percent):.3f}" for one in found.values()))
                        for percent in (0, 25, 50, 75, 90, 100)
                    ),
                ),
            ),
        )

    async def _rounds(self, way: str, note: Note) -> _Found:
        rng, found, heard = Random(self.seed), _Found(), dict[int, list[float]]()
        start, executor = self._engine(way, heard)
        engine = await start.start()
        try:
            busy = await _begin_long(engine)
            stream = asyncio.create_task(_keep_busy(engine, 2 * self.workers, found))
            for number in range(1, self.rounds + 1):
                await until(lambda: engine.status.health().num_devices_up == self.workers and not executor.alone)
                if stream.done():
                    stream.result()
                await self._round(rng, busy, executor, heard, found)
                if not number % 10:
                    note(f"{way}: {number} rounds, median {_quantile(found.silence_s, 50):.3f} s")
            await until(lambda: engine.status.health().num_devices_up == self.workers)
            stream.cancel()
        finally:
            await engine.stop()
        found.num_needless = executor.num_lost - self.rounds
        return found

    async def _round(
        self, rng: Random, busy: int, executor: _Counting, heard: dict[int, list[float]], found: _Found
    ) -> None:
        others = [one for one in range(self.workers) if one != busy]
        await until(lambda: all(one in heard and time.monotonic() - heard[one][-1] < _RECENT_S for one in others))
        killed = rng.choice(others)
        pid, left = executor.pids.get(str(killed)), [one for one in others if one != killed]
        assert pid is not None
        heard.clear()
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        await until(lambda: killed not in executor.devices_up)
        await until(lambda: executor.alone in ((), (killed,)))
        found.linked_s.append(time.monotonic() - killed_s)
        await asyncio.sleep(max(0.0, killed_s + _WATCHED_S - time.monotonic()))
        found.silence_s.append(max(_longest((killed_s, *heard.get(one, ()), time.monotonic())) for one in left))

    def _engine(self, way: str, heard: dict[int, list[float]]) -> tuple[EngineStart, _Counting]:
        rows = tuple(
            CostRow(pipeline="simulated", stage=stage, height=side, width=side, seconds=seconds)
            for side in (_SMALL, _LARGE)
            for stage, seconds in (
                ("encode", 0.001),
                ("diffuse", _STEP_S),
                ("decode", _LONG_S if side == _LARGE else 0.001),
            )
        )
        table = CostTable(hardware="simulated devices", rows=rows, steps=_STEPS)
        source = SimulatedSource(pipeline="simulated", hardware=table.hardware, steps=_STEPS, rows=rows)
        config = LocalConfig(
            num_workers=self.workers, sources=(source,), collectives=way, restart_delay_s=0.05, max_restarts=10_000
        )
        executor = _Counting(config, heard)
        controller = ControllerConfig(policy="fixed-sp1", max_attempts=1000)
        return EngineStart(EngineConfig(controller=controller, table=table), executor), executor


@dataclass(slots=True)
class _Found:
    silence_s: list[float] = field(default_factory=list)
    linked_s: list[float] = field(default_factory=list)
    num_needless: int = 0
    num_failed: int = 0


class _Counting(LocalExecutor):
    """Counts the workers that were lost, and notes when a device has reported a step or the end of a work."""

    def __init__(self, config: LocalConfig, heard: dict[int, list[float]]) -> None:
        super().__init__(config)
        self._heard = heard
        self.num_lost = 0

    def _pass_on(self, device_id: int, worker_id: int, report: Report) -> None:
        if isinstance(report, Progress | Ended):
            self._heard.setdefault(device_id, []).append(time.monotonic())
        super()._pass_on(device_id, worker_id, report)

    def _on_exit(self, device_id: int, reason: str) -> None:
        self.num_lost += not self._stopping
        super()._on_exit(device_id, reason)


def _submit(engine: Engine, uid: str, side: int, steps: int) -> Ticket:
    spec = Spec(prompt="", height=side, width=side, steps=steps, guidance_scale=1.0, seed=0)
    answer = engine.submit({uid: spec})
    if not isinstance(answer, tuple):
        raise CaseFailed(f"a request was refused: {answer.reason}")
    return answer[0]


async def _begin_long(engine: Engine) -> int:
    """Let a device decode without end; returns it."""
    _submit(engine, "long", _LARGE, 1)

    def decoding() -> list[int]:
        devices = engine._controller.tracker.devices
        return [one.device_id for one in devices if one.works and one.works[0].stage.name == "decode"]

    await until(lambda: bool(decoding()))
    return decoding()[0]


async def _keep_busy(engine: Engine, num: int, found: _Found) -> None:
    """Keep this number of requests running."""
    number = 0

    async def one_after_another(place: int) -> None:
        nonlocal number
        while True:
            number += 1
            outcome = await _submit(engine, f"{place}-{number}", _SMALL, _STEPS).outcome
            found.num_failed += outcome.status not in (Status.DONE, Status.CANCELLED)

    await asyncio.gather(*(one_after_another(place) for place in range(num)))


def _longest(times_s: Sequence[float]) -> float:
    return max(after - before for before, after in pairwise(times_s))


def _quantile(values: list[float], percent: int) -> float:
    return sorted(values)[(len(values) - 1) * percent // 100]
