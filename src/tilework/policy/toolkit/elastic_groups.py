"""Handing out devices at the ends of chunks: what the policies share that choose the group anew for each chunk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tilework.core.interfaces import ClusterView, CostModel, DeviceView
from tilework.core.time import NS_PER_MS
from tilework.core.work import Group, Plan, Start
from tilework.policy.toolkit.buddy_allocator import Allocator, nodes
from tilework.policy.toolkit.demand import Speed
from tilework.policy.toolkit.tasks import Task, tasks_at_hand

LEAD_NS = 10 * NS_PER_MS
ONE_DEVICE = Speed(1, 0)


def is_open(device: DeviceView, now_ns: int) -> bool:
    """Whether a device is idle, or will be so soon that it is told now what comes next, and no bubble opens.

    At most one work may be under way: with an encode, a chunk and a decode, three more are told ahead.
    """
    return device.free_ns <= now_ns + LEAD_NS and len(device.works) < 2


def next_open_ns(devices: Iterable[DeviceView], now_ns: int) -> int | None:
    """When the next device opens, unless it is by an event."""
    opens_ns = [device.free_ns - LEAD_NS for device in devices if len(device.works) == 1]
    return min((at_ns for at_ns in opens_ns if at_ns > now_ns), default=None)


@dataclass(slots=True, eq=False)
class Placed:
    """A task and the group on which its next chunk runs."""

    task: Task
    group: Group
    why: str

    @property
    def degree(self) -> int:
        return len(self.group)

    @property
    def speed(self) -> Speed:
        """Of a job without steps, that of one device, at no time."""
        return next(speed for speed in self.task.speeds or (ONE_DEVICE,) if speed.degree == self.degree)


@dataclass(slots=True)
class Pool:
    """The devices and jobs at one time, and who of them gets together for a chunk.

    A device is *open* (`is_open`) when it is idle or will be within `LEAD_NS`; a job is *ready* when its works end by
    then. A policy places ready jobs on open devices, one after another, and asks to be woken when the next device
    opens. A device that is not open is *coming*: a job that needs more devices than are open may hold those that are
    until others have come.
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
        """The running jobs and the head of the queue, by urgency. Raises UnknownCost."""
        return tasks_at_hand(self.view, self.costs, self.now_ns)

    def is_ready(self, task: Task) -> bool:
        return task.ready_ns <= self.now_ns + LEAD_NS

    def widen(self, placed: Placed, width: int) -> bool:
        """Trade a group for a wider one, if there is room."""
        former = placed.group
        self.allocator.give(former)
        wider = self.allocator.take(width, placed.task.job.last_devices or former)
        placed.group = wider or self.allocator.take(len(former), former) or former
        return wider is not None

    # Devices that are coming.

    def keep(self, devices: Group) -> None:
        """These devices go on with what they have: nobody may wait for them."""
        for device_id in devices:
            self._coming.pop(device_id, None)

    def take_beside(self, group: Group, width: int) -> bool:
        """Take so many more devices of the node of a group, if they are open."""
        nodes_of = {self._devices[device_id].node for device_id in group if device_id in self._devices}
        node = [device.device_id for device in self.view.devices if device.node in nodes_of]
        if self.allocator.num_free_of(node) < width:
            return False
        self.allocator.take_some(node, width)
        return True

    def hold(self, width: int, preferred: Group = ()) -> bool:
        """Hold open devices of a node for somebody who waits until `width` have come; False if so many never come.

        The node is chosen in which they have come first, its open devices and then those that come soonest.
        """
        best: tuple[int, int, list[DeviceView]] | None = None
        for node in sorted({device.node for device in self._devices.values()}):
            num_open = self.allocator.num_free_of(
                [device.device_id for device in self.view.devices if device.node == node]
            )
            coming = sorted(
                (device for device in self._coming.values() if device.node == node),
                key=lambda device: (device.device_id not in preferred, device.free_ns, device.device_id),
            )[: max(0, width - num_open)]
            if num_open + len(coming) >= width:
                come_ns = max([self.now_ns, *(device.free_ns for device in coming)])
                if best is None or (come_ns, node) < best[:2]:
                    best = come_ns, node, coming
        if best is None:
            return False
        _, node, coming = best
        self.allocator.take_some(
            [device.device_id for device in self.view.devices if device.node == node], width - len(coming)
        )
        self.keep(tuple(device.device_id for device in coming))
        return True

    # The plan.

    def plan(self, placed: Iterable[Placed]) -> Plan:
        starts = tuple(start for one in placed for start in self._starts(one))
        return Plan(starts=starts, wake_ns=next_open_ns(self.view.devices, self.now_ns))

    def _starts(self, placed: Placed) -> Iterable[Start]:
        task = placed.task
        num_steps = max(1, self.chunk_ns // max(1, placed.speed.step_ns)) if task.num_steps else 0
        return task.starts(placed.group, min(task.num_steps, num_steps), placed.why)
