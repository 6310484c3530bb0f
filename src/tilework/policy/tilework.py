"""Tilework's own policy: look ahead, serve everybody no wider than needed, and give up as few deadlines as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tilework.core.interfaces import ClusterView, CostModel, Demand, GpuView, JobView
from tilework.core.progress import Cursor
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_MS
from tilework.core.work import DECODE, DIFFUSE, ENCODE, Plan, StageId, Start, Work
from tilework.policy.degrees import best_doubling
from tilework.policy.demand import Speed, cheapest_in_time, fitting_degrees, step_speeds, worthwhile
from tilework.policy.foresight import Claim, Ride
from tilework.policy.lookahead import ONE_DEVICE, Lookahead
from tilework.policy.order import DeadlineOrder, doom
from tilework.policy.registry import policy

_MOST_WAITING = 24  # Looked at per node: the most urgent.
_MOST_SIZES = 256
_TRIALS = 4  # Nodes that are rolled forward to find one on which a request is on time.

_Size = tuple[str, Shape, int, bool, int]
_KindKey = tuple[str, int, int, int, bool, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What requests of a kind take on a node; `speeds` are the degrees that are quicker than every narrower one."""

    encode_ns: int
    speeds: tuple[Speed, ...]
    usual: int
    decode_ns: int


@policy("tilework")
@dataclass(slots=True, kw_only=True)
class Tilework:
    """Keep as many deadlines as possible, at every event, on every node for itself (see `Lookahead`).

    A request that has not begun goes to the node with the fewest idle devices that are enough for it, so that wide
    groups stay whole; if there is none, to one where it would be on time without costing others their deadlines; else
    to the one with least to do. As long as it has not begun, it may still go to another.

    Requests without a deadline, or whose deadline cannot be met, go by `patience` times their GPU-time after the point
    of `DeadlineOrder`, at the degree up to which each doubling pays: short ones first, but nobody waits for ever.
    """

    chunk_ns: int = 200 * NS_PER_MS
    patience: float = 20.0
    order: DeadlineOrder = field(default_factory=DeadlineOrder)
    _kinds: dict[_KindKey, Kind] = field(default_factory=dict, init=False)
    _version: int = field(default=-1, init=False)
    _gpu_ns: dict[_Size, int] = field(default_factory=dict, init=False)
    _nodes: _Nodes | None = field(default=None, init=False)

    def urgency_ns(self, request: Request, set_aside: bool, delay_ns: int = 0) -> int:
        """What the request takes is known from `demand`, which admission asks for first."""
        urgency_ns = self.order.urgency_ns(request, set_aside, delay_ns)
        if request.deadline_ns is not None and not set_aside:
            return urgency_ns
        return urgency_ns + int(self.patience * self._gpu_ns.get(_size(request), 0) / request.weight)

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return fitting_degrees(request, costs)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        """The cheapest degree that would meet the deadline from the arrival on; the quickest if none would."""
        budget_ns = self.order.urgency_ns(request, False) - request.arrival_ns
        demand = cheapest_in_time(request, left, self.degrees(request, costs), budget_ns, costs)
        if left == Cursor.start(request):
            self._gpu_ns.pop(_size(request), None)
            self._gpu_ns[_size(request)] = demand.width * demand.run_ns
            if len(self._gpu_ns) > _MOST_SIZES:
                del self._gpu_ns[next(iter(self._gpu_ns))]
        return demand

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """A plan that sets jobs aside starts nothing, and is asked for again in the new order."""
        if costs.version != self._version:
            self._kinds, self._version = {}, costs.version
        if self._nodes is None or self._nodes.devices is not view.gpus:
            self._nodes = _Nodes(view.gpus)
        nodes = self._nodes
        self._settle(list(islice(view.waiting(), _MOST_WAITING * len(nodes.gpus))), nodes, view, costs, now_ns)
        starts: list[Start] = []
        stops: list[int] = []
        doomed: list[tuple[int, str]] = []
        for number in sorted(nodes.stirred):
            node = self._node(number, nodes, view, costs, now_ns)
            if not node.rides:
                nodes.stirred.remove(number)
                continue
            doomed += [
                (ride.job_id, why)
                for ride in node.rides
                if (why := doom(node.jobs[ride.job_id], now_ns + int(ride.least_ns))) is not None
            ]
            if doomed:
                continue
            node.choose()
            node.carry_out()
            starts += node.starts
            stops += node.stops
            if not node.starts and not node.stops:
                nodes.stirred.remove(number)
        if doomed:
            return Plan(set_aside=tuple(doomed))
        return Plan(starts=tuple(starts), stops=tuple(stops))

    # Which node serves whom.

    def _settle(
        self, waiting: Sequence[JobView], nodes: _Nodes, view: ClusterView, costs: CostModel, now_ns: int
    ) -> None:
        """Give every waiting job a home among the nodes; where devices are idle, the most urgent may move there."""
        newcomers = nodes.look(waiting)
        for job in waiting[: _MOST_WAITING * len(nodes.idle)]:
            if not job.last_gpus:
                number = nodes.take_idle(nodes.homes.get(job.job_id), self._width(job, nodes, costs, now_ns))
                if number is not None:
                    nodes.settle(job, number)
            if not nodes.idle:
                break
        for job in newcomers:
            if job.job_id not in nodes.homes:
                nodes.settle(job, self._home(job, nodes, view, costs, now_ns))

    def _home(self, job: JobView, nodes: _Nodes, view: ClusterView, costs: CostModel, now_ns: int) -> int:
        """Where it goes that finds no idle devices."""
        if job.last_gpus:
            return nodes.number_of[job.last_gpus[0]]
        if len(nodes.gpus) == 1:
            return next(iter(nodes.gpus))
        candidates = nodes.least_loaded(_TRIALS)
        for number in candidates:
            node = self._node(number, nodes, view, costs, now_ns)
            ride = self._ride(job, node, costs)
            if ride is not None and node.keeps_all_with(ride):
                return number
        return candidates[0]

    def _width(self, job: JobView, nodes: _Nodes, costs: CostModel, now_ns: int) -> int:
        """How many devices it needs now: the fewest with which it is on time, or else as many as it usually takes."""
        kind = self._kind(job.request, nodes.widest, costs)
        if not kind.speeds:
            return 1
        if job.request.deadline_ns is not None and not job.set_aside:
            budget_ns = job.request.deadline_ns - now_ns - kind.encode_ns - kind.decode_ns
            for speed in kind.speeds:
                if job.num_steps_left * speed.step_ns <= budget_ns:
                    return speed.degree
        return kind.speeds[kind.usual].degree

    def _node(self, number: int, nodes: _Nodes, view: ClusterView, costs: CostModel, now_ns: int) -> Lookahead:
        """A node with what it serves and what waits there so far."""
        node = Lookahead(nodes.gpus[number], now_ns, self.chunk_ns)
        for job in (*_running(node.gpus, view), *nodes.waiting[number].values()):
            ride = self._ride(job, node, costs)
            if ride is not None:
                node.add(job, ride)
        return node

    # What is left of a job.

    def _ride(self, job: JobView, node: Lookahead, costs: CostModel) -> Ride | None:
        """None if no degree that the node can run was profiled. Raises UnknownCost."""
        kind = self._kind(job.request, len(node.gpus), costs)
        speeds, usual, num_steps = kind.speeds, kind.usual, float(job.num_steps_left)
        stage = None if job.stage is None else job.stage.name
        head_ns = float(kind.encode_ns) if stage == ENCODE else 0.0
        steps = _last_steps(job) if job.works else None
        if steps is None and stage in (None, DECODE):
            speeds, usual = (ONE_DEVICE,), 0
        elif not speeds:
            return None
        if job.works:
            current = next((speed for speed in speeds if steps is not None and speed.degree == len(steps.gpus)), None)
            if steps is None or job.is_stopping or current is None or not current.step_ns:
                head_ns += node.ready_ns(job) - node.now_ns
            else:
                num_steps += max(0, node.end_ns(steps) - node.now_ns) / current.step_ns
        claim = Claim.DUE
        if job.request.deadline_ns is None or job.set_aside:
            claim = Claim.OVERDUE if job.urgency_ns <= node.now_ns else Claim.PATIENT
        return Ride(
            job_id=job.job_id,
            claim=claim,
            due_ns=float(job.urgency_ns),
            speeds=speeds,
            usual=usual,
            num_steps=num_steps,
            head_ns=head_ns,
            tail_ns=float(kind.decode_ns),
            weight=job.request.weight,
        )

    def _kind(self, request: Request, num_gpus: int, costs: CostModel) -> Kind:
        shape = request.shape  # Its hash takes longer than the rest.
        key = (
            request.pipeline,
            shape.height,
            shape.width,
            shape.frames,
            request.guided,
            request.preview_every,
            num_gpus,
        )
        kind = self._kinds.get(key)
        if kind is None:
            encode_ns, decode_ns = (
                costs.work_ns(StageId(request.pipeline, stage), (request,), 1) for stage in (ENCODE, DECODE)
            )
            speeds = tuple(worthwhile(step_speeds(request, costs, num_gpus)))
            degree = best_doubling(speeds) if speeds else 0
            usual = max((rank for rank, speed in enumerate(speeds) if speed.degree <= degree), default=0)
            kind = self._kinds[key] = Kind(encode_ns=encode_ns, speeds=speeds, usual=usual, decode_ns=decode_ns)
        return kind


