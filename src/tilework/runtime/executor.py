"""Worker processes of this machine, one per device: started together, restarted when lost."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tilework.comm.rendezvous import Rendezvous
from tilework.core.request import Shape
from tilework.core.wire import (
    BreakGroup,
    Calibrate,
    Calibrated,
    CloseGroup,
    CostRow,
    Ended,
    EnterNode,
    GroupRef,
    Loaded,
    LoadFailed,
    ModelInfo,
    Parcel,
    Report,
    Site,
    Source,
)
from tilework.core.work import Group
from tilework.cost.profiles import ProfileKey
from tilework.runtime.costs import profile_key
from tilework.runtime.groups import GroupTable
from tilework.runtime.parcels import ParcelDirectory
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
    @property
    def profile_key(self) -> ProfileKey:
        """Under what circumstances the devices work; known once they are up."""

    async def start(self, listener: Listener) -> ModelInfo:
        """Bring every device up. Raises WorkerStartFailed."""

    async def calibrate(
        self, shapes: tuple[Shape, ...], degree: int = 1, num_runs: int | None = None
    ) -> tuple[CostRow, ...]:
        """Measure on all devices at the same time, in groups of `degree`. Raises WorkerStartFailed."""

    def pid(self, gpu: int) -> int | None:
        """Process id of a device's worker; None while there is none."""

    def send(self, gpu: int, outgoing: Outgoing) -> None: ...
    def group(self, gpus: Group) -> GroupRef:
        """The group of these devices, for commands that are sent next."""

    def break_off(self, ref: GroupRef) -> None:
        """End a group of which a member does not go on as the others do."""

    def discard(self, parcel: Parcel) -> None:
        """Remove what nobody needs any more."""

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """`max_restarts`: how often in a row a worker may die before it has loaded its model, until it is given up."""

    num_workers: int
    source: Source
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
        self._up: set[int] = set()
        self._loaded: dict[int, asyncio.Future[Loaded]] = {}
        self._calibrated: dict[int, asyncio.Future[tuple[CostRow, ...]]] = {}
        self._groups = GroupTable()
        self._resources = ExitStack()
        self._stopping = False

    @property
    def num_gpus(self) -> int:
        return self._config.num_workers

    @property
    def profile_key(self) -> ProfileKey:
        return self._key

    def pid(self, gpu: int) -> int | None:
        worker = self._workers.get(gpu)
        return None if worker is None else worker.pid

    async def start(self, listener: Listener) -> ModelInfo:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._parcels = self._resources.enter_context(closing(ParcelDirectory()))
        self._rendezvous = self._resources.enter_context(closing(Rendezvous(self._parcels.path)))
        gpus = range(self._config.num_workers)
        self._loaded = {gpu: self._loop.create_future() for gpu in gpus}
        for gpu in gpus:
            self._spawn(gpu)
        timeout_s = self._config.start_timeout_s
        try:
            loaded = await asyncio.wait_for(asyncio.gather(*self._loaded.values()), timeout_s)
        except TimeoutError:
            await self.stop()
            raise WorkerStartFailed(f"the workers did not load within {timeout_s:g} s") from None
        except WorkerStartFailed:
            await self.stop()
            raise
        self._key = profile_key(self._config.source, self._config.num_workers, loaded[0])
        self._meet()
        return loaded[0].info

    async def calibrate(
        self, shapes: tuple[Shape, ...], degree: int = 1, num_runs: int | None = None
    ) -> tuple[CostRow, ...]:
        up = sorted(self._up)
        groups = [tuple(up[first : first + degree]) for first in range(0, len(up) - degree + 1, degree)]
        self._calibrated = {gpu: self._loop.create_future() for group in groups for gpu in group}
        refs = {group: None if degree == 1 else self.group(group) for group in groups}
        for group, ref in refs.items():
            for gpu in group:
                self.send(gpu, Calibrate(shapes, ref, num_runs))
        await asyncio.gather(*self._calibrated.values())
        for group, ref in refs.items():
            if ref is not None and any(len(self._calibrated[gpu].result()) < len(shapes) for gpu in group):
                self.break_off(ref)  # A member that could not run a shape has left the others.
        return tuple(row for future in self._calibrated.values() for row in future.result())

    def send(self, gpu: int, outgoing: Outgoing) -> None:
        self._workers[gpu].send(outgoing)

    def group(self, gpus: Group) -> GroupRef:
        ref, closed = self._groups.use(gpus)
        for old in closed:
            self._tell(old, CloseGroup(old.group_id))
        return ref

    def break_off(self, ref: GroupRef) -> None:
        if self._groups.break_off(ref):
            self._break(ref)

    def _break(self, ref: GroupRef) -> None:
        """What is under way in the group ends now; behind what was queued for it, it is forgotten."""
        self._tell(ref, BreakGroup(ref.group_id))
        self._tell(ref, CloseGroup(ref.group_id))

    def _tell(self, ref: GroupRef, command: BreakGroup | CloseGroup) -> None:
        for gpu in ref.gpus:
            if gpu in self._workers:
                self.send(gpu, command)

    def discard(self, parcel: Parcel) -> None:
        self._parcels.discard(parcel)

    async def stop(self) -> None:
        self._stopping = True
        grace_s = self._config.stop_grace_s
        await asyncio.gather(*(asyncio.to_thread(worker.close, grace_s) for worker in self._workers.values()))
        self._workers.clear()
        self._resources.close()

    def _spawn(self, gpu: int) -> None:
        """Starts a process; its first message is Loaded or LoadFailed."""

        site = Site(gpu=gpu, parcels=str(self._parcels.path), rendezvous=self._rendezvous.address)
        self._workers[gpu] = WorkerProcess(
            site, self._config.source, partial(self._report, gpu), partial(self._exited, gpu)
        )

    def _report(self, gpu: int, report: Report) -> None:
        match report:
            case Loaded():
                self._on_loaded(gpu, report)
            case LoadFailed(reason):
                self._fail_start(gpu, reason)
            case Calibrated(rows):
                self._calibrated[gpu].set_result(rows)
            case _:
                if isinstance(report, Ended) and report.parcel is not None:
                    self._parcels.know(report.parcel)
                self._listener.on_report(gpu, report)

    def _on_loaded(self, gpu: int, loaded: Loaded) -> None:
        self._failed_starts[gpu] = 0
        self._up.add(gpu)
        if self._loaded[gpu].done():
            self._meet()
            self._listener.on_joined(gpu)
        else:
            self._loaded[gpu].set_result(loaded)

    def _meet(self) -> None:
        """Let the workers that are up form the communicator of which GPUs' groups are parts."""
        if self._config.source.device != "cuda" or len(self._up) < 2:
            return
        node = self._groups.unique(tuple(sorted(self._up)))
        for gpu in node.gpus:
            self.send(gpu, EnterNode(node))

    def _exited(self, gpu: int, reason: str) -> None:
        if self._stopping:
            return
        self._parcels.sweep(gpu, self._workers.pop(gpu).pid)
        self._fail_start(gpu, f"worker {gpu} ended while it loaded the model: {reason}")
        calibrating = self._calibrated.get(gpu)
        if calibrating is not None and not calibrating.done():
            calibrating.set_exception(WorkerStartFailed(f"worker {gpu} ended during calibration: {reason}"))
        self._up.discard(gpu)
        for ref in self._groups.break_with(gpu):
            self._break(ref)
        self._meet()
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
