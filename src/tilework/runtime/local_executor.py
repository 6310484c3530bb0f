"""Worker processes of this machine, one per device: started together, restarted when lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from tilework.comm.rendezvous import Meeting, Rendezvous
from tilework.core.actions import ReadComponents
from tilework.core.comm import SOCKETS, USUAL_COLLECTIVES
from tilework.core.component import LoadSource
from tilework.core.cost_row import Batch, CostRow
from tilework.core.lora import Lora, UsedLora
from tilework.core.model import LoraSource, ModelInfo, ModelSource, SimulatedSource, Source
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import (
    WEIGHTS,
    Calibrate,
    GroupRef,
    RemoveLora,
    RemoveModel,
    Site,
)
from tilework.core.wire.reports import (
    Calibrated,
    DeviceReading,
    Ended,
    Loaded,
    LoadedModel,
    LoadFailed,
    LoraAdded,
    ModelAdded,
    NodeFormed,
    NotLoaded,
    Report,
    WeightsLoaded,
)
from tilework.core.work import Group
from tilework.cost.profile import ProfileKey
from tilework.runtime.executor import Listener, WorkerStartFailed, none_loaded
from tilework.runtime.links.node_groups import NodeGroups
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.models.calibration import COMPILING_S, FACTOR, LEAST_S, Calibration
from tilework.runtime.models.calibration_weights import CalibrationWeights
from tilework.runtime.models.changes import ModelChanges
from tilework.runtime.models.costs import profile_key
from tilework.runtime.models.host_reader import HostReader
from tilework.runtime.outbox import Outgoing
from tilework.runtime.state_blobs import StateBlobDirectory
from tilework.runtime.worker_process import WorkerProcess, resident_bytes_of

_log = logging.getLogger(__name__)


async def _never(error: WorkerStartFailed) -> tuple[CostRow, ...]:
    """Answer for a measurement that could not be made: raise the error."""
    raise error


class LocalExecutor:
    """An `Executor` of forkserver processes on this machine."""

    def __init__(self, config: LocalConfig) -> None:
        self._config = config
        self._sources = config.sources
        self._workers: dict[int, WorkerProcess] = {}
        self._failed_starts: dict[int, int] = {}
        self._num_bad_reports = 0
        self._deaths: dict[int, int] = {}  # Deaths without a finished work between them.
        self._restarting: set[int] = set()
        self._start_timers: dict[int, asyncio.TimerHandle] = {}  # Of the workers that are started again.
        self._up: set[int] = set()
        self._loaded: dict[int, asyncio.Future[Loaded]] = {}
        self._readings: dict[int, DeviceReading] = {}
        self._calibration: Calibration | None = None
        self._alone_s: dict[str, float] = {}  # The longest time that measuring a model on one device has taken.
        self._started_with: dict[int, tuple[Source, ...]] = {}
        self._groups = NodeGroups(self.send)
        self._resources = ExitStack()
        self._stopping = False
        self._num_slots = 0
        self._measures_beside = False  # The present measurement, or the last one, runs beside requests.
        self._infos: tuple[ModelInfo, ...] = ()  # Of the sources, once they have loaded.
        self.not_loaded: tuple[NotLoaded, ...] = ()
        self._read: dict[str, ModelInfo] = {}  # Of models that are about to be added.
        self._measuring = CalibrationWeights(config.weights_bytes)

    @property
    def num_devices(self) -> int:
        return self._config.num_workers

    @property
    def cell_size(self) -> int:
        return self._config.cell_size

    @property
    def _collectives(self) -> str:
        return self._config.collectives or USUAL_COLLECTIVES[self._config.sources[0].device]

    @property
    def devices_up(self) -> Group:
        return tuple(device_id for device_id in range(self.num_devices) if device_id in self._up)

    @property
    def slots_up(self) -> Group:
        return tuple(sorted(device_id for device_id in self._up if device_id >= self.num_devices))

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def node(self, device_id: int) -> int:
        return 0

    @property
    def blobs(self) -> StateBlobDirectory:
        """State blobs of this node, once its workers start."""
        return self._blobs

    @property
    def serving(self) -> Mapping[str, tuple[int, ...]]:
        return {
            one.name: one.devices for one in self._sources if isinstance(one, ModelSource) and one.devices is not None
        }

    @property
    def weights_bytes(self) -> int | None:
        return self._config.weights_bytes

    @property
    def host_bytes(self) -> int | None:
        if self.weights_bytes is None:
            return None
        from tilework.worker.models.room import capacity_bytes

        return capacity_bytes(self._blobs.path / WEIGHTS)

    def profile_key(self, model: str) -> ProfileKey:
        return self._keys[model]

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of the existing workers, by the names of `resident_bytes`."""
        return {str(device_id): worker.pid for device_id, worker in self._workers.items() if worker.pid is not None}

    def pid(self, device_id: int) -> int | None:
        """Return the process id of a device's worker; None while there is none."""
        worker = self._workers.get(device_id)
        return None if worker is None else worker.pid

    async def start(self, listener: Listener) -> tuple[LoadedModel, ...]:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._blobs = self._resources.enter_context(closing(StateBlobDirectory(owner=self._config.owner)))
        self._changes = ModelChanges(
            directory=self._blobs.path,
            timeout_s=self._config.start_timeout_s,
            grace_s=self._config.stop_grace_s,
            cell_size=self._config.cell_size,
            up=lambda: sorted(self._up),
            slots=lambda: range(self.num_devices, self.num_devices + self._num_slots),
            send=self.send,
        )
        self._reader = HostReader(
            directory=self._blobs.path, on_read=listener.on_read, timeout_s=self._config.start_timeout_s
        )
        self._rendezvous = self._resources.enter_context(closing(Rendezvous(self._blobs.path)))
        timeout_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                loaded = await self._spawn_all(range(self.num_devices))
                models = self._models(loaded)
                if any(one.info.graph.needs_slots for one in models):
                    self._num_slots = self._config.num_slots
                    loaded += await self._spawn_all(range(self.num_devices, self.num_devices + self._num_slots))
                    models = self._models(loaded)
                first = replace(loaded[0], models=models)
        except TimeoutError:
            await self.stop()
            raise WorkerStartFailed(f"the workers did not load within {timeout_s:g} s") from None
        except WorkerStartFailed:
            await self.stop()
            raise
        self._keys = {
            one.info.name: profile_key(source, self._config.num_workers, first.hardware, one)
            for one, source in zip(first.models, self._sources, strict=True)
        }
        self._sources = tuple(
            replace(source, name=one.info.name) if isinstance(source, ModelSource) else source
            for one, source in zip(first.models, self._sources, strict=True)
        )
        for source, one in zip(self._sources, first.models, strict=True):
            self._reader.know(source, one)
        self._hardware = first.hardware
        self._measuring.know(first)
        await self._form_groups()
        return first.models

    async def _form_groups(self) -> None:
        """Let the workers form their node's communicator. If it does not form, all of them are alone.

        Raises WorkerStartFailed if they are cells, which need it.
        """
        if self._collectives == SOCKETS:
            return
        self._groups.unite(
            self.devices_up,
            partial(Meeting, self._rendezvous.address),
            self._on_links_changed,
            self._loop.call_later,
            self._config.link_timeout_s,
        )
        failure = await self._groups.decided()
        if failure and self._config.cell_size > 1:
            await self.stop()
            raise WorkerStartFailed(f"the workers of a cell cannot talk to each other: {failure}")

    @property
    def alone(self) -> Group:
        return self._groups.alone(range(self.num_devices))

    @property
    def is_linking(self) -> bool:
        return self._groups.is_linking

    def _on_links_changed(self) -> None:
        if not self._stopping:
            self._listener.on_links_changed()

    def calibrate(
        self,
        model: str,
        batches: tuple[Batch, ...],
        degree: int = 1,
        num_runs: int | None = None,
        loras: tuple[UsedLora, ...] = (),
        known: frozenset[str] = frozenset(),
        devices: Group | None = None,
    ) -> Awaitable[tuple[CostRow, ...]]:
        weights = self._measuring.by_stage(model, loras)
        command = Calibrate(model, batches, None, num_runs, loras, weights, known)
        return self._calibrate_all(command, degree) if devices is None else self._calibrate_on(devices, command)

    async def _calibrate_all(self, command: Calibrate, degree: int) -> tuple[CostRow, ...]:
        """Measure on all workers that serve the model, in groups of this size."""
        self._measures_beside = False
        served = set(self.serving.get(command.model, self.devices_up)) & self._up
        up = [device_id for device_id in sorted(served) if served.issuperset(self._cell(device_id))]
        if degree > 1:
            await self._groups.decided()
            up = [device_id for device_id in up if device_id not in self.alone]
        for change in self._measuring.commands(command.model, command.loras):
            self._send_all(up, change)
        groups = [tuple(up[first : first + degree]) for first in range(0, len(up) - degree + 1, degree)]
        return await self._begin_calibration(command, groups)

    def _calibrate_on(self, devices: Group, command: Calibrate) -> Awaitable[tuple[CostRow, ...]]:
        """Measure in one group, which keeps none of the weights."""
        lost = [device_id for device_id in devices if device_id not in self._up]
        if lost:
            return _never(WorkerStartFailed(f"worker {lost[0]} is not up"))
        self._measures_beside = True
        before, after = self._measuring.turn(command.model, command.loras)
        for load in before:
            self._send_all(devices, load)
        rows = self._begin_calibration(command, [devices])
        for drop in after:
            self._send_all(devices, drop)
        return rows

    def _begin_calibration(self, command: Calibrate, groups: Sequence[Group]) -> Awaitable[tuple[CostRow, ...]]:
        """Let each of these groups, all of one size, measure; returns the measured rows."""
        size = len(groups[0]) if groups else 1
        refs = {group: None if size == 1 else self.group(group) for group in groups}
        limit_s = self._limit_s(command.model, size)
        self._calibration = Calibration(refs, limit_s, self.break_off, self.kill)
        for group, ref in refs.items():
            self._send_all(group, replace(command, group=ref))
        return self._rows(self._calibration, command.model, size)

    async def _rows(self, calibration: Calibration, model: str, size: int) -> tuple[CostRow, ...]:
        begin_s = self._loop.time()
        rows = await calibration.rows()
        if size == 1:
            self._alone_s[model] = max(self._alone_s.get(model, 0.0), self._loop.time() - begin_s)
        return rows

    def _send_all(self, devices: Collection[int], outgoing: Outgoing) -> None:
        for device_id in devices:
            self.send(device_id, outgoing)

    def _limit_s(self, model: str, degree: int) -> float:
        """Return how long measuring this model may take. A model that compiles for a size compiles for each degree."""
        if degree == 1:
            return self._config.start_timeout_s
        least_s = (
            COMPILING_S if any(isinstance(one, ModelSource) and one.compiles for one in self._sources) else LEAST_S
        )
        return max(least_s, FACTOR * self._alone_s.get(model, 0.0))

    async def end_calibration(self) -> Mapping[LoadSource, float]:
        for command in self._measuring.last_commands():
            for device_id in self.devices_up:
                self.send(device_id, command)
        return self._measuring.speeds()

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        return resident_bytes_of(self.pids)

    @property
    def readings(self) -> Mapping[str, DeviceReading]:
        return {str(device_id): reading for device_id, reading in self._readings.items()}

    @property
    def bad_reports(self) -> Mapping[int, int]:
        return {0: self._num_bad_reports}

    async def read_model(self, source: ModelSource, served: Collection[str]) -> LoadedModel:
        loaded = await self._changes.read(source, served)
        (model,) = loaded.models
        self._read[model.info.name] = model.info
        self._keys[model.info.name] = profile_key(source, self._config.num_workers, self._hardware, model)
        self._measuring.know(loaded)
        self._reader.know(source, model)
        return model

    async def add_model(self, source: ModelSource) -> None:
        await self._changes.add(source)
        self._sources, self._infos = (*self._sources, source), (*self._infos, self._read.pop(source.name))

    async def add_lora(self, model: str, lora: LoraSource) -> Lora:
        added = await self._changes.add_lora(model, lora)
        self._reader.know_lora(model, self._source(model), lora.path, added)
        self._change(model, lambda one: replace(one, loras=(*one.loras, lora)))
        return added

    def remove_model(self, model: str) -> None:
        self._changes.remove(model)
        self._keys.pop(model, None)
        self._read.pop(model, None)
        self._infos = tuple(one for one in self._infos if one.name != model)
        self._reader.forget(model)
        self._measuring.forget(model)
        self._alone_s.pop(model, None)
        self._sources = tuple(one for one in self._sources if not isinstance(one, ModelSource) or one.name != model)

    def remove_lora(self, model: str, name: str) -> None:
        self._changes.tell(RemoveLora(model, name))
        for path in [one.path for one in self._source(model).loras if one.name == name]:
            self._reader.forget_lora(model, path)
        self._change(model, lambda one: replace(one, loras=tuple(lora for lora in one.loras if lora.name != name)))

    def _source(self, model: str) -> ModelSource:
        (source,) = (one for one in self._sources if isinstance(one, ModelSource) and one.name == model)
        return source

    def _change(self, model: str, change: Callable[[ModelSource], ModelSource]) -> None:
        """Change the source of a model with which workers are started."""
        self._sources = tuple(
            change(one) if isinstance(one, ModelSource) and one.name == model else one for one in self._sources
        )

    def send(self, device_id: int, outgoing: Outgoing) -> None:
        """Send a command. Nothing is sent to a lost device: its works have been revoked, or are about to be."""
        if device_id in self._workers:
            self._workers[device_id].send(outgoing)

    def read_ahead(self, read: ReadComponents) -> None:
        self._reader.read(read)

    async def end_reads(self) -> None:
        """End reads ahead of need, without an answer."""
        await self._reader.close(self._config.stop_grace_s)

    def kill(self, device_id: int, reason: str) -> None:
        if device_id in self._workers:
            self._workers[device_id].kill(reason)

    def group(self, devices: Group) -> GroupRef:
        return self._groups.use(devices)

    def break_off(self, ref: GroupRef) -> None:
        self._groups.break_off(ref)

    def inherit(self, blobs: Collection[StateBlob]) -> set[StateBlob]:
        return self._blobs.inherit(blobs)

    def copy(self, blob: StateBlob) -> StateBlob | None:
        return self._blobs.copy(blob)

    def discard(self, blob: StateBlob) -> None:
        self._blobs.discard(blob)

    async def stop(self) -> None:
        self._stopping = True
        self._groups.stop()
        for device_id in list(self._start_timers):
            self._end_start_timer(device_id)
        grace_s = self._config.stop_grace_s
        await asyncio.gather(self._reader.close(grace_s), *(one.close(grace_s) for one in self._workers.values()))
        self._workers.clear()
        self._resources.close()

    async def _spawn_all(self, devices: range) -> list[Loaded]:
        """Start the processes of these devices, and wait until all have loaded."""
        self._loaded |= {device_id: self._loop.create_future() for device_id in devices}
        for device_id in devices:
            self._spawn(device_id)
        return await asyncio.gather(*(self._loaded[device_id] for device_id in devices))

    def _models(self, loaded: Sequence[Loaded]) -> tuple[LoadedModel, ...]:
        """Return the models of the start, each as the first worker that has it has loaded it.

        A model that a worker could not load is `not_loaded`: it is no source any more, and workers forget it.

        Raises:
            WorkerStartFailed: no model could be loaded.
        """
        found: dict[Source, LoadedModel] = {}
        failed: dict[Source, NotLoaded] = {}
        for device_id, one in enumerate(loaded):
            started_with = dict(enumerate(self._started_with[device_id]))
            for each in one.not_loaded:
                failed.setdefault(started_with.pop(each.place), each)
            for source, model in zip(started_with.values(), one.models, strict=True):
                found.setdefault(source, model)
        for source in [one for one in self._sources if one in failed]:
            name = found[source].info.name if source in found else failed[source].name
            place = self._config.sources.index(source)
            self.not_loaded = (*self.not_loaded, replace(failed[source], place=place, name=name))
            self._send_all(range(len(loaded)), RemoveModel(name))
        self._sources = tuple(one for one in self._sources if one not in failed)
        if not self._sources:
            raise WorkerStartFailed(none_loaded(self.not_loaded))
        models = tuple(found[one] for one in self._sources)
        self._infos = tuple(one.info for one in models)
        return models

    def _sources_of(self, device_id: int) -> tuple[Source, ...]:
        """Return the sources for a worker's start: those it serves, or the first; all if weights load on demand."""
        if device_id >= self.num_devices or self._config.weights_bytes is not None:
            return self._sources
        served = [
            one
            for one in self._sources
            if isinstance(one, SimulatedSource) or one.devices is None or device_id in one.devices
        ]
        return tuple(served) or self._sources[:1]

    def _cell(self, device_id: int) -> Group:
        """Return the accelerators of the cell of this one, which is among them."""
        size = self._config.cell_size
        first = device_id // size * size
        return tuple(range(first, first + size))

    def _spawn(self, device_id: int) -> WorkerProcess:
        """Start a process. Its first message is Loaded or LoadFailed."""
        is_slot = device_id >= self.num_devices
        self._started_with[device_id] = started_with = self._sources_of(device_id)
        sources = [replace(one, device="cpu") if is_slot else one for one in started_with]
        site = Site(
            device_id=device_id,
            blobs=str(self._blobs.path),
            rendezvous=self._rendezvous.address,
            loads_on_demand=self._config.weights_bytes is not None and not is_slot,
            states_bytes=self._config.states_bytes,
            cache_bytes=self._config.cache_bytes,
            replaces=self._loaded[device_id].done(),
            infos=self._infos if is_slot else (),
            cell=() if is_slot or self._config.cell_size == 1 else self._cell(device_id),
            collectives=SOCKETS if is_slot else self._collectives,
            link_timeout_s=self._config.link_timeout_s,
            log_level=_log.getEffectiveLevel(),
        )
        worker = self._workers[device_id] = WorkerProcess(
            site, sources, partial(self._report, device_id), partial(self._on_exit, device_id)
        )
        return worker

    def _report(self, device_id: int, report: Report) -> None:
        match report:
            case Loaded():
                self._on_loaded(device_id, report)
            case LoadFailed(reason):
                self._workers[device_id].set_exit_reason(reason)
            case WeightsLoaded(load_id=0):
                self._measuring.loaded(report)
            case DeviceReading():
                self._readings[device_id] = report
            case ModelAdded() | LoraAdded():
                self._changes.answered(device_id, report)
            case Calibrated():
                if self._calibration is not None:
                    self._calibration.answered(device_id, report)
            case NodeFormed():
                self._groups.answered(device_id, report)
            case _:
                if isinstance(report, Ended):
                    self._deaths.pop(device_id, None)
                    for blob in report.blobs.values():
                        self._blobs.add(blob)
                self._listener.on_report(device_id, report)

    def _on_loaded(self, device_id: int, loaded: Loaded) -> None:
        self._failed_starts[device_id] = 0
        self._end_start_timer(device_id)
        self._up.add(device_id)
        if self._started_with[device_id] != self._sources_of(device_id) and self._loaded[device_id].done():
            self.kill(device_id, "the models have changed while it was started")
        elif self._loaded[device_id].done():
            if device_id < self.num_devices:
                self._groups.join(self.devices_up)
            self._listener.on_joined(device_id)
        else:
            self._loaded[device_id].set_result(loaded)
            self._listener.on_loading(len(self._up))

    def _on_exit(self, device_id: int, reason: str) -> None:
        if self._stopping:
            return
        worker = self._workers.pop(device_id)
        self._num_bad_reports += not worker.is_believed
        self._blobs.sweep(device_id, worker.pid)
        self._end_start_timer(device_id)
        self._fail_waiting(device_id, reason)
        self._up.discard(device_id)
        self._readings.pop(device_id, None)
        self._changes.lost(device_id)
        if device_id < self.num_devices:
            self._groups.lose(device_id, self.devices_up)
        self._listener.on_lost(device_id, reason)
        if not self._stopping:
            self._schedule_restart(device_id, reason)

    def _fail_waiting(self, device_id: int, reason: str) -> None:
        """Fail a start, or a calibration, that waits for a lost worker.

        A server starts with all its workers or not at all. A server that already serves, and measures the rest of its
        start or a model that is added, goes on without that.
        """
        if self._measures_beside:
            if self._calibration is not None and self._calibration.awaits(device_id):
                self._calibration.fail(WorkerStartFailed(f"worker {device_id} was lost: {reason}"))
            return
        error = WorkerStartFailed(f"worker {device_id} ended before it could serve: {reason}")
        loading = [future for future in self._loaded.values() if not future.done()]
        for future in loading:
            future.set_exception(error)
        if (self._calibration is not None and self._calibration.fail(error)) or loading:
            self._stopping = True

    def _schedule_restart(self, device_id: int, reason: str) -> None:
        failed, deaths = self._failed_starts.get(device_id, 0) + 1, self._deaths.get(device_id, 0) + 1
        self._failed_starts[device_id] = failed
        self._deaths[device_id] = deaths
        if failed > self._config.max_restarts:
            _log.error("worker %d was lost: %s; it is given up", device_id, reason)
            self._listener.on_given_up(self._left())
            return
        delay_s = min(self._config.restart_delay_s * 2 ** max(0, deaths - 2), self._config.max_delay_s)
        _log.warning("worker %d was lost: %s; it is restarted in %g s", device_id, reason, delay_s)
        self._restarting.add(device_id)
        self._loop.call_later(delay_s, self._respawn, device_id)

    def _left(self) -> Collection[int]:
        """Return the devices that are not given up; none if all accelerators are, or all CPU slots."""
        left = self._workers.keys() | self._restarting
        devices, slots = range(self.num_devices), range(self.num_devices, self.num_devices + self._num_slots)
        return () if any(kind and left.isdisjoint(kind) for kind in (devices, slots)) else left

    def _respawn(self, device_id: int) -> None:
        self._restarting.discard(device_id)
        if not self._stopping:
            timeout_s = self._config.start_timeout_s
            worker = self._spawn(device_id)
            reason = f"it did not load within {timeout_s:g} s"
            self._start_timers[device_id] = self._loop.call_later(timeout_s, worker.kill, reason)

    def _end_start_timer(self, device_id: int) -> None:
        if (timer := self._start_timers.pop(device_id, None)) is not None:
            timer.cancel()
