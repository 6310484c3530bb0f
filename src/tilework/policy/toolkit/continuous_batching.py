"""Batches that are formed again at the end of each chunk, for policies that run several requests per forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tilework.core.block import Demand
from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel, DeviceView, JobView
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan, Start
from tilework.cost.demand import demand_at
from tilework.policy.toolkit.open_devices import is_open, next_open_ns
from tilework.policy.toolkit.order import by_urgency, jobs_at_hand
from tilework.policy.toolkit.starts import start_at_once, start_steps, steps_in_chunk

MOST_AHEAD = 4  # Works sent to an open device at once; if more jobs begin and end, the steps wait.


@dataclass(slots=True)
class DeviceQueue:
    """The jobs of one device: those that have begun there, and those that are assigned to it and wait; by urgency."""

    device: DeviceView
    load_ns: int
    begun: list[JobView] = field(default_factory=list)
    waiting: list[JobView] = field(default_factory=list)

    @property
    def jobs(self) -> list[JobView]:
        return self.begun + self.waiting

    def add(self, job: JobView, has_begun: bool) -> None:
        """Add a job. One that is dropped to best effort adds no load: it must wait for the others anyway."""
        (self.begun if has_begun else self.waiting).append(job)
        self.load_ns += 0 if job.dropped_to_best_effort else job.demand.run_ns

    def take_ended(self) -> list[JobView]:
        """Take out the jobs that have made all their steps; after the loss of their device they wait on another."""
        ended = [job for job in self.jobs if not job.left.num_steps_left]
        self.begun = [job for job in self.begun if job.left.num_steps_left]
        self.waiting = [job for job in self.waiting if job.left.num_steps_left]
        return ended


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """The jobs that make the next steps together, and those that can no longer be on time, each with the reason."""

    members: Sequence[JobView]
    late: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True, kw_only=True)
class ContinuousBatching(ABC):
    """Each device has a batch of its own, which jobs join and leave between chunks of steps.

    A new job is assigned to the device that has the least remaining work, and stays there (data parallelism,
    PatchedServe §8.2). `choose` says which jobs make steps together. A chunk ends when its first member has made all
    its steps.
    """

    chunk_ns: int = 200 * NS_PER_MS
    _device_of: dict[int, int] = field(default_factory=dict, init=False)

    @abstractmethod
    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int: ...

    @abstractmethod
    def choose(self, queue: DeviceQueue, costs: CostModel, begin_ns: int) -> BatchChoice:
        """Choose the jobs of a queue, not empty, that make steps from `begin_ns` on; none only if some are late."""

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (1,)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        """Return the remaining work as if the request were alone on its device."""
        return demand_at(request, left, 1, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """Return the next starts. A plan that drops jobs to best effort starts nothing, and is asked for again."""
        starts: list[Start] = []
        late: list[tuple[int, str]] = []
        for queue in self._queues(view):
            device = queue.device
            if not is_open(device, now_ns):
                continue
            ended = queue.take_ended()
            members: Sequence[JobView] = ()
            if queue.begun or queue.waiting:
                choice = self.choose(queue, costs, max(now_ns, device.free_ns))
                members = choice.members
                late += list(choice.late)
            starts += islice(self._starts(ended, members, device.device_id, costs), MOST_AHEAD)
        if late:
            return Plan(dropped_to_best_effort=tuple(late))
        return Plan(starts=tuple(starts), wake_ns=next_open_ns(view.devices, now_ns))

    def _queues(self, view: ClusterView) -> Sequence[DeviceQueue]:
        """Return the queue of each device, with all its jobs that have remaining work and may be started."""
        queues = {device.device_id: DeviceQueue(device, device.free_ns) for device in view.devices}
        new: list[JobView] = []
        former, self._device_of = self._device_of, {}
        for job in sorted(jobs_at_hand(view, None), key=by_urgency):
            if job.left.stage is None or job.is_stopping:
                continue
            if job.last_devices and job.last_devices[0] in queues:
                queues[job.last_devices[0]].add(job, has_begun=True)
            elif former.get(job.job_id) in queues:
                self._assign(job, queues[former[job.job_id]])
            else:
                new.append(job)
        for job in new if queues else ():
            self._assign(job, min(queues.values(), key=lambda queue: (queue.load_ns, queue.device.device_id)))
        return tuple(queues.values())

    def _assign(self, job: JobView, queue: DeviceQueue) -> None:
        self._device_of[job.job_id] = queue.device.device_id
        queue.add(job, has_begun=False)

    def _starts(
        self, ended: Sequence[JobView], members: Sequence[JobView], device_id: int, costs: CostModel
    ) -> Iterator[Start]:
        """Yield the last stages of the jobs that have made all steps, the first stages of members, then the steps."""
        for job in ended:
            yield from start_at_once(job.left, job.job_id, device_id, "has made all its steps")
        for job in members:
            yield from start_at_once(job.left, job.job_id, device_id, "joins the batch")
        if not members:
            return
        others = len(members) - 1
        why = f"makes steps with {others} other{'s' if others > 1 else ''}" if others else "makes steps alone"
        stage = members[0].left.stepped
        assert stage is not None
        step_ns = costs.work_ns(stage, [job.request for job in members], 1)
        num_steps = steps_in_chunk(min(job.left.num_steps for job in members), step_ns, self.chunk_ns)
        yield start_steps(stage, tuple([job.job_id for job in members]), (device_id,), num_steps, why)


def first_batch(jobs: Iterable[JobView], costs: CostModel) -> list[JobView]:
    """Return the first of these jobs, and all others that may make steps with those before them."""
    batch: list[JobView] = []
    for job in jobs:
        if may_join(batch, job, costs):
            batch.append(job)
    return batch


def may_join(batch: Sequence[JobView], job: JobView, costs: CostModel) -> bool:
    """Return whether a job may make steps with a batch; an empty batch takes any job."""
    if not batch:
        return True
    stage = job.left.stepped
    if stage is None or stage != batch[0].left.stepped or not stage.spec.batchable:
        return False
    if not (job.may_share and batch[0].may_share):
        return False
    return costs.fits_together(stage, [member.request.shape for member in (*batch, job)])
