"""Batches that are formed anew at the ends of chunks: what the policies share that run several requests per forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilework.core.interfaces import ClusterView, CostModel, Demand, GpuView, JobView
from tilework.core.progress import Cursor
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import DECODE, DIFFUSE, ENCODE, Plan, StageId, Start
from tilework.policy.demand import demand_at
from tilework.policy.order import by_urgency, jobs_at_hand
from tilework.policy.pool import is_open, next_open_ns


@dataclass(slots=True)
class Crowd:
    """The jobs of one device: those that have begun there, and those that were sent there and wait; by urgency."""

    gpu: GpuView
    begun: list[JobView] = field(default_factory=list)
    waiting: list[JobView] = field(default_factory=list)


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
    max_members: int = 12
    _homes: dict[int, int] = field(default_factory=dict, init=False)

    @abstractmethod
    def urgency_ns(self, request: Request, set_aside: bool, delay_ns: int = 0) -> int: ...

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
            if not is_open(crowd.gpu, now_ns):
                continue
            starts += (_end(job, crowd.gpu) for job in crowd.begun if not job.num_steps_left)
            crowd.begun = [job for job in crowd.begun if job.num_steps_left]
            if crowd.begun or crowd.waiting:
                choice = self.choose(crowd, costs, max(now_ns, crowd.gpu.free_ns))
                late += choice.late
                starts += self._chunk(choice.members, crowd.gpu, costs)
        if late:
            return Plan(set_aside=tuple(late))
        return Plan(starts=tuple(starts), wake_ns=next_open_ns(view.gpus, now_ns))

    def _crowds(self, view: ClusterView) -> Sequence[Crowd]:
        """Of each device, with everybody who is there and has something left that may be started."""
        crowds = {gpu.gpu: Crowd(gpu) for gpu in view.gpus}
        loads_ns = {gpu.gpu: gpu.free_ns for gpu in view.gpus}
        newcomers: list[JobView] = []
        homes, self._homes = self._homes, {}
        for job in sorted(jobs_at_hand(view, None), key=by_urgency):
            if job.stage is None or job.is_stopping:
                continue
            if job.last_gpus and job.last_gpus[0] in crowds:
                crowds[job.last_gpus[0]].begun.append(job)
                loads_ns[job.last_gpus[0]] += _load_ns(job)
            elif homes.get(job.job_id) in crowds:
                self._homes[job.job_id] = home = homes[job.job_id]
                crowds[home].waiting.append(job)
                loads_ns[home] += _load_ns(job)
            else:
                newcomers.append(job)
        for job in newcomers if crowds else ():
            self._homes[job.job_id] = home = min(loads_ns, key=lambda gpu: (loads_ns[gpu], gpu))
            crowds[home].waiting.append(job)
            loads_ns[home] += _load_ns(job)
        return tuple(crowds.values())

    def _chunk(self, members: Sequence[JobView], gpu: GpuView, costs: CostModel) -> Iterator[Start]:
        """Encodes of those who begin, steps of all, decodes of those who have none left then."""
        if not members:
            return
        on, others = (gpu.gpu,), len(members) - 1
        why = f"makes steps with {others} other{'s' if others > 1 else ''}" if others else "makes steps alone"
        for job in members:
            if job.stage is not None and job.stage.name == ENCODE:
                yield Start(stage=job.stage, job_ids=(job.job_id,), gpus=on, num_steps=1, why="joins the batch")
        stage, requests = StageId(members[0].request.pipeline, DIFFUSE), [job.request for job in members]
        step_ns = costs.work_ns(stage, requests, 1)
        num_steps = max(1, min(self.chunk_ns // max(1, step_ns), *(job.num_steps_left for job in members)))
        yield Start(stage=stage, job_ids=tuple([job.job_id for job in members]), gpus=on, num_steps=num_steps, why=why)
        for job in members:
            if job.num_steps_left == num_steps:
                yield _end(job, gpu)

    def joined(self, members: Sequence[JobView], more: Sequence[JobView], costs: CostModel) -> list[JobView]:
        """Members, and as many of `more`, in their order, as may make steps with them."""
        batch = list(members)
        for job in more:
            if len(batch) == self.max_members:
                break
            if not batch or may_join(batch, job, costs):
                batch.append(job)
        return batch


def may_join(batch: Sequence[JobView], job: JobView, costs: CostModel) -> bool:
    """Whether a job can make steps with a batch, as far as pipelines and memory go."""
    return job.request.pipeline == batch[0].request.pipeline


def _end(job: JobView, gpu: GpuView) -> Start:
    stage = StageId(job.request.pipeline, DECODE)
    return Start(stage=stage, job_ids=(job.job_id,), gpus=(gpu.gpu,), num_steps=1, why="has made all its steps")


def _load_ns(job: JobView) -> int:
    """What the device has to do for a job; nothing for one that must wait for the others anyway."""
    return 0 if job.set_aside else job.demand.run_ns
