"""Filling lanes of GPUs with works: what the policies share that give a job one group until it is displaced.

A lane holds at most one running and one queued work, so that it never waits for the controller, and a more urgent job
waits for two chunks at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from tilework.core.interfaces import ClusterView, CostModel, DeviceView, JobView
from tilework.core.progress import Cursor
from tilework.core.work import DIFFUSE, Group, Start, Work
from tilework.policy.toolkit.demand import usable_degree

WORKS_PER_LANE = 2


@dataclass(frozen=True, slots=True)
class Lane:
    """GPUs of one node that serve one job at a time: steps on all of them, encode and decode on the first.

    No GPU is in two lanes.
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


def open_lanes(view: ClusterView, groups: Iterable[Group] | None = None) -> list[Lane]:
    """Lanes of these groups, by default of each device alone; only those with room, since under load most have none."""
    room = {device.device_id: device for device in view.devices if len(device.works) < WORKS_PER_LANE}
    if groups is None:
        return [Lane((device_id,)) for device_id in room.values()]
    return [
        Lane(tuple([room[device_id] for device_id in group]))
        for group in groups
        if all(device_id in room for device_id in group)
    ]


@dataclass(slots=True)
class Slots:
    """A plan under construction: which lane has room, and where each job stands after the starts so far."""

    view: ClusterView
    lanes: Sequence[Lane]
    costs: CostModel
    chunk_ns: int
    starts: list[Start] = field(default_factory=list)
    _cursors: dict[int, Cursor] = field(default_factory=dict)
    _tails: dict[int, JobView] = field(default_factory=dict)

    def continued(self, lane: Lane) -> JobView | None:
        """The job that the lane works on last, if something of it is left to start."""
        job = self._tails.get(lane.devices[0].device_id) or self._committed_tail(lane)
        if job is None:
            return None
        cursor = self._cursors.get(job.job_id)
        return job if (job.stage if cursor is None else cursor.stage) is not None else None

    def _committed_tail(self, lane: Lane) -> JobView | None:
        tail: Work | None = None
        for device in lane.devices:
            if device.works and (tail is None or device.works[-1].work_id > tail.work_id):
                tail = device.works[-1]
        if tail is None:
            return None
        job = self.view.job(tail.job_ids[0])
        # The last work may be a remnant of a job that was cancelled, or restarted elsewhere.
        return job if job is not None and job.works and job.works[-1] is tail else None

    def start(self, job: JobView, lane: Lane, why: str) -> None:
        """Append the next piece of `job` to `lane`: its encode, a chunk of steps, or its decode."""
        cursor = self._cursor(job)
        assert cursor.stage is not None, f"job {job.job_id} has nothing left to start"
        degree, num_steps = 1, 1
        if cursor.stage.name == DIFFUSE:
            degree = usable_degree(cursor.stage, len(lane.devices), self.costs)
            step_ns = self.costs.work_ns(cursor.stage, (job.request,), degree)
            num_steps = max(1, min(cursor.num_steps_left, self.chunk_ns // max(1, step_ns)))
        self.starts.append(
            Start(stage=cursor.stage, job_ids=(job.job_id,), devices=lane.ids[:degree], num_steps=num_steps, why=why)
        )
        self._cursors[job.job_id] = cursor.advanced(num_steps)
        self._tails[lane.devices[0].device_id] = job

    def _cursor(self, job: JobView) -> Cursor:
        return self._cursors.get(job.job_id) or Cursor(job.stage, job.num_steps_left)


Choice = tuple[JobView, str]


def fill(slots: Slots, choose: Callable[[Lane], Choice | None]) -> None:
    """Give free slots to what `choose` picks, one after another, until it picks nothing for any lane.

    Idle lanes come first, then those that end soonest, the widest, by id. A lane for which `choose` picks nothing once
    is not asked for again.
    """
    heap = [
        (num_works, lane.free_ns, -len(lane.devices), lane.ids, lane)
        for lane in slots.lanes
        if (num_works := lane.num_works) < WORKS_PER_LANE
    ]
    heapify(heap)
    while heap:
        num_works, free_ns, width, ids, lane = heap[0]
        choice = choose(lane)
        if choice is not None:
            slots.start(choice[0], lane, choice[1])
        if choice is not None and num_works + 1 < WORKS_PER_LANE:
            heapreplace(heap, (num_works + 1, free_ns, width, ids, lane))
        else:
            heappop(heap)
