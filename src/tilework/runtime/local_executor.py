"""Worker processes of this machine, one or several per device: started together, restarted when lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
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
    Execute,
    GroupRef,
    RemoveLora,
    RemoveModel,
    Site,
    StopWork,
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
    WeightsRead,
)
from tilework.core.work import Group
from tilework.cost.profile import ProfileKey
from tilework.runtime.cells import CellReports
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
    """An `Executor` of forkserver processes on this machine, the workers.

    An accelerator consists of `config.cell_size` workers, a CPU slot of one. All workers of a device get its commands,
    in the same order. An accelerator of several workers is a *cell*: they run each work as a group, and the end of a
    work counts when all of them have reported it. If one of them is lost, the cell is lost: the others are ended, too,
    and the cell joins when all have been started again.

    Workers have ids of their own, those of CPU slots last.
    """

    def __init__(self, config: LocalConfig) -> None:
        size = config.cell_size
        num_workers = config.num_workers
        assert num_workers % size == 0, f"{num_workers} workers in cells of {size}"
        self._config = config
        self._sources = config.sources
        accelerators = [tuple(range(first, first + size)) for first in range(0, num_workers, size)]
        self._num_devices = len(accelerators)
        self._members: list[Group] = [*accelerators, *((num_workers + slot,) for slot in range(config.num_slots))]
        self._device_of = [device_id for device_id, members in enumerate(self._members) for _ in members]
        self._groups = NodeGroups(self._send)
        self._cells = [
            CellReports(workers=one, group=self._groups.use, break_off=self.break_off, discard=self.discard)
            for one in (accelerators if size > 1 else ())
        ]
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
        return self._num_devices

    @property
    def cell_size(self) -> int:
        return self._config.cell_size

    @property
    def _collectives(self) -> str:
        return self._config.collectives or USUAL_COLLECTIVES[self._config.sources[0].device]

    @property
    def devices_up(self) -> Group:
        return tuple(filter(self._is_up, range(self._num_devices)))

    @property
    def slots_up(self) -> Group:
        return tuple(filter(self._is_up, self._slots))

    @property
    def _slots(self) -> range:
        return range(self._num_devices, self._num_devices + self._num_slots)

    def _is_up(self, device_id: int) -> bool:
        """Return whether all workers of a device are up."""
        return self._up.issuperset(self._members[device_id])

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

        whole = capacity_bytes(self._blobs.path / WEIGHTS)
        return None if whole is None else whole // self.cell_size  # It keeps the parts of all workers of a cell.

    def profile_key(self, model: str) -> ProfileKey:
        return self._keys[model]

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of the existing workers, by the names of `resident_bytes`."""
        workers = sorted(self._workers.items())
        return {self._name(worker_id): one.pid for worker_id, one in workers if one.pid is not None}

    def _name(self, worker_id: int) -> str:
        """Return the name of a worker by its device, and by its place there in a cell."""
        device_id = self._device_of[worker_id]
        members = self._members[device_id]
        return f"{device_id}.{members.index(worker_id)}" if len(members) > 1 else str(device_id)

    def report_to(self, listener: Listener) -> None:
        self._listener = listener

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
            slots=lambda: self._of(self._slots),
            send=self._send,
        )
        self._reader = HostReader(
            directory=self._blobs.path,
            on_read=self._on_read,
            timeout_s=self._config.start_timeout_s,
        )
        self._rendezvous = self._resources.enter_context(closing(Rendezvous(self._blobs.path)))
        timeout_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                loaded = await self._spawn_all(range(self._num_devices))
                models = self._models(loaded)
                if any(one.info.graph.needs_slots for one in models):
                    self._num_slots = self._config.num_slots
                    loaded += await self._spawn_all(self._slots)
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
            self._accelerators_up(),
            partial(Meeting, self._rendezvous.address),
            self._on_links_changed,
            self._loop.call_later,
            self._config.link_timeout_s,
        )
        failure = await self._groups.decided()
        if failure and self._cells:
            await self.stop()
            raise WorkerStartFailed(f"the workers of a cell cannot talk to each other: {failure}")

    @property
    def alone(self) -> Group:
        alone = self._groups.alone(range(self._config.num_workers))
        return tuple(dict.fromkeys(self._device_of[worker_id] for worker_id in alone))

    @property
    def is_linking(self) -> bool:
        return self._groups.is_linking

    def _on_read(self, read: WeightsRead) -> None:
        self._listener.on_read(read)

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
        """Measure on all devices that serve the model, in groups of this size."""
        self._measures_beside = False
        served = self.serving.get(command.model, self.devices_up)
        up = [device_id for device_id in self.devices_up if device_id in served]
        if degree > 1:
            await self._groups.decided()
            up = [device_id for device_id in up if device_id not in self.alone]
        for change in self._measuring.commands(command.model, command.loras):
            self._send_all(up, change)
        groups = [tuple(up[first : first + degree]) for first in range(0, len(up) - degree + 1, degree)]
        return await self._begin_calibration(command, groups)

    def _calibrate_on(self, devices: Group, command: Calibrate) -> Awaitable[tuple[CostRow, ...]]:
        """Measure in one group, which keeps none of the weights."""
        lost = [worker_id for worker_id in self._of(devices) if worker_id not in self._up]
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
        workers = [self._of(group) for group in groups]
        is_alone = not workers or len(workers[0]) == 1
        refs = {one: None if is_alone else self._groups.use(one) for one in workers}
        limit_s = self._limit_s(command.model, is_alone=is_alone)
        self._calibration = Calibration(refs, limit_s, self.break_off, self._kill)
        for group, ref in zip(groups, refs.values(), strict=True):
            self._send_all(group, replace(command, group=ref))
        return self._rows(self._calibration, command.model, is_alone=is_alone)

    async def _rows(self, calibration: Calibration, model: str, *, is_alone: bool) -> tuple[CostRow, ...]:
        begin_s = self._loop.time()
        rows = await calibration.rows()
        if is_alone:
            self._alone_s[model] = max(self._alone_s.get(model, 0.0), self._loop.time() - begin_s)
        return rows

    def _send_all(self, devices: Collection[int], outgoing: Outgoing) -> None:
        for device_id in devices:
            self.send(device_id, outgoing)

    def _limit_s(self, model: str, *, is_alone: bool) -> float:
        """Return how long measuring this model may take. A model that compiles for a size compiles for each degree."""
        if is_alone:
            return self._config.start_timeout_s
        least_s = (
            COMPILING_S if any(isinstance(one, ModelSource) and one.compiles for one in self._sources) else LEAST_S
        )
        return max(least_s, FACTOR * self._alone_s.get(model, 0.0))

    async def end_calibration(self) -> Mapping[LoadSource, float]:
        for command in self._measuring.last_commands():
            self._send_all(self.devices_up, command)
        return self._measuring.speeds()

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        return resident_bytes_of(self.pids)

    @property
    def readings(self) -> Mapping[str, DeviceReading]:
        return {self._name(worker_id): reading for worker_id, reading in self._readings.items()}

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
        workers = self._members[device_id]
        if device_id < len(self._cells):
            if isinstance(outgoing, Execute):
                outgoing = self._cells[device_id].begin(outgoing)
            elif isinstance(outgoing, StopWork):
                workers = workers[:1]  # It decides where to stop.
        for worker_id in workers:
            self._send(worker_id, outgoing)

    def _send(self, worker_id: int, outgoing: Outgoing) -> None:
        if worker_id in self._workers:
            self._workers[worker_id].send(outgoing)

    def read_ahead(self, read: ReadComponents) -> None:
        self._reader.read(read)

    async def end_reads(self) -> None:
        """End reads ahead of need, without an answer."""
        await self._reader.close(self._config.stop_grace_s)

    def kill(self, device_id: int, reason: str) -> None:
        for worker_id in self._members[device_id]:
            self._kill(worker_id, reason)

    def _kill(self, worker_id: int, reason: str) -> None:
        if worker_id in self._workers:
            self._workers[worker_id].kill(reason)

    def group(self, devices: Group) -> GroupRef:
        return self._groups.use(self._of(devices))

    def _of(self, devices: Iterable[int]) -> Group:
        """Return the workers of these devices."""
        return tuple(worker_id for device_id in devices for worker_id in self._members[device_id])

    def _accelerators_up(self) -> Group:
        """Return the workers of accelerators that are up."""
        return tuple(worker_id for worker_id in range(self._config.num_workers) if worker_id in self._up)

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
        for worker_id in list(self._start_timers):
            self._end_start_timer(worker_id)
        grace_s = self._config.stop_grace_s
        await asyncio.gather(self._reader.close(grace_s), *(one.close(grace_s) for one in self._workers.values()))
        self._workers.clear()
        self._resources.close()

    async def _spawn_all(self, devices: range) -> list[Loaded]:
        """Start the processes of these devices, and wait until all have loaded."""
        workers = self._of(devices)
        self._loaded |= {worker_id: self._loop.create_future() for worker_id in workers}
        for worker_id in workers:
            self._spawn(worker_id)
        return await asyncio.gather(*(self._loaded[worker_id] for worker_id in workers))

    def _models(self, loaded: Sequence[Loaded]) -> tuple[LoadedModel, ...]:
        """Return the models of the start, each as the first worker that has it has loaded it.

        A model that a worker could not load is `not_loaded`: it is no source any more, and workers forget it.

        Raises:
            WorkerStartFailed: no model could be loaded.
        """
        found: dict[Source, LoadedModel] = {}
        failed: dict[Source, NotLoaded] = {}
        for worker_id, one in enumerate(loaded):
            started_with = dict(enumerate(self._started_with[worker_id]))
            for each in one.not_loaded:
                failed.setdefault(started_with.pop(each.place), each)
            for source, model in zip(started_with.values(), one.models, strict=True):
                found.setdefault(source, model)
        for source in [one for one in self._sources if one in failed]:
            name = found[source].info.name if source in found else failed[source].name
            place = self._config.sources.index(source)
            self.not_loaded = (*self.not_loaded, replace(failed[source], place=place, name=name))
            for worker_id in range(len(loaded)):
                self._send(worker_id, RemoveModel(name))
        self._sources = tuple(one for one in self._sources if one not in failed)
        if not self._sources:
            raise WorkerStartFailed(none_loaded(self.not_loaded))
        models = tuple(found[one] for one in self._sources)
        self._infos = tuple(one.info for one in models)
        return models

    def _sources_of(self, device_id: int) -> tuple[Source, ...]:
        """Return the sources for a device's start: those it serves, or the first; all if weights load on demand."""
        if device_id in self._slots or self._config.weights_bytes is not None:
            return self._sources
        served = [
            one
            for one in self._sources
            if isinstance(one, SimulatedSource) or one.devices is None or device_id in one.devices
        ]
        return tuple(served) or self._sources[:1]

    def _spawn(self, worker_id: int) -> WorkerProcess:
        """Start a process. Its first message is Loaded or LoadFailed."""
        device_id = self._device_of[worker_id]
        is_slot = device_id in self._slots
        self._started_with[worker_id] = started_with = self._sources_of(device_id)
        sources = [replace(one, device="cpu") if is_slot else one for one in started_with]
        site = Site(
            device_id=worker_id,
            blobs=str(self._blobs.path),
            rendezvous=self._rendezvous.address,
            loads_on_demand=self._config.weights_bytes is not None and not is_slot,
            states_bytes=self._config.states_bytes,
            cache_bytes=self._config.cache_bytes,
            replaces=self._loaded[worker_id].done(),
            infos=self._infos if is_slot else (),
            cell=self._cells[device_id].workers if device_id < len(self._cells) else (),
            collectives=SOCKETS if is_slot else self._collectives,
            link_timeout_s=self._config.link_timeout_s,
            log_level=_log.getEffectiveLevel(),
        )
        worker = self._workers[worker_id] = WorkerProcess(
            site, sources, partial(self._report, worker_id), partial(self._on_exit, worker_id)
        )
        return worker

    def _report(self, worker_id: int, report: Report) -> None:
        match report:
            case Loaded():
                self._on_loaded(worker_id, report)
            case LoadFailed(reason):
                self._workers[worker_id].set_exit_reason(reason)
            case WeightsLoaded(load_id=0):
                self._measuring.loaded(report)
            case DeviceReading():
                self._readings[worker_id] = report
            case ModelAdded() | LoraAdded():
                self._changes.answered(worker_id, report)
            case Calibrated():
                if self._calibration is not None:
                    self._calibration.answered(worker_id, report)
            case NodeFormed():
                self._groups.answered(worker_id, report)
            case _:
                if isinstance(report, Ended):
                    self._deaths.pop(worker_id, None)
                    for blob in report.blobs.values():
                        self._blobs.add(blob)
                self._pass_on(self._device_of[worker_id], worker_id, report)

    def _pass_on(self, device_id: int, worker_id: int, report: Report) -> None:
        """Pass a report of a device on, that of a cell if all its workers have sent theirs."""
        if device_id >= len(self._cells):
            self._listener.on_report(device_id, report)
        elif not self._is_up(device_id):  # It is of a worker that is about to end with its cell.
            self._cells[device_id].drop([report])
        elif (joint := self._cells[device_id].add(worker_id, report)) is not None:
            self._listener.on_report(device_id, joint)

    def _on_loaded(self, worker_id: int, loaded: Loaded) -> None:
        device_id = self._device_of[worker_id]
        self._failed_starts[worker_id] = 0
        self._end_start_timer(worker_id)
        self._up.add(worker_id)
        if self._started_with[worker_id] != self._sources_of(device_id) and self._loaded[worker_id].done():
            self._kill(worker_id, "the models have changed while it was started")
        elif self._loaded[worker_id].done():
            if device_id < self._num_devices:
                self._groups.join(self._accelerators_up())
            if self._is_up(device_id):
                self._listener.on_joined(device_id)
        else:
            self._loaded[worker_id].set_result(loaded)
            self._listener.on_loading(len(self.devices_up) + len(self.slots_up))

    def _on_exit(self, worker_id: int, reason: str) -> None:
        if self._stopping:
            return
        device_id = self._device_of[worker_id]
        worker = self._workers.pop(worker_id)
        self._num_bad_reports += not worker.is_believed
        self._blobs.sweep(worker_id, worker.pid)
        self._end_start_timer(worker_id)
        self._fail_waiting(worker_id, reason)
        is_of_lost = device_id < len(self._cells) and not self._is_up(device_id)
        self._up.discard(worker_id)
        self._readings.pop(worker_id, None)
        self._changes.lost(worker_id)
        if device_id < len(self._cells) and not is_of_lost:
            self._end_cell(self._cells[device_id], worker_id)
        if device_id < self._num_devices:
            self._groups.lose(worker_id, self._accelerators_up())
        if not is_of_lost:
            self._listener.on_lost(device_id, reason)
        if not self._stopping:
            self._schedule_restart(worker_id, reason)

    def _end_cell(self, cell: CellReports, lost: int) -> None:
        """End the other workers of a cell that has lost one."""
        cell.clear()
        for worker_id in cell.workers:
            self._up.discard(worker_id)
            self._kill(worker_id, f"worker {lost} of its cell was lost")

    def _fail_waiting(self, worker_id: int, reason: str) -> None:
        """Fail a start, or a calibration, that waits for a lost worker.

        A server starts with all its workers or not at all. A server that already serves, and measures the rest of its
        start or a model that is added, goes on without that.
        """
        if self._measures_beside:
            if self._calibration is not None and self._calibration.awaits(worker_id):
                self._calibration.fail(WorkerStartFailed(f"worker {worker_id} was lost: {reason}"))
            return
        error = WorkerStartFailed(f"worker {worker_id} ended before it could serve: {reason}")
        loading = [future for future in self._loaded.values() if not future.done()]
        for future in loading:
            future.set_exception(error)
        if (self._calibration is not None and self._calibration.fail(error)) or loading:
            self._stopping = True

    def _schedule_restart(self, worker_id: int, reason: str) -> None:
        failed = self._failed_starts.get(worker_id, 0) + 1
        deaths = self._deaths.get(worker_id, 0) + 1
        self._failed_starts[worker_id] = failed
        self._deaths[worker_id] = deaths
        if failed > self._config.max_restarts:
            _log.error("worker %d was lost: %s; it is given up", worker_id, reason)
            self._listener.on_given_up(self._left())
            return
        delay_s = min(self._config.restart_delay_s * 2 ** max(0, deaths - 2), self._config.max_delay_s)
        _log.warning("worker %d was lost: %s; it is restarted in %g s", worker_id, reason, delay_s)
        self._restarting.add(worker_id)
        self._loop.call_later(delay_s, self._respawn, worker_id)

    def _left(self) -> Collection[int]:
        """Return the devices that are not given up; none if all accelerators are, or all CPU slots."""
        workers = self._workers.keys() | self._restarting
        kinds = [
            [device_id for device_id in kind if workers >= {*self._members[device_id]}]
            for kind in (range(self._num_devices), self._slots)
            if kind
        ]
        return [device_id for kind in kinds for device_id in kind] if all(kinds) else ()

    def _respawn(self, worker_id: int) -> None:
        self._restarting.discard(worker_id)
        if not self._stopping:
            timeout_s = self._config.start_timeout_s
            worker = self._spawn(worker_id)
            reason = f"it did not load within {timeout_s:g} s"
            self._start_timers[worker_id] = self._loop.call_later(timeout_s, worker.kill, reason)

    def _end_start_timer(self, worker_id: int) -> None:
        if (timer := self._start_timers.pop(worker_id, None)) is not None:
            timer.cancel()
