"""Worker processes of this machine, one per device: started together, restarted when lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tilework.comm.rendezvous import Rendezvous
from tilework.core.cost_row import Batch, CostRow
from tilework.core.model import ModelInfo, Source
from tilework.core.wire import (
    BreakGroup,
    Calibrate,
    Calibrated,
    CloseGroup,
    Ended,
    EnterNode,
    GroupRef,
    Loaded,
    LoadFailed,
    Report,
    Site,
    StateBlob,
)
from tilework.core.work import Group
from tilework.cost.profile import ProfileKey
from tilework.runtime.costs import profile_key
from tilework.runtime.groups import GroupTable
from tilework.runtime.state_blobs import StateBlobDirectory
from tilework.runtime.worker_process import Outgoing, WorkerProcess

_log = logging.getLogger(__name__)


class WorkerStartFailed(RuntimeError):
    """No worker could be started; the message says why."""


class Listener(Protocol):
    """Receives the reports of an executor, always on the event loop's thread."""

    def on_loading(self, num_ready: int) -> None:
        """While the devices start: so many have loaded the model."""

    def on_report(self, device_id: int, report: Report) -> None: ...
    def on_lost(self, device_id: int, reason: str) -> None: ...
    def on_joined(self, device_id: int) -> None: ...
    def on_given_up(self) -> None:
        """The last device is lost and will not come back."""


class Executor(Protocol):
    """Carries commands to devices, first in, first out per device."""

    @property
    def num_devices(self) -> int: ...
    @property
    def profile_key(self) -> ProfileKey:
        """Under what circumstances the devices work; known once they are up."""

    async def start(self, listener: Listener) -> ModelInfo:
        """Bring every device up. Raises WorkerStartFailed."""

    async def calibrate(
        self, batches: tuple[Batch, ...], degree: int = 1, num_runs: int | None = None
    ) -> tuple[CostRow, ...]:
        """Measure on all devices at the same time, in groups of `degree`. Raises WorkerStartFailed."""

    def pid(self, device_id: int) -> int | None:
        """Process id of a device's worker; None while there is none."""

    def send(self, device_id: int, outgoing: Outgoing) -> None: ...
    def group(self, devices: Group) -> GroupRef:
        """The group of these devices, for commands that are sent next."""

    def break_off(self, ref: GroupRef) -> None:
        """End a group, one member of which does not continue with the others."""

    def kill(self, device_id: int, reason: str) -> None:
        """End a device's worker, whatever it does; its loss, with this reason, follows."""

    def inherit(self, blobs: Collection[StateBlob]) -> set[StateBlob]:
        """Take over the blobs of a former server; returns those that still exist and fit the model.

        Call it once, before any blob is written; all other blobs of that server are removed.
        """

    def discard(self, blob: StateBlob) -> None:
        """Remove a blob that is no longer needed."""

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """`max_restarts`: how often in a row a worker may die before it has loaded its model, until it is given up.

    One that dies is started again after `restart_delay_s`; from the third time on that it had not finished a work,
    after twice as long each time, up to `max_delay_s`: a broken device is not to disturb one request after another.
    `owner` is the directory of a durable server: what its workers have put down when it ends is for its next start.
    """

    num_workers: int
    source: Source
    restart_delay_s: float = 0.5
    max_delay_s: float = 30.0
    max_restarts: int = 6
    start_timeout_s: float = 600.0
    stop_grace_s: float = 5.0
    owner: Path | None = None


