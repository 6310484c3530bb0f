"""Devices and promised jobs as they are now, or as they would be after some starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from tilework.admission.contract import Boundary, Reserves
from tilework.admission.loads import reserve
from tilework.admission.reservation_timeline import DeviceTimes, Places
from tilework.core.block import Block
from tilework.core.component import Component, Memory, num_bytes
from tilework.core.events import MeasurementAsked
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.policy import DeviceView, JobView
from tilework.core.work import Group, LoadAhead, Start
from tilework.cost.table_costs import TableCosts
from tilework.policy.toolkit.buddy_allocator import nodes


def ready_ns(job: JobView, up: Mapping[int, DeviceView]) -> int:
    """Return when the works of a job will have ended; 0 if it has none. `up` are the devices that are up, by id."""
    if not job.works:
        return 0
    last = job.works[-1]
    return max([up[device_id].end_ns(last) for device_id in last.devices if device_id in up], default=0)


@dataclass(slots=True, kw_only=True)
class WhatIf:
    """Times at which devices are free, and the remaining work of promised jobs, after starts that are not committed.

    `free_ns` and `up` have CPU slots, too. `changed` are the reservations of promised jobs that are started or get
    another group. The group on which a job is started becomes the group of its reservation, if it is due before
    `far_from`.
    """

    view: Reserves
    costs: TableCosts
    now_ns: int
    free_ns: DeviceTimes
    up: dict[int, DeviceView]
    far_from: tuple[int, int] | None = None
    cursors: dict[int, Cursor] = field(default_factory=dict)
    ready_ns: dict[int, int] = field(default_factory=dict)
    changed: dict[int, Block] = field(default_factory=dict)
    memories: dict[int, Memory] = field(default_factory=dict)

    @staticmethod
    def now(view: Reserves, costs: TableCosts, now_ns: int, far_from: tuple[int, int] | None = None) -> WhatIf:
        """Return the present state, without starts."""
        up = {device.device_id: device for device in (*view.devices, *view.slots)}
        return WhatIf(
            view=view,
            costs=costs,
            now_ns=now_ns,
            free_ns={device_id: device.free_ns for device_id, device in up.items()},
            up=up,
            far_from=far_from,
        )

    def plus(self, starts: Sequence[Start]) -> WhatIf:
        """Return the state after these starts, in addition to earlier ones."""
        after = self._copy()
        groups: dict[int, Group] = {}
        for start in starts:
            group = () if start.stage.kind is DeviceKind.CPU else start.devices
            for job in after._add(start):
                groups[job.job_id] = max(groups.get(job.job_id, ()), group, key=len)
        for job_id, group in groups.items():
            after._move(job_id, group)
        if self.view.needs_loads:
            after._lose_components({device_id for start in starts for device_id in start.devices}, groups)
        return after

    def plus_load(self, load: LoadAhead) -> WhatIf:
        """Return the state after a load ahead of need, from the slowest source."""
        after = self._copy()
        device_id = load.device_id
        after.free_ns[device_id] += after._load(device_id, load.stage, load.drop_order.device)
        after._lose_components({device_id}, ())
        return after

    def after_stop(self, boundary: Boundary) -> WhatIf:
        """Return the state after the works of some jobs have stopped. Promised jobs have more left, and keep groups.

        Stopping and going on elsewhere takes time that no cost table has: as much as the fixed part of the margin.
        """
        after = self._copy()
        ready_ns = boundary.end_ns + self.view.margins.guard.fixed_ns
        after.free_ns.update(boundary.free_ns)
        for job_id, position in boundary.positions.items():
            job = self.view.job(job_id)
            assert job is not None
            after.cursors[job_id] = job.committed.itinerary.at[position]
            after.ready_ns[job_id] = ready_ns
            if (block := self.changed.get(job_id, job.promised)) is not None:
                after._reserve(job, replace(block, ready_ns=ready_ns), block.demand.width)
        return after

    def plus_measurement(self, asked: MeasurementAsked, devices: Group) -> WhatIf:
        """Return the state after a measurement on these devices."""
        after = self._copy()
        end_ns = max(after.free_ns[device_id] for device_id in devices) + asked.run_ns
        for device_id in devices:
            memory = after.memory(device_id)
            after.free_ns[device_id] = end_ns
            after.memories[device_id] = memory.without(memory.in_the_way(asked.digests, asked.room_bytes))
        if self.view.needs_loads:
            after._lose_components(set(devices), ())
        return after

    def _copy(self) -> WhatIf:
        return replace(
            self,
            free_ns=dict(self.free_ns),
            cursors=dict(self.cursors),
            ready_ns=dict(self.ready_ns),
            changed=dict(self.changed),
            memories=dict(self.memories),
        )

    def _add(self, start: Start) -> list[JobView]:
        """Add a start; returns its promised jobs."""
        jobs = [job for job_id in start.job_ids if (job := self.view.job(job_id)) is not None]
        work_ns = self.costs.work_ns(start.stage, [job.request for job in jobs], len(start.devices), start.num_steps)
        readies = [self.ready_ns.get(job.job_id) or ready_ns(job, self.up) for job in jobs]
        free_ns = [self.free_ns[device_id] for device_id in start.devices]
        if self.view.needs_loads and start.stage.kind is DeviceKind.ACCELERATOR:
            first = start.drop_order.device
            beside = self.costs.weights.activation_bytes(start.stage, [job.request for job in jobs], len(start.devices))
            loads_ns = [self._load(device_id, start.stage, first, beside) for device_id in start.devices]
            free_ns = [sum(pair) for pair in zip(free_ns, loads_ns, strict=True)]
        end_ns = max([*readies, *free_ns]) + work_ns
        self.free_ns.update(dict.fromkeys(start.devices, end_ns))
        for job in jobs:
            self.cursors[job.job_id] = self.cursor(job).advanced(start.num_steps)
            self.ready_ns[job.job_id] = end_ns
        return [job for job in jobs if job.promised is not None]

    def _move(self, job_id: int, group: Group) -> None:
        job = self.view.job(job_id)
        assert job is not None
        assert job.promised is not None
        before = self.changed.get(job_id, job.promised)
        reserved = before.devices
        width = before.demand.width
        if len(group) >= len(reserved) and not set(reserved) <= set(group) and is_before(job, self.far_from):
            reserved = group[: len(reserved)]
        self._reserve(job, replace(before, ready_ns=self.ready_ns[job_id], devices=reserved), width)

    def _reserve(self, job: JobView, block: Block, width: int) -> None:
        """Compute the reservation of a job anew, for its devices as they are after the starts."""
        memories = None
        if self.view.needs_loads:
            memories = [self.memory(device_id) for device_id in block.devices if device_id in self.up]
        self.changed[job.job_id] = reserve(block, job.request, self.cursor(job), width, memories, self.costs)

    def memory(self, device_id: int) -> Memory:
        """Return the components of a device after the starts."""
        return self.memories.get(device_id) or self.up[device_id].memory

    def _load(self, device_id: int, stage: Stage, first: Sequence[Component], beside_bytes: int = 0) -> int:
        """Load a stage's components, dropping `first` first; returns the longest time that may take."""
        change = self.memory(device_id).used(self.costs.weights.components(stage), first, beside_bytes)
        self.memories[device_id] = change.memory
        return self.costs.weights.load_ns(num_bytes(change.loads)) if change.loads else 0

    def _lose_components(self, devices: AbstractSet[int], moved: Collection[int]) -> None:
        """Compute the reservations anew that rely on components of these devices, except those of `moved` jobs."""
        for job in self.view.promised():
            block = self.changed.get(job.job_id, job.promised)
            if block is None or block.unloaded is None or job.job_id in moved or devices.isdisjoint(block.devices):
                continue
            ready = self.ready_ns.get(job.job_id) or ready_ns(job, self.up)
            self._reserve(job, replace(block, ready_ns=ready), block.demand.width)

    def cursor(self, job: JobView) -> Cursor:
        return self.cursors.get(job.job_id) or job.committed

    @property
    def places(self) -> Places:
        """Devices that may be chosen for a reservation: none that may be lost, unless there are no others."""
        places = Places(nodes(self.view.devices), [one.device_id for one in self.view.slots])
        heard = places.without(self.view.silent)
        return heard if heard.nodes else places

    def changes(self) -> dict[int, Block]:
        """Return the reservations whose devices or width change, by job id."""
        changes = {}
        for job_id, block in self.changed.items():
            job = self.view.job(job_id)
            former = None if job is None else job.promised
            if former is not None and _place(former) != _place(block):
                changes[job_id] = block
        return changes


def _place(block: Block) -> tuple[Group, int | None, int]:
    return block.devices, block.slot, block.demand.width


def due(job: JobView) -> tuple[int, int]:
    assert job.promised is not None
    return job.promised.due_ns, job.job_id


def is_before(job: JobView, far_from: tuple[int, int] | None) -> bool:
    return far_from is None or due(job) < far_from
