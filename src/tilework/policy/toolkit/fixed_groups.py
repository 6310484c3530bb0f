"""Fills lanes of devices with works, for policies whose jobs keep their lane until another job takes it over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel, DeviceView, JobView
from tilework.core.work import Group, Plan, Start, Work
from tilework.cost.demand import usable_degree
from tilework.policy.toolkit.buddy_allocator import Allocator, nodes
from tilework.policy.toolkit.open_devices import WORKS_PER_DEVICE, has_room
from tilework.policy.toolkit.starts import steps_in_chunk


@dataclass(frozen=True, slots=True)
class Lane:
    """Devices of one node that serve one job at a time: steps on all of them, encode and decode on the first.

    No device is in two lanes.
    """

    devices: tuple[DeviceView, ...]
    ids: Group = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple([device.device_id for device in self.devices]))

    @property
    def num_works(self) -> int:
        if len(self.devices) == 1:
            return len(self.devices[0].works)
        return max([len(device.works) for device in self.devices])

    @property
    def free_ns(self) -> int:
        if len(self.devices) == 1:
            return self.devices[0].free_ns
        return max([device.free_ns for device in self.devices])


def open_lanes(view: ClusterView, groups: Iterable[Group]) -> list[Lane]:
    """Return the lanes of these groups that have room; under load most have none."""
    open_devices = {device.device_id: device for device in view.devices if has_room(device)}
    return [
        Lane(tuple([open_devices[device_id] for device_id in group]))
        for group in groups
        if all(device_id in open_devices for device_id in group)
    ]


@dataclass(slots=True)
class LaneDivision:
    """All devices divided into lanes of `degree`; they are divided again only when devices join or are lost.

    The remaining devices of a node are divided into narrower lanes.
    """

    degree: int = 1
    _devices: Sequence[DeviceView] | None = field(default=None, init=False)
    _lanes: Sequence[Lane] = field(default=(), init=False)

    def is_of(self, devices: Sequence[DeviceView]) -> bool:
        """Return whether the latest division is of these devices."""
        return self._devices is devices

    def lanes(self, devices: Sequence[DeviceView]) -> Sequence[Lane]:
        if self._devices is not devices:
            self._devices = devices
            self._lanes = _divided(devices, self.degree)
        return self._lanes


def _divided(devices: Sequence[DeviceView], degree: int) -> list[Lane]:
    """Return the devices of each node in groups of `degree`, aligned ones first; then of half of that, and so on."""
    if degree == 1:
        return [Lane((device,)) for device in devices]
    by_id = {device.device_id: device for device in devices}
    lanes = []
    for node in nodes(devices):
        allocator = Allocator([node])
        width = degree
        while width:
            while group := allocator.take(width):
                lanes.append(Lane(tuple([by_id[device_id] for device_id in group])))
            width //= 2
    return lanes


Pick = tuple[JobView, str]
"""The job that a lane works on next, and why."""


@dataclass(slots=True)
class LanePlan:
    """A plan under construction: the lanes with room, and the progress of each job after the starts so far."""

    view: ClusterView
    lanes: Sequence[Lane]
    costs: CostModel
    chunk_ns: int
    starts: list[Start] = field(default_factory=list)
    _cursors: dict[int, Cursor] = field(default_factory=dict)
    _tails: dict[int, JobView] = field(default_factory=dict)

    def plan(self, choose: Callable[[Lane], Pick | None]) -> Plan:
        """Give works to lanes, one after another, until `choose` picks nothing for any lane.

        Idle lanes come first, then those that end soonest, the widest, by id. A lane for which `choose` picks nothing
        once is not asked for again.
        """
        heap = [
            (num_works, lane.free_ns, -len(lane.devices), lane.ids, lane)
            for lane in self.lanes
            if (num_works := lane.num_works) < WORKS_PER_DEVICE
        ]
        heapify(heap)
        while heap:
            num_works, free_ns, width, ids, lane = heap[0]
            pick = choose(lane)
            if pick is not None:
                self._start(pick[0], lane, pick[1])
            if pick is not None and num_works + 1 < WORKS_PER_DEVICE:
                heapreplace(heap, (num_works + 1, free_ns, width, ids, lane))
            else:
                heappop(heap)
        return Plan(starts=tuple(self.starts))

    def continued(self, lane: Lane) -> JobView | None:
        """Return the job that the lane works on last, if some of its work remains to be started."""
        job = self._tails.get(lane.devices[0].device_id) or self._committed_tail(lane)
        if job is None:
            return None
        cursor = self._cursors.get(job.job_id)
        return job if (job.left.stage if cursor is None else cursor.stage) is not None else None

    def _committed_tail(self, lane: Lane) -> JobView | None:
        tail: Work | None = None
        for device in lane.devices:
            if device.works and (tail is None or device.works[-1].work_id > tail.work_id):
                tail = device.works[-1]
        if tail is None:
            return None
        job = self.view.job(tail.job_ids[0])
        # The last work may belong to a job that was cancelled, or restarted on other devices.
        return job if job is not None and job.works and job.works[-1] is tail else None

    def _start(self, job: JobView, lane: Lane, why: str) -> None:
        """Append the next piece of `job` to `lane`: a stage without steps, or a chunk of steps."""
        cursor = self._cursors.get(job.job_id) or job.left
        stage = cursor.stage
        degree = 1
        num_steps = 1
        assert stage is not None, f"job {job.job_id} has nothing left to start"
        if stage.has_steps:
            degree = usable_degree(job.request, len(lane.devices), self.costs)
            step_ns = self.costs.work_ns(stage, (job.request,), degree)
            num_steps = steps_in_chunk(cursor.num_left_here, step_ns, self.chunk_ns)
        self.starts.append(
            Start(stage=stage, job_ids=(job.job_id,), devices=lane.ids[:degree], num_steps=num_steps, why=why)
        )
        self._cursors[job.job_id] = cursor.advanced(num_steps)
        self._tails[lane.devices[0].device_id] = job