class LocalExecutor:
    """An `Executor` of forkserver processes on this machine."""

    def __init__(self, config: LocalConfig) -> None:
        self._config = config
        self._workers: dict[int, WorkerProcess] = {}
        self._failed_starts: dict[int, int] = {}
        self._deaths: dict[int, int] = {}  # In a row, without a work between them.
        self._restarting: set[int] = set()
        self._up: set[int] = set()
        self._loaded: dict[int, asyncio.Future[Loaded]] = {}
        self._calibrated: dict[int, asyncio.Future[tuple[CostRow, ...]]] = {}
        self._groups = GroupTable()
        self._resources = ExitStack()
        self._stopping = False

    @property
    def num_devices(self) -> int:
        return self._config.num_workers

    @property
    def profile_key(self) -> ProfileKey:
        return self._key

    def pid(self, device_id: int) -> int | None:
        worker = self._workers.get(device_id)
        return None if worker is None else worker.pid

    async def start(self, listener: Listener) -> ModelInfo:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._blobs = self._resources.enter_context(closing(StateBlobDirectory(owner=self._config.owner)))
        self._rendezvous = self._resources.enter_context(closing(Rendezvous(self._blobs.path)))
        devices = range(self._config.num_workers)
        self._loaded = {device_id: self._loop.create_future() for device_id in devices}
        for device_id in devices:
            self._spawn(device_id)
        timeout_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                loaded = await asyncio.gather(*self._loaded.values())
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
        self, batches: tuple[Batch, ...], degree: int = 1, num_runs: int | None = None
    ) -> tuple[CostRow, ...]:
        up = sorted(self._up)
        groups = [tuple(up[first : first + degree]) for first in range(0, len(up) - degree + 1, degree)]
        self._calibrated = {device_id: self._loop.create_future() for group in groups for device_id in group}
        refs = {group: None if degree == 1 else self.group(group) for group in groups}
        for group, ref in refs.items():
            for device_id in group:
                self.send(device_id, Calibrate(batches, ref, num_runs))
        await asyncio.gather(*self._calibrated.values())
        for group, ref in refs.items():
            if ref is not None and any(len(self._calibrated[device_id].result()) < len(batches) for device_id in group):
                self.break_off(ref)  # A member that could not run a shape has left the others.
        return tuple(row for future in self._calibrated.values() for row in future.result())

    def send(self, device_id: int, outgoing: Outgoing) -> None:
        """To one that is lost nothing is sent; what it was to do has been, or is about to be, taken back."""
        if device_id in self._workers:
            self._workers[device_id].send(outgoing)

    def kill(self, device_id: int, reason: str) -> None:
        if device_id in self._workers:
            self._workers[device_id].kill(reason)

    def group(self, devices: Group) -> GroupRef:
        ref, closed = self._groups.use(devices)
        for old in closed:
            self._tell(old, CloseGroup(old.group_id))
        return ref

    def break_off(self, ref: GroupRef) -> None:
        if self._groups.break_off(ref):
            self._break(ref)
            self._meet()  # On GPUs this has ended the communicator of the whole node.

    def _break(self, ref: GroupRef) -> None:
        """What is under way in the group ends now; behind what was queued for it, it is forgotten."""
        self._tell(ref, BreakGroup(ref.group_id))
        self._tell(ref, CloseGroup(ref.group_id))

    def _tell(self, ref: GroupRef, command: BreakGroup | CloseGroup) -> None:
        for device_id in ref.devices:
            self.send(device_id, command)

    def inherit(self, blobs: Collection[StateBlob]) -> set[StateBlob]:
        key = self._key
        return self._blobs.inherit(blobs, f"{key.model}, {key.dtype}, {key.libraries}")

    def discard(self, blob: StateBlob) -> None:
        self._blobs.discard(blob)

    async def stop(self) -> None:
        self._stopping = True
        grace_s = self._config.stop_grace_s
        await asyncio.gather(*(worker.close(grace_s) for worker in self._workers.values()))
        self._workers.clear()
        self._resources.close()

    def _spawn(self, device_id: int) -> WorkerProcess:
        """Starts a process; its first message is Loaded or LoadFailed."""
        site = Site(device_id=device_id, blobs=str(self._blobs.path), rendezvous=self._rendezvous.address)
        worker = self._workers[device_id] = WorkerProcess(
            site, self._config.source, partial(self._report, device_id), partial(self._exited, device_id)
        )
        return worker

    def _report(self, device_id: int, report: Report) -> None:
        match report:
            case Loaded():
                self._on_loaded(device_id, report)
            case LoadFailed(reason):
                self._workers[device_id].explain(reason)
            case Calibrated(rows):
                if not self._calibrated[device_id].done():  # Nothing waits any more if the caller was cancelled.
                    self._calibrated[device_id].set_result(rows)
            case _:
                if isinstance(report, Ended):
                    self._deaths.pop(device_id, None)
                    for blob in report.blobs.values():
                        self._blobs.know(blob)
                self._listener.on_report(device_id, report)

    def _on_loaded(self, device_id: int, loaded: Loaded) -> None:
        self._failed_starts[device_id] = 0
        self._up.add(device_id)
        if self._loaded[device_id].done():
            self._meet()
            self._listener.on_joined(device_id)
        else:
            self._loaded[device_id].set_result(loaded)
            self._listener.on_loading(len(self._up))

    def _meet(self) -> None:
        """Let the workers that are up form the communicator of which GPUs' groups are parts."""
        if self._config.source.device != "cuda" or len(self._up) < 2:
            return
        node = self._groups.unique(tuple(sorted(self._up)))
        for device_id in node.devices:
            self.send(device_id, EnterNode(node))

    def _exited(self, device_id: int, reason: str) -> None:
        if self._stopping:
            return
        self._blobs.sweep(device_id, self._workers.pop(device_id).pid)
        self._fail_start(WorkerStartFailed(f"worker {device_id} ended before it could serve: {reason}"))
        self._up.discard(device_id)
        for ref in self._groups.break_with(device_id):
            self._break(ref)
        self._meet()
        self._listener.on_lost(device_id, reason)
        if not self._stopping:
            self._start_again(device_id, reason)

    def _fail_start(self, error: WorkerStartFailed) -> None:
        """A server begins with all its workers, or not at all: then the start fails, and no worker is started again."""
        awaited: list[asyncio.Future[Any]] = [*self._loaded.values(), *self._calibrated.values()]
        for future in awaited:
            if not future.done():
                self._stopping = True
                future.set_exception(error)

    def _start_again(self, device_id: int, reason: str) -> None:
        failed, deaths = self._failed_starts.get(device_id, 0) + 1, self._deaths.get(device_id, 0) + 1
        self._failed_starts[device_id], self._deaths[device_id] = failed, deaths
        if failed > self._config.max_restarts:
            _log.error("worker %d was lost: %s; it is given up", device_id, reason)
            if not self._workers and not self._restarting:
                self._listener.on_given_up()
            return
        delay_s = min(self._config.restart_delay_s * 2 ** max(0, deaths - 2), self._config.max_delay_s)
        _log.warning("worker %d was lost: %s; it is started again in %g s", device_id, reason, delay_s)
        self._restarting.add(device_id)
        self._loop.call_later(delay_s, self._respawn, device_id)

    def _respawn(self, device_id: int) -> None:
        self._restarting.discard(device_id)
        if not self._stopping:
            self._loop.call_later(self._config.start_timeout_s, self._expire, device_id, self._spawn(device_id))

    def _expire(self, device_id: int, worker: WorkerProcess) -> None:
        if self._workers.get(device_id) is worker and device_id not in self._up:
            worker.kill(f"it did not load within {self._config.start_timeout_s:g} s")
