"""Assigns devices at the end of each chunk, for policies that choose the group of a job for each chunk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tilework.core.policy import ClusterView, CostModel, DeviceView
from tilework.core.work import Group, Plan, Start
from tilework.cost.demand import Speed
from tilework.policy.toolkit.buddy_allocator import Allocator, nodes
from tilework.policy.toolkit.open_devices import LEAD_NS, is_open, next_open_ns
from tilework.policy.toolkit.starts import steps_in_chunk
from tilework.policy.toolkit.tasks import Task, tasks_at_hand


@dataclass(slots=True, eq=False)
class Placement:
    """A task and the group on which its next chunk runs."""

    task: Task
    group: Group
    why: str

    @property
    def degree(self) -> int:
        return len(self.group)

    @property
    def speed(self) -> Speed:
        return next(speed for speed in self.task.group_speeds if speed.degree == self.degree)


@dataclass(slots=True)
class DevicePool:
    """The devices and jobs at one time, and their groups for the next chunk.

    A device is *open* (`is_open`) when it is idle or will be within `LEAD_NS`; a job is *ready* when its works end by
    then. A policy places ready jobs on open devices, one after another, and asks to be woken when the next device
    opens. A device that is not open is *coming*: a job that needs more devices than are open may hold the
    open ones until others open.
    """

    view: ClusterView
    costs: CostModel
    now_ns: int
    chunk_ns: int
    allocator: Allocator = field(init=False)
    _devices: dict[int, DeviceView] = field(init=False)
    _coming: dict[int, DeviceView] = field(init=False)

    def __post_init__(self) -> None:
        self._devices = {device.device_id: device for device in self.view.devices}
        self._coming = {device.device_id: device for device in self.view.devices if not is_open(device, self.now_ns)}
        self.allocator = Allocator(
            nodes(device for device in self.view.devices if device.device_id not in self._coming)
        )

    def tasks(self) -> list[Task]:
        """Return the running jobs and the head of the queue, by urgency. Raises UnknownCost."""
        return tasks_at_hand(self.view, self.costs, self.now_ns)

    def is_ready(self, task: Task) -> bool:
        return task.ready_ns <= self.now_ns + LEAD_NS

    def widen(self, placement: Placement, width: int) -> bool:
        """Replace a group by a wider one; returns whether there was room."""
        preferred = placement.task.job.last_devices or placement.group
        wider = self.allocator.exchange(placement.group, width, preferred)
        placement.group = wider or placement.group
        return wider is not None

    # Devices that are coming.

    def keep(self, devices: Group) -> None:
        """Leave devices with their current jobs: no other job may wait for them."""
        for device_id in devices:
            self._coming.pop(device_id, None)

    def take_beside(self, group: Group, width: int) -> bool:
        """Take this many more devices of the pool of a group; returns whether that many were open."""
        pools = {self._devices[device_id].pool for device_id in group if device_id in self._devices}
        node = [device.device_id for device in self.view.devices if device.pool in pools]
        if self.allocator.num_free_of(node) < width:
            return False
        self.allocator.take_some(node, width)
        return True

    def hold(self, width: int, preferred: Group = ()) -> bool:
        """Hold open devices of a pool for a job that waits for `width` devices; False if no pool has that many.

        The pool is the one that has them first. Its open devices are held, and those that open soonest.
        """
        best: tuple[int, int, list[DeviceView]] | None = None
        for pool in sorted({device.pool for device in self._devices.values()}):
            num_open = self.allocator.num_free_of(self._ids_of(pool))
            coming = sorted(
                (device for device in self._coming.values() if device.pool == pool),
                key=lambda device: (device.device_id not in preferred, device.free_ns, device.device_id),
            )[: max(0, width - num_open)]
            if num_open + len(coming) >= width:
                come_ns = max([self.now_ns, *(device.free_ns for device in coming)])
                if best is None or (come_ns, pool) < best[:2]:
                    best = come_ns, pool, coming
        if best is None:
            return False
        _, pool, coming = best
        self.allocator.take_some(self._ids_of(pool), width - len(coming))
        self.keep(tuple(device.device_id for device in coming))
        return True

    def _ids_of(self, pool: int) -> list[int]:
        return [device.device_id for device in self.view.devices if device.pool == pool]

    # The plan.

    def plan(self, placements: Iterable[Placement]) -> Plan:
        starts = tuple(start for placement in placements for start in self._starts(placement))
        return Plan(starts=starts, wake_ns=next_open_ns(self.view.devices, self.now_ns))

    def _starts(self, placement: Placement) -> Iterable[Start]:
        task = placement.task
        num_steps = 0
        if task.num_steps:
            num_steps = steps_in_chunk(task.num_steps, placement.speed.step_ns, self.chunk_ns)
        return task.starts(placement.group, num_steps, placement.why)
