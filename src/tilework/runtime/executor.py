"""Worker processes of this machine, one per device: started together, restarted when lost."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tilework.core.request import Shape
from tilework.core.wire import Calibrate, Calibrated, CostRow, Loaded, LoadFailed, ModelInfo, ModelSource, Report
from tilework.runtime.worker_process import Outgoing, WorkerProcess

_log = logging.getLogger(__name__)


class WorkerStartFailed(RuntimeError):
    """No worker could be started; the message says why."""


class Listener(Protocol):
    """Whom an executor tells; always on the event loop's thread."""

    def on_report(self, gpu: int, report: Report) -> None: ...
    def on_lost(self, gpu: int, reason: str) -> None: ...
    def on_joined(self, gpu: int) -> None: ...
    def on_given_up(self) -> None:
        """The last device is lost and will not come back."""


class Executor(Protocol):
    """Carries commands to devices, first in, first out per device."""

    @property
    def num_gpus(self) -> int: ...
    async def start(self, listener: Listener) -> ModelInfo:
        """Bring every device up. Raises WorkerStartFailed."""

    async def calibrate(self, shapes: tuple[Shape, ...]) -> tuple[CostRow, ...]: ...
    def send(self, gpu: int, outgoing: Outgoing) -> None: ...
    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """`max_restarts`: how often in a row a worker may die before it has loaded its model, until it is given up."""

    num_workers: int
    source: ModelSource
    restart_delay_s: float = 0.5
    max_restarts: int = 3
    start_timeout_s: float = 600.0
    stop_grace_s: float = 5.0


class LocalExecutor:
    """An `Executor` of forkserver processes on this machine."""

    def __init__(self, config: LocalConfig) -> None:
        self._config = config
        self._workers: dict[int, WorkerProcess] = {}
        self._failed_starts: dict[int, int] = {}
        self._restarting: set[int] = set()
        self._loaded: dict[int, asyncio.Future[ModelInfo]] = {}
        self._calibrated: dict[int, asyncio.Future[tuple[CostRow, ...]]] = {}
        self._stopping = False

    @property
    def num_gpus(self) -> int:
        return self._config.num_workers

    def pid(self, gpu: int) -> int | None:
        """Process id of a device's worker, for tests and operators."""
        worker = self._workers.get(gpu)
        return None if worker is None else worker.pid

    async def start(self, listener: Listener) -> ModelInfo:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        gpus = range(self._config.num_workers)
        self._loaded = {gpu: self._loop.create_future() for gpu in gpus}
        for gpu in gpus:
            self._spawn(gpu)
        timeout_s = self._config.start_timeout_s
        try:
            infos = await asyncio.wait_for(asyncio.gather(*self._loaded.values()), timeout_s)
        except TimeoutError:
            await self.stop()
            raise WorkerStartFailed(f"the workers did not load within {timeout_s:g} s") from None
        except WorkerStartFailed:
            await self.stop()
            raise
        return infos[0]

    async def calibrate(self, shapes: tuple[Shape, ...]) -> tuple[CostRow, ...]:
        """Warm all workers up at the same time, as they will run, and gather what they measured."""
        self._calibrated = {gpu: self._loop.create_future() for gpu in self._workers}
        for gpu in self._workers:
            self.send(gpu, Calibrate(shapes))
        rows = await asyncio.gather(*self._calibrated.values())
        return tuple(row for part in rows for row in part)

    def send(self, gpu: int, outgoing: Outgoing) -> None:
        self._workers[gpu].send(outgoing)

    async def stop(self) -> None:
        self._stopping = True
        grace_s = self._config.stop_grace_s
        await asyncio.gather(*(asyncio.to_thread(worker.close, grace_s) for worker in self._workers.values()))
        self._workers.clear()

    def _spawn(self, gpu: int) -> None:
        """Starts a process; its first message is Loaded or LoadFailed."""

        self._workers[gpu] = WorkerProcess(
            gpu, self._config.source, partial(self._report, gpu), partial(self._exited, gpu)
        )

    def _report(self, gpu: int, report: Report) -> None:
        match report:
            case Loaded(info, _):
                self._on_loaded(gpu, info)
            case LoadFailed(reason):
                self._fail_start(gpu, reason)
            case Calibrated(rows):
                self._calibrated[gpu].set_result(rows)
            case _:
                self._listener.on_report(gpu, report)

    def _on_loaded(self, gpu: int, info: ModelInfo) -> None:
        self._failed_starts[gpu] = 0
        if self._loaded[gpu].done():
            self._listener.on_joined(gpu)
        else:
            self._loaded[gpu].set_result(info)

    def _exited(self, gpu: int, reason: str) -> None:
        if self._stopping:
            return
        del self._workers[gpu]
        self._fail_start(gpu, f"worker {gpu} ended while it loaded the model: {reason}")
        calibrating = self._calibrated.get(gpu)
        if calibrating is not None and not calibrating.done():
            calibrating.set_exception(WorkerStartFailed(f"worker {gpu} ended during calibration: {reason}"))
        self._listener.on_lost(gpu, reason)
        self._failed_starts[gpu] = self._failed_starts.get(gpu, 0) + 1
        again = self._failed_starts[gpu] <= self._config.max_restarts
        _log.warning("worker %d was lost: %s; %s", gpu, reason, "starting it again" if again else "giving it up")
        if again:
            self._restarting.add(gpu)
            self._loop.call_later(self._config.restart_delay_s, self._respawn, gpu)
        elif not self._workers and not self._restarting:
            self._listener.on_given_up()

    def _respawn(self, gpu: int) -> None:
        self._restarting.discard(gpu)
        if not self._stopping:
            self._spawn(gpu)

    def _fail_start(self, gpu: int, reason: str) -> None:
        if not self._loaded[gpu].done():
            self._loaded[gpu].set_exception(WorkerStartFailed(reason))
