"""The state of the cluster: jobs, devices, works in flight. It records what was decided and decides nothing itself."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from tilework.control.cluster.device import Device, Now
from tilework.control.cluster.job import Job
from tilework.control.cluster.load import Load
from tilework.control.cluster.queue import WaitingQueue
from tilework.core.interfaces import Ahead, Block, CostModel, Held, Policy
from tilework.core.request import Request
from tilework.core.work import DIFFUSE, Group, StageId, Start, Work
from tilework.policy.toolkit.demand import reserved_at


class Tracker:
    """A `ClusterView` to policies and a `Backlog` to admission.

    A job is in `waiting` exactly when none of its works is in flight and it is not parked. A work stays in flight
    until its devices have reported on it or are all lost, even when its job has ended or begun another attempt
    meanwhile.
    """

    def __init__(self, policy: Policy, costs: CostModel) -> None:
        self.jobs: dict[int, Job] = {}
        self.job_ids: dict[str, int] = {}
        self.works: dict[int, Work] = {}
        self._by_id: dict[int, Device] = {}
        self._policy = policy
        self._costs = costs
        self._waiting = WaitingQueue()
        self._load = Load()
        self._promised: list[Job] = []
        self._reserved: list[Block] = []  # The blocks of these, as if none had works.
        self._busy: dict[int, Job] = {}
        self._parked: dict[int, Job] = {}
        self._sorted_devices: tuple[Device, ...] = ()
        self._num_on_node: Counter[int] = Counter()
        self.widest = 0
        self._next_work_id = 1
        self._now = Now()

    # What policies and admission see.

    @property
    def devices(self) -> Sequence[Device]:
        return self._sorted_devices

    def device(self, device_id: int) -> Device | None:
        """The device with this id; None while it is down."""
        return self._by_id.get(device_id)

    def is_busy(self, device_id: int) -> bool:
        """Whether this device is up and has a work."""
        return device_id in self._by_id and bool(self._by_id[device_id].works)

    def waiting(self) -> Iterable[Job]:
        return self._waiting

    def job(self, job_id: int) -> Job | None:
        return None if job_id in self._parked else self.jobs.get(job_id)

    def num_jobs(self) -> int:
        return len(self.jobs)

    def num_waiting(self) -> int:
        return len(self._waiting)

    def held(self, tenant: str | None = None) -> Held:
        return self._load.held(tenant)

    def rivals_weight(self, tenant: str) -> float:
        return self._load.rivals_weight(tenant)

    def delay_ns(self, request: Request, dropped_to_best_effort: bool = False) -> int:
        return self._load.delay_ns(request, dropped_to_best_effort, len(self._sorted_devices))

    def waiting_ahead(self, urgency_ns: int, job_id: int | None = None) -> Ahead:
        return self._waiting.ahead(_key(urgency_ns, job_id))

    def running_ahead(self, urgency_ns: int, job_id: int | None = None) -> Sequence[Block]:
        key = _key(urgency_ns, job_id)
        busy = [job for job in self._busy.values() if (job.urgency_ns, job.job_id) < key and job.demand.run_ns]
        busy.sort(key=lambda job: (job.urgency_ns, job.job_id))
        return [Block(job.urgency_ns, self._end_ns(job.works[-1]), job.demand) for job in busy]

    def promised(self) -> Sequence[Job]:
        return self._promised

    def reserved(self) -> list[Block]:
        blocks = list(self._reserved)
        for job in self._busy.values():
            if job.promised is not None:
                blocks[self._rank(job)] = replace(job.promised, ready_ns=self._end_ns(job.works[-1]))
        return blocks

    # What the controller records.

    def at(self, now_ns: int) -> None:
        """Set the time of the event that is being handled."""
        self._now.ns = now_ns

    def add_device(self, device_id: int, node: int, stages: frozenset[StageId]) -> None:
        assert device_id not in self._by_id, f"device {device_id} has joined before"
        self._by_id[device_id] = device = Device(device_id=device_id, node=node, stages=stages, now=self._now)
        place = self._place(device_id)
        self._sorted_devices = (*self._sorted_devices[:place], device, *self._sorted_devices[place:])
        self._num_on_node[node] += 1
        self.widest = max(self.widest, self.widest_now)

    def remove_device(self, device_id: int, reported: Set[int]) -> list[Work]:
        """Forget a device; returns the works whose whole group is lost by it, which are no longer in flight.

        How those that are `reported` have ended is known, though not recorded yet: they are not lost.
        """
        device, place = self._by_id.pop(device_id), self._place(device_id)
        self._sorted_devices = self._sorted_devices[:place] + self._sorted_devices[place + 1 :]
        self._num_on_node[device.node] -= 1
        for job in device.residents.values():
            job.leave(device_id)
        open_works = [work for work in device.works if work.work_id not in reported]
        lost = [work for work in open_works if not any(self._carries(member, work) for member in work.devices)]
        for work in lost:
            del self.works[work.work_id]
        return lost

    def _carries(self, device_id: int, work: Work) -> bool:
        """Whether a device still has this work; one that was lost and came back has not."""
        return device_id in self._by_id and self._by_id[device_id].has(work)

    def _place(self, device_id: int) -> int:
        """Of a device among those that are up."""
        return bisect_left(self._sorted_devices, device_id, key=lambda device: device.device_id)

    @property
    def widest_now(self) -> int:
        """The most devices of a node that are up."""
        return max(self._num_on_node.values(), default=0)

    def add_job(self, job: Job) -> None:
        self.jobs[job.job_id] = job
        self.job_ids[job.request.uid] = job.job_id
        self._load.enter(job)
        if job.promised is not None:
            self._promised.insert(rank := self._rank(job), job)
            self._reserved.insert(rank, job.promised)
        self._wait(job)

    def remove_job(self, job: Job) -> None:
        """Forget a job that has come to its end; works of it may still be in flight."""
        self._leave(job)
        self._release(job)
        self._evict(job)
        self._load.leave(job)
        del self.jobs[job.job_id], self.job_ids[job.request.uid]

    def drop_to_best_effort(self, job: Job, urgency_ns: int, delay_ns: int) -> None:
        """Serve a job from now on in the order of those that cannot be on time; its reservation is given up."""
        was_waiting = job in self._waiting
        if was_waiting:
            self._waiting.remove(job)
        self._load.leave(job)
        job.dropped_to_best_effort, job.urgency_ns, job.delay_ns = True, urgency_ns, delay_ns
        self._load.enter(job)
        self._release(job)
        if was_waiting:
            self._waiting.add(job)

    def park(self, job: Job) -> None:
        """Let a waiting job wait outside the queue, where no policy sees it; its promise is given up."""
        self._waiting.remove(job)
        self._release(job)
        self._parked[job.job_id] = job

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def unpark(self) -> None:
        """Devices or what is known of memory have changed: parked jobs wait like others again."""
        for job in tuple(self._parked.values()):
            self._leave(job)
            self._wait(job)

    def restart(self, job: Job, *, from_start: bool) -> None:
        """Begin a job's next attempt; works of its former one may still be in flight."""
        self._leave(job)
        self._evict(job)
        job.restart(from_start)
        self._wait(job)

    def commit(self, start: Start) -> Work:
        """Number a start, check that it is legal, and put it in flight. An illegal start is a bug of the policy."""
        jobs = [self.jobs[job_id] for job_id in start.job_ids]
        for job in jobs:
            _check(job, start)
        _check_members(jobs, start)
        devices = [self._by_id[device_id] for device_id in start.devices]
        assert len({device.node for device in devices}) == 1, f"the group {start.devices} spans nodes"
        work = Work(
            work_id=self._next_work_id,
            stage=start.stage,
            job_ids=start.job_ids,
            attempts=tuple([job.attempt for job in jobs]),
            first_steps=tuple([job.request.steps - job.num_steps_left for job in jobs]),
            devices=start.devices,
            num_steps=start.num_steps,
            why=start.why,
            after=tuple(sorted({device.works[-1].work_id for device in devices if device.works})),
            sliced=any(self._costs.needs_slices(start.stage, job.request.shape) for job in jobs),
        )
        self._next_work_id += 1
        for job in jobs:
            if not job.works:
                self._waiting.remove(job)
            job.begin(work)
            job.last_devices = start.devices
            self._busy[job.job_id] = job
            self._predict(job)
        self._occupy(devices, work, jobs)
        return work

    def _occupy(self, devices: list[Device], work: Work, jobs: list[Job]) -> None:
        """Put a work on its devices; it begins when the last of them is free and the works before it have ended."""
        begin_ns = max([device.free_ns for device in devices])
        for job in jobs:
            if len(job.works) > 1 and job.works[-2].devices != work.devices:
                begin_ns = max(begin_ns, self._end_ns(job.works[-2]))
        requests = [job.request for job in jobs]
        end_ns = begin_ns + self._costs.work_ns(work.stage, requests, len(work.devices), work.num_steps)
        for device in devices:
            device.push(work, end_ns)
        self.works[work.work_id] = work

    def _end_ns(self, work: Work) -> int:
        return max(
            [self._by_id[device_id].end_ns(work) for device_id in work.devices if device_id in self._by_id], default=0
        )

    def end_work(self, work: Work, steps_done: int) -> list[Job]:
        """Take a work out of flight; returns those of its jobs that it still belongs to, advanced by it."""
        del self.works[work.work_id]
        for device_id in work.devices:
            if device_id in self._by_id:
                self._by_id[device_id].pop(work)
        jobs = self.members(work)
        for job in jobs:
            job.end(work, steps_done)
            job.failures = 0 if steps_done else job.failures
            if not job.works:
                self._busy.pop(job.job_id)
                if job.done.stage is not None:
                    self._wait(job)
        return jobs

    def sharing(self, job: Job) -> list[Job]:
        """A job and those that share works in flight with it, or with one of these."""
        found = {job.job_id: job}
        queue = [job]
        for one in queue:
            others = {other.job_id: other for work in one.works for other in self.members(work)}
            queue += [other for job_id, other in others.items() if job_id not in found]
            found |= others
        return queue

    def stop(self, jobs: Sequence[Job]) -> list[Work]:
        """Expect the works of jobs to end at their next step boundary; returns those to stop, the last one first.

        A stage without steps that is running runs to its end. No work may have other members.
        """
        for job in jobs:
            job.is_stopping, job.has_advanced = True, False
        works = {work.work_id: work for job in jobs for work in job.works if work.work_id in self.works}
        stopped = [works[work_id] for work_id in sorted(works, reverse=True)]
        for work in stopped:
            left_ns = self._to_boundary_ns(work)
            if left_ns is not None:
                for device_id in work.devices:
                    if device_id in self._by_id:
                        self._by_id[device_id].shorten(work, left_ns)
        return stopped

    def _to_boundary_ns(self, work: Work) -> int | None:
        """How long a work runs that is told to stop; None: to its end."""
        if any(
            self._carries(device_id, work) and self._by_id[device_id].works[0] is not work for device_id in work.devices
        ):
            return 0
        if work.stage.name != DIFFUSE:
            return None
        requests = [job.request for job in self.members(work)]
        step_ns = self._costs.work_ns(work.stage, requests, len(work.devices)) if requests else 0
        return (self._end_ns(work) - self._now.ns) % step_ns if step_ns else None

    def awaited(self, work: Work) -> Work | None:
        """The first earlier work of one of its jobs that has not been reported on, if there is one."""
        for job in self.members(work):
            if job.works[0] is not work:
                return job.works[0]
        return None

    def hold(self, job: Job, devices: Group) -> None:
        """These devices will have something of a job from now on."""
        job.holders.update(devices)
        for device_id in devices:
            residents = self._by_id[device_id].residents
            residents.pop(job.job_id, None)
            residents[job.job_id] = job

    def let_go(self, job: Job, device_id: int) -> None:
        """A device has nothing of a job any more."""
        del self._by_id[device_id].residents[job.job_id]
        job.leave(device_id)

    def residents_beyond(self, device_id: int, most: int) -> Sequence[Job]:
        """Jobs without works, the oldest first, to let go so that this device keeps something of `most` if possible."""
        residents = self._by_id[device_id].residents
        if len(residents) <= most:
            return ()
        idle = [job for job in residents.values() if not job.works]
        return idle[: len(residents) - most]

    def members(self, work: Work) -> list[Job]:
        """The jobs that a work still belongs to: neither ended nor in another attempt."""
        return [
            job
            for job_id, attempt in zip(work.job_ids, work.attempts, strict=True)
            if (job := self.jobs.get(job_id)) is not None and job.attempt == attempt
        ]

    def reserve(self, job: Job, width: int, group: Group) -> None:
        """Reserve a block of this width on this group for what a promised job still needs; () if none is chosen."""
        assert job.request.deadline_ns is not None
        demand = reserved_at(job.request, job.committed, width, self._costs)
        job.promised = self._reserved[self._rank(job)] = Block(job.request.deadline_ns, 0, demand, group)

    def _release(self, job: Job) -> None:
        """Give up what is reserved for a job."""
        if job.promised is not None:
            job.promised, rank = None, self._rank(job)
            del self._promised[rank], self._reserved[rank]

    def _rank(self, job: Job) -> int:
        """The place of a promised job among them."""
        return bisect_left(self._promised, _due(job), key=_due)

    def _predict(self, job: Job) -> None:
        demand = self._policy.demand(job.request, job.committed, self._costs)
        self._load.change(job, demand)
        job.demand = demand
        if job.promised is not None:
            self.reserve(job, job.promised.demand.width, job.promised.devices)

    def _wait(self, job: Job) -> None:
        self._predict(job)
        self._waiting.add(job)

    def _evict(self, job: Job) -> None:
        for device_id in tuple(job.holders):
            self.let_go(job, device_id)

    def _leave(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        self._busy.pop(job.job_id, None)
        self._parked.pop(job.job_id, None)


def _key(urgency_ns: int, job_id: int | None) -> tuple[int, int]:
    """The place of a job in the order of service; a newcomer's is behind those of the same urgency."""
    return (urgency_ns + 1, -1) if job_id is None else (urgency_ns, job_id)


def _due(job: Job) -> tuple[int, int]:
    assert job.request.deadline_ns is not None
    return job.request.deadline_ns, job.job_id


def _check(job: Job, start: Start) -> None:
    committed, diffuse = job.committed, start.stage.name == DIFFUSE
    assert committed.stage == start.stage, f"job {job.job_id} is at {committed.stage}, not at {start.stage}"
    limit = committed.num_steps_left if diffuse else 1
    assert 1 <= start.num_steps <= limit, f"job {job.job_id} has {limit} steps left, not {start.num_steps}"
    assert list(start.devices) == sorted(set(start.devices)), f"the group {start.devices} is not sorted"
    assert diffuse or len(start.devices) == 1, (
        f"{start.stage} of job {job.job_id} is to run on {len(start.devices)} devices"
    )
    assert not job.is_stopping, f"the works of job {job.job_id} have been told to end, and have not all done so"


def _check_members(jobs: Sequence[Job], start: Start) -> None:
    if len(jobs) == 1:
        return
    assert len(set(start.job_ids)) == len(jobs), f"a job is twice among {start.job_ids}"
    assert start.stage.name == DIFFUSE, f"{start.stage} is to run for {len(jobs)} jobs at a time"
    assert len(start.devices) == 1, f"{len(jobs)} jobs are to share their steps on {len(start.devices)} devices"
    for job in jobs:
        assert job.may_share, f"works of job {job.job_id} fail, and it is to share one"