class _Nodes:
    """The devices by node, who waits where, and which nodes have how many idle devices.

    Kept from plan to plan as long as no device comes or goes. `stirred` are the nodes where there may be something to
    decide: their devices have been told something or have ended something, or others wait there than before.
    """

    def __init__(self, devices: Sequence[GpuView]) -> None:
        self.devices = devices
        self.gpus: dict[int, list[GpuView]] = {}
        self.number_of: dict[int, int] = {}
        for gpu in devices:
            self.gpus.setdefault(gpu.node, []).append(gpu)
            self.number_of[gpu.gpu] = gpu.node
        self.widest = max(map(len, self.gpus.values()), default=0)
        self.homes: dict[int, int] = {}
        self.waiting: dict[int, dict[int, JobView]] = {number: {} for number in self.gpus}
        self.stirred = set(self.gpus)
        self.idle: dict[int, int] = {}
        self._changes: list[int] = []

    def look(self, waiting: Sequence[JobView]) -> list[JobView]:
        """Notice what has changed since the last plan; returns those who have no home yet, in order."""
        changes = [gpu.num_changes for gpu in self.devices]
        if changes != self._changes:
            before = self._changes or [-1] * len(changes)
            pairs = zip(self.devices, before, changes, strict=True)
            self.stirred.update(gpu.node for gpu, old, new in pairs if old != new)
            self._changes = changes
        self.idle = {}
        for gpu in self.devices:
            if not gpu.works:
                self.idle[gpu.node] = self.idle.get(gpu.node, 0) + 1
        for job_id in self.homes.keys() - {job.job_id for job in waiting}:
            self._leave(job_id)
        return [job for job in waiting if job.job_id not in self.homes]

    def settle(self, job: JobView, number: int) -> None:
        """Let a job wait at this node."""
        if self.homes.get(job.job_id) != number:
            self._leave(job.job_id)
            self.homes[job.job_id] = number
            self.waiting[number][job.job_id] = job
            self.stirred.add(number)

    def _leave(self, job_id: int) -> None:
        number = self.homes.pop(job_id, None)
        if number is not None:
            del self.waiting[number][job_id]
            self.stirred.add(number)

    def take_idle(self, home: int | None, width: int) -> int | None:
        """Count on so many idle devices, at home or else on the node with the fewest that are enough; returns it."""
        number = home
        if number is None or self.idle.get(number, 0) < width:
            number = min(
                (number for number, idle in self.idle.items() if idle >= width), key=self._tightness, default=None
            )
        if number is not None:
            self.idle[number] -= width
            if not self.idle[number]:
                del self.idle[number]
        return number

    def _tightness(self, number: int) -> tuple[int, int]:
        return self.idle[number], number

    def least_loaded(self, most: int) -> list[int]:
        """The nodes in which fewest wait; of these, those whose devices are free first."""
        return sorted(self.gpus, key=lambda number: (len(self.waiting[number]), self._free_ns(number), number))[:most]

    def _free_ns(self, number: int) -> int:
        return sum(gpu.free_ns for gpu in self.gpus[number])


def _running(gpus: Iterable[GpuView], view: ClusterView) -> Iterable[JobView]:
    """Jobs that are to run steps there, which may be stopped.

    Remnants of former attempts do not count, nor works that have lost a device, which break off.
    """
    works = {work.work_id: work for gpu in gpus for work in gpu.works}
    jobs: dict[int, JobView] = {}
    for work in works.values():
        for job_id in work.job_ids:
            job = view.job(job_id)
            if job is not None and job.works and work is job.works[-1] and work.gpus == job.last_gpus:
                has_steps = job.stage is not None and job.stage.name != DECODE
                if has_steps or _last_steps(job) is not None:
                    jobs[job_id] = job
    return jobs.values()


def _last_steps(job: JobView) -> Work | None:
    """The last of its works that runs steps."""
    return next((work for work in reversed(job.works) if work.stage.name == DIFFUSE), None)


def _size(request: Request) -> _Size:
    """What says how much GPU-time it takes."""
    return request.pipeline, request.shape, request.steps, request.guided, request.preview_every
