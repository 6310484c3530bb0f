"""The state of the cluster: jobs, devices, works in flight. It records decisions and makes none itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from tilework.admission.contract import Ahead, Boundary, Held, Moment, ReservationChanges, Running
from tilework.admission.loads import reserve
from tilework.control.cluster.device import Device, Now
from tilework.control.cluster.device_set import DeviceSet
from tilework.control.cluster.job import Job
from tilework.control.cluster.life import HAS_WORKS, JobEvent, JobState
from tilework.control.cluster.load import Load
from tilework.control.cluster.load_sources import LoadSources
from tilework.control.cluster.promises import Promises
from tilework.control.cluster.queue import WaitingQueue, WaitingQueues
from tilework.control.cluster.residents import Residents
from tilework.control.cluster.start_check import check_start
from tilework.control.cluster.stops import StoppedEnd, Stops
from tilework.core.block import Block
from tilework.core.component import Memory
from tilework.core.graph.stage import DeviceKind, Stage, StageSpec
from tilework.core.policy import Policy
from tilework.core.pools import Within, may_run
from tilework.core.request import Request
from tilework.core.time import NEVER_NS, START_MARGINS
from tilework.core.work import NO_JOB, Group, Member, Start, Work
from tilework.cost.table_costs import TableCosts

NO_COMPONENTS = Memory()
_NO_MEMBER = (Member(NO_JOB, 0, 0, 0),)
_MEASURED = Stage("", "measure", StageSpec(name="measure"))


class Occupation(NamedTuple):
    """Devices that a measurement takes, and the works that stand for the measurement."""

    devices: Group
    works: tuple[Work, ...]


class Overrun(NamedTuple):
    """Time by which a work ended after its last predicted end, less than 0 if before; and its predicted duration."""

    by_ns: int
    predicted_ns: int


class Tracker:
    """A `ClusterView` to policies and a `Backlog` to admission.

    The state of a job (see `life`) says where it is kept. One that waits is in `waiting` if its next stage runs on an
    accelerator, in `for_slots` if on a CPU slot. A work stays in flight until its devices have reported on it or are
    all lost, even when its job has ended or begun another attempt meanwhile.
    """

    def __init__(self, policy: Policy, costs: TableCosts) -> None:
        self.jobs: dict[int, Job] = {}
        self.job_ids: dict[str, int] = {}
        self.works: dict[int, Work] = {}
        self._policy = policy
        self._costs = costs
        self._now = Now()
        self._devices = DeviceSet(self._now)
        self.residents = Residents(self._devices)
        self.sources = LoadSources(costs.weights, self._devices)
        self._stops = Stops(costs, self._devices, self._now)
        self._waiting = WaitingQueues(costs)
        self.for_slots = WaitingQueue()
        self._load = Load()
        self._promises = Promises()
        self._busy: dict[int, Job] = {}
        self._parked: dict[int, Job] = {}
        self.next_work_id = 1
        self._num_changes = 0  # Changes of the jobs that have works or wait for CPU slots.
        self._alone: frozenset[int] = frozenset()  # Accelerators that form no groups.
        self.is_linking = False
        self.margins = START_MARGINS
        self._firsts: set[int] = set()  # Works in flight of classes that were not measured when they were committed.
        self.silent_nodes = frozenset[int]()
        self._lacking: set[int] = set()  # Devices that lack a component, or the memory for all.
        self.needs_loads = False

    # Queries of policies and admission.

    @property
    def devices(self) -> Sequence[Device]:
        return self._devices.ordered

    def on_node(self, node: int) -> Sequence[Device]:
        return self._devices.on_node(node)

    @property
    def slots(self) -> Sequence[Device]:
        return self._devices.slots

    @property
    def up(self) -> Mapping[int, Device]:
        """All devices that are up, by id: accelerators, CPU slots, and cordoned devices."""
        return self._devices.by_id

    def widest(self, pipeline: str) -> int:
        return self._devices.widest(self._costs.pools.within(pipeline))

    def widest_now(self, pipeline: str) -> int:
        """Return the largest number of devices of one pool that are up, of those that serve a pipeline."""
        return self._devices.widest_now(self._costs.pools.within(pipeline))

    @property
    def silent(self) -> frozenset[int]:
        nodes = self.silent_nodes
        return frozenset(one.device_id for one in self.up.values() if one.node in nodes) if nodes else nodes

    def device(self, device_id: int) -> Device | None:
        """Return the device with this id; None while it is down or gets no works."""
        device = self._devices.by_id.get(device_id)
        return None if device is None or device.is_cordoned else device

    def is_busy(self, device_id: int) -> bool:
        """Return whether this device is up and has a work."""
        device = self._devices.by_id.get(device_id)
        return device is not None and bool(device.works)

    def needs_preparation(self, devices: Group, beside_bytes: int) -> bool:
        """Return whether something must be loaded, dropped or waited for before a work on these devices.

        The work needs `beside_bytes` on each beyond its weights.
        """
        if self.needs_loads:
            return True
        group = [self._devices.by_id[device_id] for device_id in devices]
        return any(
            one.loads or (one.memory.free_bytes is not None and one.memory.free_bytes < beside_bytes) for one in group
        )

    def waiting(self) -> Iterable[Job]:
        return self._waiting

    def most_urgent(self, per_pool: int) -> Sequence[Job]:
        return self._waiting.first(lambda within: per_pool * self._devices.num_pools(within))

    def job(self, job_id: int) -> Job | None:
        return None if job_id in self._parked else self.jobs.get(job_id)

    def num_waiting(self) -> int:
        return len(self._waiting) + len(self.for_slots)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def held(self, tenant: str | None = None) -> Held:
        return self._load.held(tenant)

    def promised_to(self, tenant: str) -> Held:
        return self._promises.held(tenant)

    def rivals_weight(self, tenant: str) -> float:
        return self._load.rivals_weight(tenant)

    def delay_ns(self, request: Request, dropped_to_best_effort: bool = False) -> int:
        return self._load.delay_ns(request, dropped_to_best_effort, len(self._devices.ordered))

    def waiting_ahead(self, urgency_ns: int, job_id: int | None = None, within: Within = None) -> Ahead:
        return self._waiting.ahead(_key(urgency_ns, job_id), lambda theirs: self._devices.share(theirs, within))

    @property
    def moment(self) -> Moment:
        is_fixed = self._devices.is_fixed and not self.for_slots
        return Moment(self._num_changes, self._devices.num_changes, None if is_fixed else self._now.ns)

    def taken_ns(self) -> int:
        return self._devices.free_times.taken_ns()

    def free_ns(self, within: Within = None) -> list[int]:
        if within is None:
            return self._devices.free_times.ascending()
        return sorted(device.free_ns for device in self._devices.ordered if device.device_id in within)

    def running(self, within: Within = None) -> list[Running]:
        begun = [job for job in (*self._busy.values(), *self.for_slots) if job.demand.run_ns]
        if within is not None:
            begun = [job for job in begun if any(may_run(within, device_id) for device_id in job.last_devices)]
        return sorted(Running(_key(job.urgency_ns, job.job_id), self._ready_ns(job), job.demand) for job in begun)

    def _ready_ns(self, job: Job) -> int:
        return self._devices.end_ns(job.works[-1]) if job.works else self._now.ns

    def promised(self) -> Sequence[Job]:
        return self._promises.jobs

    def reserved(self, most: int | None = None) -> list[Block]:
        blocks = self._promises.blocks[:most]
        last_ns = blocks[-1].due_ns if blocks else 0
        for due_ns, job_id, block in self._begun(last_ns):
            index = self._promises.index((due_ns, job_id))
            if index < len(blocks):
                blocks[index] = block
        return blocks

    def begun_reservations(self) -> list[tuple[int, int, Block]]:
        return list(self._begun(NEVER_NS))

    def _begun(self, last_ns: int) -> Iterator[tuple[int, int, Block]]:
        """Yield the reservations of jobs with works that are due by then."""
        for job in self._busy.values():
            block = job.promised
            if block is not None and block.due_ns <= last_ns:
                yield block.due_ns, job.job_id, block.after(self._devices.end_ns(job.works[-1]))

    def reservation_changes(self, since: int) -> ReservationChanges:
        return self._promises.changes(since)

    # Devices.

    def set_time(self, now_ns: int) -> None:
        """Set the time of the event that is being handled."""
        self._now.ns = now_ns

    def add_device(
        self,
        device_id: int,
        node: int,
        kind: DeviceKind = DeviceKind.ACCELERATOR,
        memory: Memory = NO_COMPONENTS,
    ) -> None:
        pool = self._pool(node, device_id)
        device = Device(device_id=device_id, node=node, pool=pool, kind=kind, now=self._now, memory=memory)
        self._devices.add(device)
        self.sources.changed(node)
        if kind is DeviceKind.ACCELERATOR:
            self._check_device(device)

    def set_memory(self, device_id: int, memory: Memory) -> None:
        """Note the components that a device will have, and renew the reservations that relied on the dropped ones."""
        device = self._devices.by_id[device_id]
        before, after = set(device.memory.components), set(memory.components)
        device.memory = memory
        dropped = before - after
        if before != after:
            self.sources.changed(device.node)
            self._check_device(device)
        for job in tuple(self._promises.jobs) if dropped else ():
            block = job.promised
            if block is not None and block.unloaded is not None and device_id in block.devices:
                self._update_reservation(job)

    def models_changed(self) -> None:
        """Note that other models are served, or need other components."""
        self._devices.regroup(lambda device: self._pool(device.node, device.device_id))
        self.check_loads()

    def change_links(self, alone: Group, *, is_linking: bool) -> None:
        """Note which accelerators form no groups, each a pool of its own, and whether that changes soon."""
        self._alone = frozenset(alone)
        self.is_linking = is_linking
        self._devices.regroup(lambda device: self._pool(device.node, device.device_id), for_good=False)

    def _pool(self, node: int, device_id: int) -> int:
        return -1 - device_id if device_id in self._alone else self._costs.pools.number(node, device_id)

    def check_loads(self) -> None:
        """Note that components of devices, or the needs of stages, have changed."""
        self.sources.changed()
        self._lacking.clear()
        self.needs_loads = False
        for device in self._devices.ordered:
            self._check_device(device)

    def _check_device(self, device: Device) -> None:
        memory = device.memory
        wanted = self._costs.weights.all
        has_room = memory.total_bytes is None or self._costs.weights.most_bytes <= memory.total_bytes
        if has_room and memory.has(wanted):
            self._lacking.discard(device.device_id)
        elif wanted:
            self._lacking.add(device.device_id)
        self.needs_loads = bool(self._lacking)

    def remove_device(self, device_id: int, reported: Set[int]) -> list[Work]:
        """Forget a device; returns the works that are lost with it because no other device has them.

        Works that are `reported` are not lost: their ends are known, though not recorded yet.
        """
        device = self._devices.remove(device_id)
        self._empty(device)
        works = [work for work in device.works if work.work_id in self.works]  # Not a measurement.
        open_works = [work for work in works if work.work_id not in reported]
        lost = [work for work in open_works if not self._devices.is_carried(work)]
        for work in lost:
            del self.works[work.work_id]
            self._firsts.discard(work.work_id)
        return lost

    def cordon(self, device_id: int) -> None:
        """Give a device that is up no further works. It ends its works; no job relies on what it keeps."""
        self._empty(self._devices.cordon(device_id))

    def _empty(self, device: Device) -> None:
        """Let no job rely on what a device keeps of it, and no longer count the components that the device lacks."""
        for job in device.residents.values():
            job.remove_device(device.device_id)
        device.residents.clear()
        self.sources.changed(device.node)
        self._lacking.discard(device.device_id)
        self.needs_loads = bool(self._lacking)

    # Jobs.

    def add_job(self, job: Job) -> None:
        """Let a new job wait. Its `demand` is that of its remaining work."""
        self.jobs[job.job_id] = job
        self.job_ids[job.request.uid] = job.job_id
        self._load.enter(job)
        if job.promised is not None:
            self._promises.add(job, job.promised)
            self._update_reservation(job)
        self._enter(job)

    def remove_job(self, job: Job) -> None:
        """Forget a job that ends; works of it may still be in flight."""
        self._leave(job)
        job.change(JobEvent.END)
        self._promises.remove(job)
        self.residents.evict(job)
        self._load.leave(job)
        del self.jobs[job.job_id], self.job_ids[job.request.uid]

    def drop_to_best_effort(self, job: Job, urgency_ns: int, delay_ns: int) -> None:
        """Move a job to its place among best-effort jobs, and give up its reservation."""
        self._num_changes += 1
        if job.state is JobState.WAITING:
            self._leave(job)
        self._load.leave(job)
        job.dropped_to_best_effort = True
        job.urgency_ns = urgency_ns
        job.delay_ns = delay_ns
        self._load.enter(job)
        self._promises.remove(job)
        if job.state is JobState.WAITING:
            self._enter(job)

    def use_cache(self, job: Job) -> None:
        """Let the steps of a job that are not committed use its spare cache."""
        self._num_changes += 1
        if job.state is JobState.WAITING:
            self._leave(job)
        job.use_cache(self._costs.start(job.request.with_spare_cache).itinerary)
        self._update_demand(job)
        if job.state is JobState.WAITING:
            self._enter(job)

    def park(self, job: Job) -> None:
        """Take a waiting job out of the queue, where no policy sees it, and give up its reservation."""
        self._num_changes += 1
        self._leave(job)
        job.change(JobEvent.PARK)
        self._promises.remove(job)
        self._enter(job)

    def unpark(self) -> None:
        """Return all parked jobs to the queue, because devices or memory limits have changed."""
        for job in tuple(self._parked.values()):
            self._leave(job)
            job.change(JobEvent.UNPARK)
            self._update_demand(job)
            self._enter(job)

    def restart(self, job: Job, position: int | None) -> None:
        """Begin a job's next attempt, from `done` or from this earlier position.

        Works of its former attempt may still be in flight.
        """
        self._leave(job)
        self.residents.evict(job)
        job.restart(position)
        self._update_demand(job)
        self._enter(job)

    def reserve(self, job: Job, width: int, devices: Group = (), slot: int | None = None) -> None:
        """Reserve the remaining work of a promised job, in this width and on these devices (see `Block`)."""
        assert job.promised is not None
        memories, by_id = None, self._devices.by_id
        if self.needs_loads:
            memories = [by_id[device_id].memory for device_id in devices if device_id in by_id]
        within = self._costs.pools.within(job.request.pipeline)
        block = Block(job.promised.due_ns, 0, job.promised.demand, devices, slot, within=within)
        self._promises.replace(job, reserve(block, job.request, job.committed, width, memories, self._costs))

    def reserve_all(self, blocks: Mapping[int, Block]) -> None:
        """Reserve the remaining work of promised jobs, by id, in the width and on the devices of these blocks."""
        for job_id, block in blocks.items():
            self.reserve(self.jobs[job_id], block.demand.width, block.devices, block.slot)

    def _update_demand(self, job: Job) -> None:
        demand = self._policy.demand(job.request, job.committed, self._costs)
        self._load.change(job, demand)
        job.demand = demand
        self._update_reservation(job)

    def _update_reservation(self, job: Job) -> None:
        if job.promised is not None:
            self.reserve(job, job.promised.demand.width, job.promised.devices, job.promised.slot)

    def _enter(self, job: Job) -> None:
        """Keep a job among those of its state."""
        match job.state:
            case JobState.WAITING:
                queue = self._queue_of(job)
                queue.add(job)
                self._num_changes += queue is self.for_slots
            case JobState.RUNNING | JobState.STOPPING:
                self._busy[job.job_id] = job
            case JobState.PARKED:
                self._parked[job.job_id] = job

    def _leave(self, job: Job) -> None:
        """Take a job from those of its state, before it changes."""
        match job.state:
            case JobState.WAITING:
                queue = self._queue_of(job)
                queue.remove(job)
                self._num_changes += queue is self.for_slots
            case JobState.RUNNING | JobState.STOPPING:
                del self._busy[job.job_id]
                self._num_changes += 1
            case JobState.PARKED:
                del self._parked[job.job_id]

    def _queue_of(self, job: Job) -> WaitingQueue:
        """Return the queue in which a job waits for the devices of its next stage."""
        stage = job.committed.stage
        return self.for_slots if stage is not None and stage.kind is DeviceKind.CPU else self._waiting.of(job.request)

    # Works.

    def commit(self, start: Start) -> Work:
        """Number a start, check that it is legal, and put it in flight."""
        jobs = [self.jobs[job_id] for job_id in start.job_ids]
        requests = [job.request for job in jobs]
        devices = [self._devices.by_id[device_id] for device_id in start.devices]
        check_start(jobs, start, devices, self._costs.pools)
        work = Work(
            work_id=self.next_work_id,
            stage=start.stage,
            members=tuple(
                [Member(one.job_id, one.attempt, one.committed.position, one.committed.num_steps_done) for one in jobs]
            ),
            devices=start.devices,
            num_steps=start.num_steps,
            why=start.why,
            after=tuple(sorted({one.works[-1].work_id for one in devices if one.works} & self.works.keys())),
            sliced=any(self._costs.needs_slices(start.stage, one.shape) and not one.exact for one in requests),
        )
        self.next_work_id += 1
        self._num_changes += 1
        for job in jobs:
            if job.state is JobState.WAITING:
                self._leave(job)
            job.begin(work)
            job.last_devices = start.devices
            self._enter(job)
            self._update_demand(job)
        self._occupy(devices, work, jobs, requests)
        return work

    def _occupy(self, devices: list[Device], work: Work, jobs: list[Job], requests: list[Request]) -> None:
        """Put a work on its devices. It begins when all are free and have loaded, and its jobs' earlier works ended."""
        begin_ns = max([device.idle_ns + device.load_ns(work.work_id) for device in devices])
        for job in jobs:
            if len(job.works) > 1 and job.works[-2].devices != work.devices:
                begin_ns = max(begin_ns, self._devices.end_ns(job.works[-2]))
        end_ns = begin_ns + self._costs.work_ns(work.stage, requests, len(work.devices), work.num_steps)
        for device in devices:
            device.push(work, end_ns)
        self.works[work.work_id] = work
        if not self._costs.has_measured(work.stage, requests, len(work.devices)):
            self._firsts.add(work.work_id)

    def occupy(self, devices: Group, run_ns: int, *, is_closed: bool) -> Occupation:
        """Let a measurement take devices for this time, when all have ended their works.

        Policies see it as a work of a job that has ended. That work is not in flight: nothing reports on it. If
        `is_closed`, a second such work keeps all works away, since a policy queues one work after the running one.
        """
        there = [self._devices.by_id[device_id] for device_id in devices]
        end_ns = max(device.idle_ns for device in there) + run_ns
        works = tuple(self._stand_in(devices) for _ in range(2 if is_closed else 1))
        for work in works:
            for device in there:
                device.push(work, end_ns)
        return Occupation(devices, works)

    def _stand_in(self, devices: Group) -> Work:
        self.next_work_id += 1
        return Work(
            work_id=self.next_work_id - 1,
            stage=_MEASURED,
            members=_NO_MEMBER,
            devices=devices,
            num_steps=1,
            why="a model is measured",
        )

    def vacate(self, occupation: Occupation) -> None:
        """Free the devices that a measurement takes, as far as they are still there."""
        for device_id in occupation.devices:
            for work in occupation.works if device_id in self._devices.by_id else ():
                self._devices.by_id[device_id].pop(work)

    def end_work(self, work: Work, steps_done: int) -> list[Job]:
        """Take a work out of flight; returns the jobs that it still belongs to, advanced by its steps."""
        del self.works[work.work_id]
        self._firsts.discard(work.work_id)
        self._num_changes += 1
        up = self._devices.by_id
        for device_id in work.devices:
            if device_id in up:
                device = up[device_id]
                if device.loads:
                    device.release_loads(work, self._costs.weights.components, has_run=bool(steps_done))
                    self.sources.changed(device.node)
                device.pop(work)
        jobs = self.members(work)
        for job in jobs:
            job.end(work, steps_done)
            if steps_done:
                job.failures = 0
                job.last_error = ""
            if job.state not in HAS_WORKS:
                del self._busy[job.job_id]
                if job.state is JobState.WAITING:
                    self._update_demand(job)
                    self._enter(job)
        return jobs

    def overrun(self, work: Work) -> Overrun | None:
        """Return how late a work is that ends now; None if that says nothing about other works.

        It says nothing if the work has not begun, or waited for loads: reservations assume loads from the slowest
        source. Nor if no work of its class had ended before it was committed: it corrects the table, and may record or
        compile what later works use.
        """
        there = [self._devices.by_id[one] for one in work.devices if self._devices.carries(one, work)]
        if (
            not there
            or work.work_id in self._firsts
            or any(device.works[0] is not work or device.has_loaded(work) for device in there)
        ):
            return None
        end_ns = max(device.head_ns for device in there)
        return Overrun(self._now.ns - end_ns, max(0, end_ns - max(device.head_from_ns for device in there)))

    def members(self, work: Work) -> list[Job]:
        """Return the jobs that a work still belongs to: neither ended nor in another attempt."""
        return [
            job for one in work.members if (job := self.jobs.get(one.job_id)) is not None and job.attempt == one.attempt
        ]

    def awaited(self, work: Work) -> Work | None:
        """Return the first earlier work of one of its jobs that was not reported yet; None if there is none."""
        for job in self.members(work):
            if job.works[0] is not work:
                return job.works[0]
        return None

    def sharing(self, job: Job) -> list[Job]:
        """Return a job and all jobs that share works in flight with it, directly or through other jobs."""
        found = {job.job_id: job}
        queue = [job]
        for one in queue:
            others = {other.job_id: other for work in one.works for other in self.members(work)}
            queue += [other for job_id, other in others.items() if job_id not in found]
            found |= others
        return queue

    def boundaries(self) -> list[Boundary]:
        found = []
        seen: set[int] = set()
        for job in self._busy.values():
            if job.job_id not in seen:
                jobs = self.sharing(job)
                seen.update(one.job_id for one in jobs)
                boundary = self.boundary(jobs) if all(one.may_stop for one in jobs) else None
                if boundary is not None:
                    found.append(boundary)
        return found

    def boundary(self, jobs: Sequence[Job]) -> Boundary | None:
        """Return the positions of these jobs if they were told to stop now; None if that is not known.

        It is not known if other works wait behind theirs on a device, or if one of theirs is on a CPU slot.
        """
        works = self._in_flight(jobs)
        ends = self._stops.ends_of(works, self._requests_of)
        free_ns: dict[int, int] = {}
        for work in works:
            for device_id in work.devices:
                device = self._devices.by_id.get(device_id)
                if device is None or device.kind is DeviceKind.CPU or not ends.keys() >= {*device.work_ids}:
                    return None
                free_ns[device_id] = max(free_ns.get(device_id, self._now.ns), ends[work.work_id].end_ns)
        positions = {job.job_id: self._position_at(job, ends) for job in jobs}
        return Boundary(positions, max(free_ns.values(), default=self._now.ns), free_ns)

    def stop(self, jobs: Sequence[Job]) -> list[Work]:
        """Expect the works of jobs to end at their next step boundary; returns the works to stop, the last one first.

        A running stage without steps runs to its end. The works must not have other members.
        """
        works = self._in_flight(jobs)
        ends = self._stops.ends_of(works, self._requests_of)
        for work in reversed(works):
            self._stops.shorten(work, ends)
        for job in jobs:
            job.stop_at(self._position_at(job, ends))
            self._update_demand(job)
        return works[::-1]

    def _in_flight(self, jobs: Sequence[Job]) -> list[Work]:
        """Return the works of these jobs that have not ended, in order."""
        works = {work.work_id: work for job in jobs for work in job.works if work.work_id in self.works}
        return [works[work_id] for work_id in sorted(works)]

    def _requests_of(self, work: Work) -> list[Request]:
        return [job.request for job in self.members(work)]

    def _position_at(self, job: Job, ends: Mapping[int, StoppedEnd]) -> int:
        """Return the position of a job when its works have ended like this."""
        return job.done.position + sum(ends[work.work_id].num_done for work in job.works if work.work_id in ends)


def _key(urgency_ns: int, job_id: int | None) -> tuple[int, int]:
    """Return the place of a job in the order of service; a new job is after jobs of the same urgency."""
    return (urgency_ns + 1, -1) if job_id is None else (urgency_ns, job_id)
