"""How soon the survivors are free when a member is killed while its group forms."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.stats import bootstrap, exact
from suite.waiting import until
from tilework.control.controller import ControllerConfig
from tilework.core.cost_row import CostRow
from tilework.core.model import SimulatedSource
from tilework.core.wire.spec import Spec
from tilework.cost.table import CostTable
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.observer import EndedWork, Observer

_PATIENCE_S = 120.0
_SIDE, _STEPS, _STEP_S = 512, 10, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Forming:
    """Groups of all `workers`; in each of `rounds` one member is killed while the group forms.

    Forming takes 1 to 2 ms, too short to be hit. So a member is stopped first, and goes on when the others wait for it;
    another one, or the same, is killed within `spread_s` before or after that. A round in which the group was formed
    by then is not counted, and another one takes its place.
    """

    rounds: int = 60
    workers: int = 4
    spread_s: float = 0.003
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Forming:
        return cls(rounds=8) if quick else cls()

    def measure(self, note: Note) -> Finding:
        return asyncio.run(self._measure(note))

    async def _measure(self, note: Note) -> Finding:
        rounds, rng, watch = 0, Random(self.seed), _Watch()
        start, executor = self._engine()
        engine = await start.start(watch)
        free_s: list[float] = []
        try:
            while len(free_s) < self.rounds:
                rounds += 1
                took_s = await _round(str(rounds), rng, self, engine, executor, watch)
                if took_s is not None:
                    free_s.append(took_s)
                    if not len(free_s) % 10:
                        note(f"{len(free_s)} rounds, median {sorted(free_s)[len(free_s) // 2]:.3f} s")
        finally:
            await engine.stop()
        needless = watch.num_lost - rounds
        return Finding(
            checks=(
                Check(
                    what="from the kill until all survivors are free, median",
                    measured=bootstrap(free_s, self.seed),
                    high=2,
                    unit="s",
                ),
                Check(what="the longest", measured=exact(max(free_s)), high=5, unit="s"),
                Check(what="workers lost that were not killed", measured=exact(needless), high=0),
            ),
            method=(
                f"{self.workers} simulated devices with real processes and real groups; each round is a new "
                f"request on all of them, which needs a new group.",
                f"One member is stopped and goes on when others have come to the rendezvous; within "
                f"{1000 * self.spread_s:g} ms before or after, a member is killed with SIGKILL.",
                f"{rounds} rounds; those in which the group had formed before the kill are left out.",
                "Intervals: 95% bootstrap of the median.",
            ),
            tables=(
                Table(
                    title="Seconds until the survivors are free",
                    columns=("quantile", "s"),
                    rows=tuple(
                        (f"{percent}%", f"{sorted(free_s)[(len(free_s) - 1) * percent // 100]:.3f}")
                        for percent in (0, 25, 50, 75, 90, 100)
                    ),
                ),
            ),
        )

    def _engine(self) -> tuple[EngineStart, LocalExecutor]:
        rows = tuple(
            CostRow(pipeline="simulated", stage="diffuse", height=_SIDE, width=_SIDE, degree=degree, seconds=_STEP_S)
            for degree in (1, 2, 4, 8)
            if degree <= self.workers
        )
        rows += tuple(
            CostRow(pipeline="simulated", stage=stage, height=_SIDE, width=_SIDE, seconds=0.001)
            for stage in ("encode", "decode")
        )
        table = CostTable(hardware="simulated devices", rows=rows, steps=_STEPS)
        source = SimulatedSource(pipeline="simulated", hardware=table.hardware, steps=_STEPS, rows=rows)
        executor = LocalExecutor(
            LocalConfig(num_workers=self.workers, sources=(source,), restart_delay_s=0.05, max_restarts=10_000)
        )
        config = EngineConfig(
            controller=ControllerConfig(policy=f"fixed-sp{self.workers}", max_attempts=100), table=table
        )
        return EngineStart(config, executor), executor


@dataclass(slots=True)
class _Watch(Observer):
    """Counts lost workers and ended works of groups; stops a process of `to_stop` when its request ends a stage."""

    num_lost: int = 0
    num_ended: int = 0
    to_stop: dict[str, int] = field(default_factory=dict)

    def on_lost(self, device_id: int) -> None:
        self.num_lost += 1

    def on_work_ended(self, ended: EndedWork) -> None:
        self.num_ended += len(ended.work.devices) > 1
        for request in ended.requests:
            if pid := self.to_stop.pop(request.uid, None):  # It is encoded, and its group forms next.
                os.kill(pid, signal.SIGSTOP)


async def _round(
    uid: str, rng: Random, case: Forming, engine: Engine, executor: LocalExecutor, watch: _Watch
) -> float | None:
    """Seconds from the kill until no survivor has the work any more; None if the group had formed before."""
    await until(lambda: engine.status.health().num_devices_up == case.workers)
    place = Path(executor._rendezvous.address)
    known = set(place.iterdir())
    stopped, killed = (_pid(executor, rng.randrange(case.workers)) for _ in range(2))
    watch.to_stop = {uid: stopped}
    answer = engine.submit({uid: Spec(prompt="", height=_SIDE, width=_SIDE, steps=_STEPS, guidance_scale=1.0, seed=0)})
    if not isinstance(answer, tuple):
        raise CaseFailed(f"a request was refused: {answer.reason}")
    (ticket,) = answer
    await until(lambda: not watch.to_stop and any(list(path.glob("member-?")) for path in _new(place, known)))
    meeting = max(_new(place, known), key=lambda path: int(path.name))
    early_s = rng.uniform(-case.spread_s, case.spread_s)
    if early_s < 0:
        os.kill(stopped, signal.SIGCONT)
        await asyncio.sleep(-early_s)
    is_forming, num_ended = meeting.exists(), watch.num_ended
    os.kill(killed, signal.SIGKILL)
    killed_s = time.monotonic()
    if early_s >= 0:
        await asyncio.sleep(early_s)
        with suppress(ProcessLookupError):  # It may be the one that was killed.
            os.kill(stopped, signal.SIGCONT)
    await until(lambda: watch.num_ended > num_ended)
    took_s = time.monotonic() - killed_s
    engine.cancel(uid, "the round is over")  # Tried again, it would form the group that the next round is to form.
    await asyncio.wait_for(ticket.outcome, _PATIENCE_S)
    return took_s if is_forming else None


def _new(place: Path, known: set[Path]) -> set[Path]:
    return set(place.iterdir()) - known


def _pid(executor: LocalExecutor, device_id: int) -> int:
    pid = executor.pids.get(str(device_id))
    assert pid is not None
    return pid
