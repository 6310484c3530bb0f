"""Cells: groups of devices of a node that are one device to the controller, for models that exceed one device."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from tilework.control.driver.in_flight import merge_cut_off
from tilework.core.actions import ReadComponents
from tilework.core.component import LoadSource
from tilework.core.cost_row import Batch, CostRow
from tilework.core.lora import Lora, UsedLora
from tilework.core.model import LoraSource, ModelSource, Source
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Execute, GroupRef, StopWork
from tilework.core.wire.reports import (
    DeviceReading,
    Ended,
    Failed,
    LoadedModel,
    NotLoaded,
    Report,
    StartedOver,
    WeightsLoaded,
    WeightsRead,
)
from tilework.core.work import Group
from tilework.cost.profile import ProfileKey
from tilework.runtime.executor import Listener
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.outbox import Outgoing
from tilework.runtime.state_blobs import StateBlobDirectory
from tilework.runtime.worker_process import resident_bytes_of

_End = Ended | Failed
_Together = _End | WeightsLoaded | StartedOver
"""Reports that each worker of a cell sends, and the cell passes on once."""


class CellExecutor:
    """An `Executor` each of whose accelerators is a cell of `config.cell_size` workers.

    All workers of a cell get its commands, in the same order, and run each work as a group. A cell reports the end of a
    work when all its workers have. If one of them is lost, the cell is lost: the other workers are ended, too, and the
    cell joins when all have been started again. CPU slots are not affected.

    The models of `config` name cells as their devices.
    """

    def __init__(self, config: LocalConfig) -> None:
        self._size = config.cell_size
        assert config.num_workers % self._size == 0, f"{config.num_workers} workers in cells of {self._size}"
        sources = tuple(map(self._on_workers, config.sources))
        self._inner = LocalExecutor(replace(config, sources=sources))
        self._up: set[int] = set()
        self._ending: set[int] = set()  # Workers that were ended with their cells, and have not exited.
        self._running: dict[tuple[int, int], GroupRef] = {}  # By cell and work that the cell has not ended.
        self._reported: dict[tuple[int, str, int], dict[int, _Together]] = {}  # By cell and work or load, by worker.

    @property
    def num_devices(self) -> int:
        return self._inner.num_devices // self._size

    @property
    def cell_size(self) -> int:
        return self._size

    @property
    def devices_up(self) -> Group:
        return tuple(sorted(self._up))

    @property
    def slots_up(self) -> Group:
        return tuple(map(self._device, self._inner.slots_up))

    @property
    def num_slots(self) -> int:
        return self._inner.num_slots

    def node(self, device_id: int) -> int:
        return 0

    @property
    def alone(self) -> Group:
        return tuple(sorted(set(map(self._device, self._inner.alone))))

    @property
    def is_linking(self) -> bool:
        return self._inner.is_linking

    @property
    def serving(self) -> Mapping[str, tuple[int, ...]]:
        return {model: tuple(sorted(set(map(self._device, of)))) for model, of in self._inner.serving.items()}

    @property
    def blobs(self) -> StateBlobDirectory:
        """State blobs of this node, once its workers start."""
        return self._inner.blobs

    @property
    def weights_bytes(self) -> int | None:
        return self._inner.weights_bytes

    @property
    def host_bytes(self) -> int | None:
        """Memory of the host in sizes of one worker's parts; the host keeps the parts of all workers of a cell."""
        whole = self._inner.host_bytes
        return None if whole is None else whole // self._size

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of the workers that exist, by the names of `resident_bytes`."""
        found = dict[str, int]()
        for worker in range(self._inner.num_devices + self.num_slots):
            pid = self._inner.pid(worker)
            if pid is not None:
                found[self._name(worker)] = pid
        return found

    def _name(self, worker: int) -> str:
        """Return the name of a worker by its cell and its place there, or by its CPU slot."""
        is_slot = worker >= self._inner.num_devices
        return f"{self._device(worker)}" if is_slot else f"{self._device(worker)}.{worker % self._size}"

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        return resident_bytes_of(self.pids)

    @property
    def readings(self) -> Mapping[str, DeviceReading]:
        return {self._name(int(worker)): reading for worker, reading in self._inner.readings.items()}

    @property
    def bad_reports(self) -> Mapping[int, int]:
        return self._inner.bad_reports

    @property
    def not_loaded(self) -> Sequence[NotLoaded]:
        return self._inner.not_loaded

    def profile_key(self, model: str) -> ProfileKey:
        return self._inner.profile_key(model)

    async def start(self, listener: Listener) -> tuple[LoadedModel, ...]:
        self._listener = listener
        loaded = await self._inner.start(self)
        self._up = {device_id for device_id in range(self.num_devices) if self._is_whole(device_id)}
        return loaded

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
        workers = None if devices is None else tuple(one for cell in devices for one in self._members(cell))
        return self._inner.calibrate(model, batches, degree * self._size, num_runs, loras, known, workers)

    async def end_calibration(self) -> Mapping[LoadSource, float]:
        return await self._inner.end_calibration()

    async def read_model(self, source: ModelSource, served: Collection[str]) -> LoadedModel:
        return await self._inner.read_model(source, served)

    async def add_model(self, source: ModelSource) -> None:
        await self._inner.add_model(source)

    async def add_lora(self, model: str, lora: LoraSource) -> Lora:
        return await self._inner.add_lora(model, lora)

    def remove_model(self, model: str) -> None:
        self._inner.remove_model(model)

    def remove_lora(self, model: str, name: str) -> None:
        self._inner.remove_lora(model, name)

    def send(self, device_id: int, outgoing: Outgoing) -> None:
        workers = self._members(device_id)
        if isinstance(outgoing, Execute) and len(workers) > 1:
            group = outgoing.group or self._inner.group(workers)
            outgoing, self._running[device_id, outgoing.work_id] = replace(outgoing, group=group), group
        for worker in workers[:1] if isinstance(outgoing, StopWork) else workers:  # The first decides where to stop.
            self._inner.send(worker, outgoing)

    def read_ahead(self, read: ReadComponents) -> None:
        self._inner.read_ahead(read)

    async def end_reads(self) -> None:
        """End reads ahead of need, without an answer."""
        await self._inner.end_reads()

    def kill(self, device_id: int, reason: str) -> None:
        for worker in self._members(device_id):
            self._inner.kill(worker, reason)

    def group(self, devices: Group) -> GroupRef:
        return self._inner.group(tuple(worker for device_id in devices for worker in self._members(device_id)))

    def break_off(self, ref: GroupRef) -> None:
        self._inner.break_off(ref)

    def inherit(self, blobs: Collection[StateBlob]) -> set[StateBlob]:
        return self._inner.inherit(blobs)

    def copy(self, blob: StateBlob) -> StateBlob | None:
        return self._inner.copy(blob)

    def discard(self, blob: StateBlob) -> None:
        self._inner.discard(blob)

    async def stop(self) -> None:
        await self._inner.stop()

    # For the executor of its workers.

    def on_loading(self, num_ready: int) -> None:
        num_slots = num_ready - len(self._inner.devices_up)
        self._listener.on_loading(sum(map(self._is_whole, range(self.num_devices))) + num_slots)

    def on_report(self, worker: int, report: Report) -> None:
        device_id = self._device(worker)
        if device_id < self.num_devices and device_id not in self._up:  # From a worker that is about to be ended.
            self._discard([report], None)
        elif device_id >= self.num_devices or not isinstance(report, _Together):
            self._listener.on_report(device_id, report)
        elif isinstance(report, WeightsLoaded):
            self._collect(device_id, worker, "load", report.load_id, report)
        elif isinstance(report, StartedOver):
            self._collect(device_id, worker, "start", 0, report)
        else:
            if isinstance(report, Failed) or report.ending.is_cut_off:  # The others must not wait for it.
                self._inner.break_off(self._running[device_id, report.work_id])
            if self._collect(device_id, worker, "work", report.work_id, report):
                del self._running[device_id, report.work_id]

    def _collect(self, device_id: int, worker: int, kind: str, number: int, report: _Together) -> bool:
        """Keep a worker's report; when all workers of its cell have reported, report for the cell. Returns whether."""
        reports = self._reported.setdefault((device_id, kind, number), {})
        reports[worker] = report
        if len(reports) < self._size:
            return False
        del self._reported[device_id, kind, number]
        self._listener.on_report(device_id, self._merged([reports[one] for one in self._members(device_id)]))
        return True

    def on_lost(self, worker: int, reason: str) -> None:
        self._ending.discard(worker)
        device_id = self._device(worker)
        if device_id >= self.num_devices:
            self._listener.on_lost(device_id, reason)
        elif device_id in self._up:
            self._up.remove(device_id)
            self._running = {key: ref for key, ref in self._running.items() if key[0] != device_id}
            for key in [one for one in self._reported if one[0] == device_id]:
                self._discard(self._reported.pop(key).values(), None)
            others = [one for one in self._members(device_id) if one != worker]
            self._ending.update(others)
            for other in others:
                self._inner.kill(other, f"worker {worker} of its cell was lost")
            self._listener.on_lost(device_id, reason)

    def on_joined(self, worker: int) -> None:
        device_id = self._device(worker)
        if device_id >= self.num_devices:
            self._listener.on_joined(device_id)
        elif self._is_whole(device_id):
            self._up.add(device_id)
            self._listener.on_joined(device_id)

    def on_links_changed(self) -> None:
        self._listener.on_links_changed()

    def on_read(self, read: WeightsRead) -> None:
        self._listener.on_read(read)

    def on_given_up(self, left: Collection[int]) -> None:
        devices = range(self.num_devices)
        cells = [device_id for device_id in devices if set(self._members(device_id)) <= set(left)]
        slots = [self._device(worker) for worker in left if worker >= self._inner.num_devices]
        self._listener.on_given_up([*cells, *slots] if cells else ())

    # Cells and their workers.

    def _device(self, worker: int) -> int:
        """Return the cell of a worker, or the CPU slot that it is."""
        num_workers = self._inner.num_devices
        return worker // self._size if worker < num_workers else worker - num_workers + self.num_devices

    def _members(self, device_id: int) -> Group:
        """Return the workers of a device."""
        if device_id >= self.num_devices:
            return (device_id - self.num_devices + self._inner.num_devices,)
        return tuple(range(device_id * self._size, (device_id + 1) * self._size))

    def _on_workers(self, source: Source) -> Source:
        """Return a model's source with the workers of its devices."""
        if not isinstance(source, ModelSource) or source.devices is None:
            return source
        size = self._size
        workers = [one for cell in source.devices for one in range(cell * size, (cell + 1) * size)]
        return replace(source, devices=tuple(workers))

    def _is_whole(self, device_id: int) -> bool:
        """Return whether all workers of a cell are up, and none is about to end."""
        return set(self._members(device_id)) <= set(self._inner.devices_up) - self._ending

    def _merged(self, reports: Sequence[_Together]) -> _Together:
        """Return the report of a cell, from those of its workers. Blobs that it does not name are discarded."""
        first = reports[0]
        if isinstance(first, WeightsLoaded):
            loads = [one for one in reports if isinstance(one, WeightsLoaded)]
            dropped = {digest for one in loads for digest in one.dropped}
            return WeightsLoaded(first.load_id, max(one.run_ns for one in loads), tuple(sorted(dropped)))
        if isinstance(first, StartedOver):
            return first
        failed = [one for one in reports if isinstance(one, Failed)]
        if isinstance(first, Ended) and not first.ending.is_cut_off:
            merged: _End = first
        elif failed:
            merged = failed[0]
        else:
            merged = merge_cut_off([one for one in reports if isinstance(one, Ended)])
        self._discard(reports, merged)
        return merged

    def _discard(self, reports: Iterable[Report], kept: _End | None) -> None:
        """Remove the blobs of reports that the kept report does not name."""
        named = set(kept.blobs.values()) if isinstance(kept, Ended) else set()
        for report in reports:
            for blob in report.blobs.values() if isinstance(report, Ended) else ():
                if blob not in named:
                    self._inner.discard(blob)


def local_executor(config: LocalConfig) -> CellExecutor | LocalExecutor:
    """Return the executor of workers on this machine."""
    return LocalExecutor(config) if config.cell_size == 1 else CellExecutor(config)
