"""Fills lanes of devices with works, for policies whose jobs keep their lane until another job takes it over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from tilework.core.graph.progress import Cursor
from tilework.core.interfaces import ClusterView, CostModel, JobView
from tilework.core.work import Plan, Start, Work
from tilework.cost.demand import usable_degree
from tilework.policy.toolkit.open_devices import WORKS_PER_DEVICE, Lane
from tilework.policy.toolkit.starts import steps_in_chunk

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
        """The job that the lane works on last, if some of its work remains to be started."""
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
        # The last work may belong to a job that was cancelled, or restarted on other devices.
        return job if job is not None and job.works and job.works[-1] is tail else None

    def _start(self, job: JobView, lane: Lane, why: str) -> None:
        """Append the next piece of `job` to `lane`: a stage without steps, or a chunk of steps."""
        cursor = self._cursors.get(job.job_id) or job.left
        stage, degree, num_steps = cursor.stage, 1, 1
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
