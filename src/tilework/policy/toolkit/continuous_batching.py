"""Batches that are formed anew at the ends of chunks: what the policies share that run several requests per forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tilework.core.interfaces import ClusterView, CostModel, Demand, DeviceView, JobView
from tilework.core.progress import Cursor
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import DIFFUSE, ENCODE, Plan, StageId, Start
from tilework.policy.toolkit.demand import demand_at
from tilework.policy.toolkit.elastic_groups import is_open, next_open_ns
from tilework.policy.toolkit.order import by_urgency, jobs_at_hand

MOST_AHEAD = 4  # Works that an open device is told; the steps wait if those who begin and end are more.


@dataclass(slots=True)
class Crowd:
    """The jobs of one device: those that have begun there, and those that were sent there and wait; by urgency."""

    device_id: DeviceView
    begun: list[JobView] = field(default_factory=list)
    waiting: list[JobView] = field(default_factory=list)

    def take_ended(self) -> list[JobView]:
        """Take out those that have made all their steps; one whose device was lost then waits on another."""
        ended = [job for job in self.begun + self.waiting if not job.num_steps_left]
        self.begun, self.waiting = ([job for job in jobs if job.num_steps_left] for jobs in (self.begun, self.waiting))
        return ended


@dataclass(frozen=True, slots=True)
class Choice:
    """Who makes the next steps together, and who cannot be on time any more, each with the reason in words."""

    members: Sequence[JobView]
    late: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True, kw_only=True)
class Batching(ABC):
    """Each device has a batch of its own, which jobs join and leave between chunks of steps.

    A newcomer is sent to the device that has the least left to do, and stays there (data parallelism, PatchedServe
    §8.2). Who makes steps with whom, `choose` says. A chunk ends when its first member has made all steps.
    """

    chunk_ns: int = 200 * NS_PER_MS
    _homes: dict[int, int] = field(default_factory=dict, init=False)

    @abstractmethod
    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int: ...

    @abstractmethod
    def choose(self, crowd: Crowd, costs: CostModel, begin_ns: int) -> Choice:
        """Who makes steps from `begin_ns` on, of a device that has somebody; nobody only if some are late."""

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (1,)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        """As if it were alone on its device."""
        return demand_at(request, left, 1, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """A plan that sets jobs aside starts nothing, and is asked for again."""
        starts: list[Start] = []
        late: list[tuple[int, str]] = []
        for crowd in self._crowds(view):
            if not is_open(crowd.device_id, now_ns):
                continue
            ended = crowd.take_ended()
            members: Sequence[JobView] = ()
            if crowd.begun or crowd.waiting:
                choice = self.choose(crowd, costs, max(now_ns, crowd.device_id.free_ns))
                members, late = choice.members, late + list(choice.late)
            starts += islice(self._starts(ended, members, crowd.device_id, costs), MOST_AHEAD)
        if late:
            return Plan(dropped_to_best_effort=tuple(late))
        return Plan(starts=tuple(starts), wake_ns=next_open_ns(view.devices, now_ns))

    def _crowds(self, view: ClusterView) -> Sequence[Crowd]:
        """Of each device, with everybody who is there and has something left that may be started."""
        crowds = {device.device_id: Crowd(device) for device in view.devices}
        loads_ns = {device.device_id: device.free_ns for device in view.devices}
        newcomers: list[JobView] = []
        homes, self._homes = self._homes, {}
        for job in sorted(jobs_at_hand(view, None), key=by_urgency):
            if job.stage is None or job.is_stopping:
                continue
            if job.last_devices and job.last_devices[0] in crowds:
                crowds[job.last_devices[0]].begun.append(job)
                loads_ns[job.last_devices[0]] += _load_ns(job)
            elif homes.get(job.job_id) in crowds:
                self._homes[job.job_id] = home = homes[job.job_id]
                crowds[home].waiting.append(job)
                loads_ns[home] += _load_ns(job)
            else:
                newcomers.append(job)
        for job in newcomers if crowds else ():
            self._homes[job.job_id] = home = min(loads_ns, key=lambda device_id: (loads_ns[device_id], device_id))
            crowds[home].waiting.append(job)
            loads_ns[home] += _load_ns(job)
        return tuple(crowds.values())

    def _starts(
        self, ended: Sequence[JobView], members: Sequence[JobView], device: DeviceView, costs: CostModel
    ) -> Iterator[Start]:
        """Decodes of those who have made all steps, encodes of those who begin, and then steps of all members."""
        on = (device.device_id,)
        for job in ended:
            assert job.stage is not None
            yield Start(stage=job.stage, job_ids=(job.job_id,), devices=on, num_steps=1, why="has made all its steps")
        for job in members:
            if job.stage is not None and job.stage.name == ENCODE:
                yield Start(stage=job.stage, job_ids=(job.job_id,), devices=on, num_steps=1, why="joins the batch")
        if not members:
            return
        others = len(members) - 1
        why = f"makes steps with {others} other{'s' if others > 1 else ''}" if others else "makes steps alone"
        stage, requests = StageId(members[0].request.pipeline, DIFFUSE), [job.request for job in members]
        step_ns = costs.work_ns(stage, requests, 1)
        num_steps = max(1, min(self.chunk_ns // max(1, step_ns), *(job.num_steps_left for job in members)))
        yield Start(
            stage=stage, job_ids=tuple([job.job_id for job in members]), devices=on, num_steps=num_steps, why=why
        )


def together(jobs: Iterable[JobView], costs: CostModel) -> list[JobView]:
    """The first of these jobs, and all that may make steps with those before them."""
    batch: list[JobView] = []
    for job in jobs:
        if may_join(batch, job, costs):
            batch.append(job)
    return batch


def may_join(batch: Sequence[JobView], job: JobView, costs: CostModel) -> bool:
    """Whether a job may make steps with a batch; with nobody it always may."""
    if not batch:
        return True
    if job.request.pipeline != batch[0].request.pipeline or not (job.may_share and batch[0].may_share):
        return False
    shapes = [member.request.shape for member in (*batch, job)]
    return costs.fits_together(StageId(job.request.pipeline, DIFFUSE), shapes)


def _load_ns(job: JobView) -> int:
    """What the device has to do for a job; nothing for one that must wait for the others anyway."""
    return 0 if job.dropped_to_best_effort else job.demand.run_ns
