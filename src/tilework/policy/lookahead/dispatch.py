"""Decides the next starts and stops of a node, from the first two moments of its rollout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from tilework.core.graph.progress import Cursor
from tilework.core.policy import CostModel, DeviceView, JobView
from tilework.core.work import NO_JOB, Group, Start
from tilework.cost.demand import fastest_degree, optimal_degree
from tilework.policy.lookahead.batch import Batch
from tilework.policy.lookahead.forecast import Claim, JobForecast
from tilework.policy.lookahead.node_jobs import CHUNKS, NodeJobs, group_of, is_idle, num_chunks
from tilework.policy.lookahead.rollout import RolloutResult
from tilework.policy.lookahead.selection import Selection
from tilework.policy.toolkit.buddy_allocator import Allocator
from tilework.policy.toolkit.starts import devices_text, explain, start_stage, start_steps, steps_in_chunk


@dataclass(slots=True)
class Dispatch:
    """The starts and stops of a node, from its selection.

    A job whose degree changes stops at its next step boundary and continues in its new group. A job that could be wider
    keeps its group until the devices are idle.

    A step cannot be interrupted, so two rules keep steps out of the way of the next change in the rollout. A job that
    is to get more devices then waits for them, if that is faster than another step on few. A job without a deadline
    begins no step that ends after that change, if other jobs are to have its devices.
    """

    selection: Selection
    costs: CostModel
    starts: list[Start] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    _node: NodeJobs = field(init=False)
    _result: RolloutResult = field(init=False)
    _allocator: Allocator = field(init=False)
    _ends_ns: dict[int, float] = field(default_factory=dict, init=False)  # Ends of the jobs that begin now, by device.

    @property
    def left(self) -> list[DeviceView]:
        """The idle devices that no job gets, and that are held for none."""
        return [one for one in self._node.devices if self._allocator.num_free_of((one.device_id,))]

    def decide(self) -> None:
        """Fill `starts` and `stops`."""
        chosen = self.selection.share_steps()
        batches = self.selection.sharing.batches
        self._node = self.selection.node
        self._result = chosen.result
        self._allocator = Allocator([[device.device_id for device in self._node.devices if is_idle(device)]])
        for forecast, degree, then in zip(chosen.order, chosen.result.degrees, chosen.result.then, strict=True):
            job = self._node.jobs.get(forecast.job_id)
            if job is None:
                continue
            if forecast in batches:
                self._serve_batch(batches[forecast], forecast, degree, then)
            elif not job.works:
                self._begin(job, forecast, degree, then)
            elif _shares_works(job):
                self._hold(degree)
            elif job.is_stopping:
                self._hold(degree - len(group_of(job)))
            else:
                self._continue(job, forecast, degree, then)

    def _serve_batch(self, batch: Batch, forecast: JobForecast, degree: int, then: int) -> None:
        """Begin a batch, or commit its next chunks. Half of it leaves where a device is idle."""
        running = [member.job for member in batch.members if member.job.works]
        if not degree:
            return
        if degree > 1 and self._allocator.num_free():
            batch = batch.split()[0]
            self._hold(1)
        group: Group | None = running[0].last_devices if running else self._allocator.take(1, ())
        if group is None:
            self._hold(1)
            return
        if self._is_to_be_measured(group):
            return
        step_ns = round(self._node.step_time(batch.stage, [member.job.request for member in batch.members]))
        most = self._most_steps(forecast, 1, step_ns, int(batch.ready_ns), min(then, 1))
        num_new = max(0, CHUNKS - max(map(num_chunks, running), default=0))
        self.starts += batch.starts(group[0], num_new, most, self._node.chunk_ns, f"gets {devices_text(1)}")

    def _begin(self, job: JobView, forecast: JobForecast, degree: int, then: int) -> None:
        """Start a job that waits; a feasible one also on fewer devices than planned, if it is on time with these."""
        if not degree:
            return
        if self._node.load_ns is not None and self._begins_sooner_after_another(job, forecast):
            return
        preferred = self._preferred(job)
        group = self._allocator.take(degree, preferred)
        if group is None and forecast.claim is Claim.FEASIBLE:
            least = forecast.needed_degree(self._node.now_ns)
            room = self._allocator.num_free()
            fitting = [speed.degree for speed in forecast.speeds if least <= speed.degree <= room]
            group = self._allocator.take(fitting[-1], preferred) if fitting else None
        if group is None:
            self._hold(degree)
        else:
            self._note_end(job, forecast, group)
            self.starts += self._works(job, forecast, group, CHUNKS, then)

    def _begins_sooner_after_another(self, job: JobView, forecast: JobForecast) -> bool:
        """Return whether another device will have run its new job before an idle one has loaded for this job.

        It then waits for that device (see `NodeJobs.await_devices`), and the idle one is left to others.
        """
        node = self._node
        load_ns = node.load_ns
        assert load_ns is not None
        later = [
            (self._ends_ns[device.device_id] + load_ns(job, device), device.device_id)
            for device in node.devices
            if device.device_id in self._ends_ns
        ]
        idle = [device for device in node.devices if self._allocator.num_free_of((device.device_id,))]
        if not later or not idle:
            return False
        begin_ns, device_id = min(later)
        if begin_ns >= node.now_ns + min(load_ns(job, device) for device in idle):
            return False
        self._ends_ns[device_id] = begin_ns + forecast.usual_ns - forecast.load_ns
        return True

    def _note_end(self, job: JobView, forecast: JobForecast, group: Group) -> None:
        """Note when a job that begins now on a group will have ended."""
        load_ns = self._node.load_ns
        if load_ns is not None:
            loads_ns = [load_ns(job, device) for device in self._node.devices if device.device_id in group]
            end_ns = self._node.now_ns + max(loads_ns) + forecast.usual_ns - forecast.load_ns
            self._ends_ns.update(dict.fromkeys(group, end_ns))

    def _preferred(self, job: JobView) -> Group:
        """Return the idle devices that load least for a job, of these the emptiest, which drop least for it.

        Where none loads anything, those that it had last.
        """
        load_ns = self._node.load_ns
        if load_ns is None:
            return job.last_devices
        idle = [device for device in self._node.devices if self._allocator.num_free_of((device.device_id,))]
        loads = {device.device_id: load_ns(job, device) for device in idle}
        if not any(loads.values()):
            return job.last_devices
        room = {device.device_id: _room(device) for device in idle}
        best = min((each_ns, -room[device_id]) for device_id, each_ns in loads.items())
        return tuple(device_id for device_id, each_ns in loads.items() if (each_ns, -room[device_id]) == best)

    def _continue(self, job: JobView, forecast: JobForecast, degree: int, then: int) -> None:
        """Change the degree of a running job, or commit its next chunk."""
        group = group_of(job)
        extra = degree - len(group)
        if job.job_id in self._node.leaving:
            self.stops.append(job.job_id)
        elif job.may_stop and (extra < 0 or 0 < extra <= self._allocator.num_free()):
            self.stops.append(job.job_id)
            self._hold(extra)
        elif job.left.stage is not None and not self._is_to_be_measured(group):
            self.starts += self._works(job, forecast, group, max(0, CHUNKS - num_chunks(job)), then)

    def _is_to_be_measured(self, group: Group) -> bool:
        """Return whether a measurement waits for the works of a device of the group."""
        queues = [device.works for device in self._node.devices if device.device_id in group]
        return any(works and NO_JOB in works[-1].job_ids for works in queues)

    def _hold(self, width: int) -> None:
        """Keep idle devices for a job that waits for others to become idle, too."""
        if width > 0:
            self._allocator.take_some([device.device_id for device in self._node.devices], width)

    def _works(self, job: JobView, forecast: JobForecast, group: Group, max_chunks: int, then: int) -> Iterator[Start]:
        """Yield chunks of steps on the group, and the stages without steps before and after them on a part of it."""
        cursor = job.left
        why = explain(job, _verb(forecast, len(group)), self._node.now_ns)
        step_ns = next((speed.step_ns for speed in forecast.speeds if speed.degree == len(group)), 0)
        begin_ns = self._node.ready_ns(job) if job.works else self._node.now_ns + int(forecast.head_ns)
        most = self._most_steps(forecast, len(group), step_ns, begin_ns, then)
        if most == 0:
            return
        while cursor.stage is not None:
            num_steps = 1
            if not cursor.stage.has_steps:
                yield start_stage(cursor.stage, (job.job_id,), self._part(job, cursor, group), why)
            elif max_chunks and most:
                num_steps = steps_in_chunk(min(cursor.num_left_here, most), step_ns, self._node.chunk_ns)
                max_chunks -= 1
                most -= num_steps
                yield start_steps(cursor.stage, (job.job_id,), group, num_steps, why)
            else:
                return
            cursor = cursor.advanced(num_steps)

    def _part(self, job: JobView, cursor: Cursor, group: Group) -> Group:
        """Return the devices of a group that run the next stage without steps.

        Before steps it is the first device, and after all steps as many as are optimal. If no job waits, or if the
        group is for that alone, they are as many as make it end first.
        """
        stage = cursor.stage
        if stage is None or not stage.is_parallel or cursor.num_steps_left:
            return group[:1]
        is_alone = not job.works and not job.left.num_steps_left
        is_awaited = not is_alone and any(not one.works for one in self._node.jobs.values() if one is not job)
        degree_of = optimal_degree if is_awaited else fastest_degree
        degree = degree_of(stage, job.request, self.costs, len(group))
        if self._node.load_ns is None or degree == len(group):
            return group[:degree]
        room = {device.device_id: _room(device) for device in self._node.devices}
        return tuple(sorted(sorted(group, key=lambda device_id: -room[device_id])[:degree]))

    def _most_steps(self, forecast: JobForecast, degree: int, step_ns: int, begin_ns: int, then: int) -> int:
        """Return how many steps a job may begin now at this degree, given the next change in the rollout."""
        next_ns = self._result.next_ns
        if not step_ns or then == degree or next_ns == inf:
            return sys.maxsize
        room_ns = next_ns - begin_ns
        if room_ns >= step_ns:
            return int(room_ns // step_ns)
        if then > degree:
            wide_ns = next(speed.step_ns for speed in forecast.speeds if speed.degree == then)
            return 0 if room_ns < step_ns - wide_ns else 1
        is_needed = any(other.claim is Claim.FEASIBLE for other in self._node.forecasts)
        return 0 if forecast.claim > Claim.FEASIBLE and is_needed else 1


def _room(device: DeviceView) -> float:
    """Return the bytes that a device has for further components."""
    free_bytes = device.memory.free_bytes
    return inf if free_bytes is None else free_bytes


def _shares_works(job: JobView) -> bool:
    return any(len(work.job_ids) > 1 for work in job.works)


def _verb(forecast: JobForecast, degree: int) -> str:
    devices = devices_text(degree)
    match forecast.claim:
        case Claim.FEASIBLE:
            return f"is on time with {devices}"
        case Claim.DEFERRED:
            return f"gets {devices} that no other job needs; to be on time, it would have to make others late"
        case _:
            return f"gets {devices}"
