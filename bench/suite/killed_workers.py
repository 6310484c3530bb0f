"""An engine whose workers are killed under load, and the outcomes of its requests."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from suite.case import CaseFailed
from tilework.core.actions import RunWork
from tilework.core.model import ModelSource
from tilework.core.time import s_from_ns
from tilework.core.wire.reports import Ended, Ending, Progress, Report
from tilework.core.wire.spec import Spec
from tilework.core.work import Work
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.executor import WorkerStartFailed
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.observer import EndedWork, Observer
from tilework.runtime.ticket import Outcome, Ticket


@dataclass(slots=True, kw_only=True, eq=False)
class Kill:
    """A worker that was killed; times are seconds on the engine's clock.

    `victim` is the request whose work it ran, if it ran one, and `redone` how many of its steps had been reported that
    have to be done again. `resumed_s` is when the first step after that was reported, or the work that it was in.
    """

    device_id: int
    at_s: float
    known_s: float | None = None
    victim: Ticket | None = None
    redone: int = 0
    given_s: float | None = None
    resumed_s: float | None = None


class _Watched(LocalExecutor):
    """Passes every report on before it is handled."""

    def __init__(self, config: LocalConfig) -> None:
        super().__init__(config)
        self.on_heard: Callable[[Report], None] = lambda _report: None

    def _pass_on(self, device_id: int, worker_id: int, report: Report) -> None:
        self.on_heard(report)
        super()._pass_on(device_id, worker_id, report)


class KillingDriver(Observer):
    """Drives the engine: `draw` for requests, `kill` for workers."""

    def __init__(self, engine: Engine, executor: _Watched) -> None:
        self._engine, self._executor = engine, executor
        engine.observe(self)
        executor.on_heard = self._heard
        self._tickets: dict[str, Ticket] = {}
        self._progress: dict[int, int] = {}
        self.kills: list[Kill] = []
        self.num_submitted = self.num_restarts = self.num_losses = 0
        self.ends: Counter[str] = Counter()

    async def draw(self, spec: Spec) -> Outcome:
        """One request, from its submission to its end. Raises CaseFailed if it is refused."""
        uid = str(self.num_submitted)
        self.num_submitted += 1
        answer = self._engine.submit({uid: spec})
        if not isinstance(answer, tuple):
            raise CaseFailed(f"a request was refused: {answer.reason}")
        (self._tickets[uid],) = answer
        outcome = await answer[0].outcome
        del self._tickets[uid]
        return outcome

    @property
    def all_up(self) -> bool:
        """Whether every worker that was killed is known to be lost, and back."""
        health = self._engine.status.health()
        return self.num_losses == len(self.kills) and health.num_devices_up == health.num_devices

    def kill(self, device_id: int) -> None:
        pid = self._executor.pids.get(str(device_id))
        assert pid is not None, f"worker {device_id} is not up"
        self.kills.append(Kill(device_id=device_id, at_s=self._now_s()))
        os.kill(pid, signal.SIGKILL)

    def _now_s(self) -> float:
        return s_from_ns(self._engine.now_ns())

    # For the engine.

    def on_joined(self, device_id: int, now_ns: int) -> None:
        self.num_restarts += 1

    def on_lost(self, device_id: int) -> None:
        self.num_losses += 1

    def on_ended(self, ticket: Ticket, outcome: Outcome) -> None:
        self.ends[outcome.uid] += 1

    def on_work_ended(self, ended: EndedWork) -> None:
        """The first that is lost with a worker is the one that it ran."""
        done = self._progress.pop(ended.work.work_id, 0)
        if ended.ending is not Ending.LOST:
            return
        kill = next(kill for kill in reversed(self.kills) if kill.device_id in ended.work.devices)
        if kill.victim is None:
            kill.known_s, kill.redone = self._now_s(), done
            kill.victim = self._tickets[ended.requests[0].uid]

    def _heard(self, report: Report) -> None:
        if isinstance(report, Progress):
            self._progress[report.work_id] = report.steps_done
        if not isinstance(report, Progress | Ended):
            return
        for kill in self.kills[-8:]:
            if kill.victim is not None and kill.known_s is not None and kill.resumed_s is None:
                for at_ns, work in _begun(kill.victim):
                    if work.work_id == report.work_id and s_from_ns(at_ns) >= kill.known_s:
                        kill.given_s, kill.resumed_s = s_from_ns(at_ns), self._now_s()


def _begun(ticket: Ticket) -> list[tuple[int, Work]]:
    return [(at_ns, action.work) for at_ns, action in ticket.history if isinstance(action, RunWork)]


@asynccontextmanager
async def killing_driver(workers: int) -> AsyncIterator[KillingDriver]:
    """The shipped model on so many workers of one thread, measured anew. Raises CaseFailed if they do not start."""
    executor = _Watched(LocalConfig(num_workers=workers, sources=(ModelSource(path="shapes"),)))
    try:
        engine = await EngineStart(EngineConfig(), executor).start()
    except WorkerStartFailed as error:
        raise CaseFailed(str(error)) from error
    try:
        yield KillingDriver(engine, executor)
    finally:
        await engine.stop()
