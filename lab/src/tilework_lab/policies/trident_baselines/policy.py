"""The common policy of TridentServe's baselines: a static layout of devices, and an order of service."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from tilework.core.block import Demand
from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel, DeviceView, JobView
from tilework.core.request import Request, RequestClass, cost_key
from tilework.core.work import Group, NewPlacement, Plan, Start
from tilework.cost.demand import shaped, usable_degree
from tilework.policy.placement.feasible import Footprint
from tilework.policy.placement.launch import Launch
from tilework.policy.placement.profile import footprint
from tilework.policy.placement.roles import PlacementType, Role, role_of
from tilework.policy.toolkit.known_demands import ByClass
from tilework.policy.toolkit.order import ArrivalOrdered, DeadlineOrder
from tilework.policy.toolkit.starts import devices_text, needs
from tilework_lab.policies.trident_baselines.layout import Layout, Line, Room, line_of, lines_text, narrowed
from tilework_lab.policies.trident_baselines.profiles import SeenRequests, works_ns

SCALES = 4
"""S: how many priorities late requests go through. Our number; the paper's is missing in our text."""


def priority(end_ns: int, due_ns: int, best_ns: int) -> int:
    """Return the priority of a request that would end at `end_ns` if it began now; a smaller one is served first.

    0 if that is in time. Else the overtime is counted in whole times of `best_ns`, which the request takes at optimal
    degrees: max(1, S - overtime), so that it rises as it waits, and 0 again from 2 S on.

    Source: TridentServe appendix D.2, "SRTF with aging"; its formulas are missing in our text. That a request rises to
    0 at last is ours: requests in time would pass it for ever.
    """
    if end_ns <= due_ns:
        return 0
    overtime = (end_ns - due_ns) // max(1, best_ns)
    return 0 if overtime >= 2 * SCALES else max(1, SCALES - overtime)


_BYTES_PER_GB = 1e9


def usable_bytes(devices: Iterable[DeviceView]) -> int | None:
    """Return the memory of the smallest device; None if none has a limit."""
    return min((size for one in devices if (size := one.memory.total_bytes) is not None), default=None)


def needed_bytes(footprint: Footprint, roles: Sequence[Role], degree: int) -> int:
    """Return the need of a device in a group of this degree: the weights of these roles, and their largest activation.

    Each role runs on as much of the group as it was profiled for.
    """
    weights = sum(footprint.weights.get(role, 0) for role in roles)
    return weights + max(_activation_bytes(footprint, role, degree) for role in roles)


def _activation_bytes(footprint: Footprint, role: Role, degree: int) -> int:
    profiled = footprint.activations.get(role, {1: 0})
    return profiled[max((one for one in profiled if one <= degree), default=min(profiled))]


def shortage(footprint: Footprint, roles: Sequence[Role], degree: int) -> str | None:
    """Return why a request cannot be served at this degree, in words; None if it can."""
    needed = needed_bytes(footprint, roles, degree)
    if needed <= footprint.usable_bytes:
        return None
    weights = sum(footprint.weights.get(role, 0) for role in roles)
    return (
        f"it needs {needed / _BYTES_PER_GB:.1f} GB on each device at degree {degree}, of which the weights of "
        f"{'+'.join(roles)} are {weights / _BYTES_PER_GB:.1f} GB, and a device has "
        f"{footprint.usable_bytes / _BYTES_PER_GB:.1f} GB"
    )


Route = tuple[int, int]
"""The index of a line, and the degree of a request's group there."""

_MOST_ROUTES = 1024
_DUE = DeadlineOrder()


@dataclass(slots=True, kw_only=True)
class TridentBaseline(ArrivalOrdered):
    """Serves requests on a static layout of devices, each line in its order; the first that finds no group blocks it.

    Where all stages are on each device, a request holds its group from its first stage to its last. Else it holds a
    group of a pool for the stages of one role, and its state moves to the next pool. All steps are one work, so no
    request is interrupted. A line is first in, first out, or goes by `shortest_first` with aging (see `priority`). A
    request without a deadline is due as in `DeadlineOrder`.

    The layout follows what was asked for so far, unless shares and sizes are given. It changes when the devices change,
    when a request class comes for the first time, and when the number of requests has doubled.

    A device keeps the weights of all its roles. A request that does not fit beside them fails, with the reason.

    Admission predicts as if the order were that of arrival and devices were not divided, and its correction learns the
    difference; the guard of reservations keeps promises, on whatever devices they need. Weights and tenants are
    ignored.
    """

    may_fail: ClassVar[bool] = True

    layout: Layout
    shortest_first: bool = False
    _seen: SeenRequests = field(default_factory=SeenRequests, init=False)
    _next_id: int = field(default=0, init=False)  # Jobs from this one on are new.
    _lines: tuple[Line, ...] = field(default=(), init=False)
    _told: tuple[Line, ...] = field(default=(), init=False)
    _laid_out: tuple[Sequence[DeviceView], tuple[int, int]] | None = field(default=None, init=False)
    _routes: ByClass[tuple[RequestClass, Role], Route] = field(
        default_factory=partial(ByClass, _MOST_ROUTES), init=False
    )
    _jobs: dict[int, tuple[int, Route]] = field(default_factory=dict, init=False)  # Progress and route of a job, by id.
    _num_waiting: int = field(default=0, init=False)
    _held: dict[int, Group] = field(default_factory=dict, init=False)

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (usable_degree(request, self._route(request, Role.D, costs)[1], costs),)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        """Return the remaining work as it will run, but on one group: it is free while stages have other pools."""
        (degree,) = self.degrees(request, costs)

        def degree_of(role: Role) -> int:
            return degree if self._holds or role is Role.D else self._route(request, role, costs)[1]

        ends_ns: list[int] = []
        run_ns = 0
        for _, work_ns in works_ns(request, left, costs, degree_of, holds=self._holds):
            run_ns += work_ns
            ends_ns.append(run_ns)
        demand = shaped(degree, left, ends_ns)
        return demand._replace(before_ns=0, after_ns=0) if self._holds else demand

    @property
    def _holds(self) -> bool:
        """True if all stages are on each device."""
        return self._lines[0].kind is PlacementType.EDC if self._lines else not self.layout.is_pooled

    def _route(self, request: Request, role: Role, costs: CostModel) -> Route:
        """Return where the stages of a role run. Before there is a line for the role, at the optimal degree."""
        leader = Role.D if self._holds else role
        key = cost_key(request), leader
        found = self._routes.get(key)
        if found is None:
            degree = self._seen.profile(request, costs).degrees[leader]
            found = self._routes[key] = self._line_for(leader, degree)
        return found

    def _line_for(self, leader: Role, degree: int) -> Route:
        most = max((line.widest for line in self._lines if leader in line.kind.roles), default=None)
        if most is None:
            return 0, degree
        index = line_of(self._lines, leader, narrowed(degree, most))
        line = self._lines[index]
        return index, line.degree or narrowed(degree, line.widest)

    # The plan.

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        waiting = list(view.waiting())
        self._num_waiting = len(waiting)
        new = [job for job in waiting if job.job_id >= self._next_id]
        for job in new:
            self._seen.note(job.request, costs)
            self._next_id = max(self._next_id, job.job_id + 1)
        if not view.devices or not self._seen.num:
            return Plan()
        if self._lay_out(view):
            new = waiting
        if new and (failures := self._failures(new, view, costs)):
            return Plan(failures=failures)
        return Plan(starts=tuple(self._starts(waiting, view, costs, now_ns)), placement=self._news())

    def forget(self, pipeline: str, costs: CostModel) -> None:
        if self._seen.forget(pipeline):  # The layout was for its requests, too.
            self._lines = ()
            self._laid_out = None
            self._jobs.clear()
            self._routes.clear()
        self._routes.forget(pipeline)

    def _lay_out(self, view: ClusterView) -> bool:
        """Divide the devices if there is an occasion; returns whether they are divided in another way now."""
        before = self._laid_out
        if before is not None and before[0] is view.devices and before[1] == self._seen.occasion:
            return False
        self._laid_out = view.devices, self._seen.occasion
        nodes: dict[int, list[int]] = {}
        for device in view.devices:
            nodes.setdefault(device.pool, []).append(device.device_id)
        lines = self.layout.lines(dict(sorted(nodes.items())), self._seen)
        if lines == self._lines:
            return False
        self._lines = lines
        self._routes.clear()
        self._jobs.clear()
        return True

    def _news(self) -> NewPlacement | None:
        """Return the layout, if it was not told yet."""
        if self._told is self._lines:
            return None
        self._told = self._lines
        groups = sorted((group, line.kind.value) for line in self._lines for group in line.groups)
        return NewPlacement(groups=tuple(groups), why=f"a static layout: {lines_text(self._lines)}")

    def _failures(self, jobs: Iterable[JobView], view: ClusterView, costs: CostModel) -> tuple[tuple[int, str], ...]:
        """Return the jobs that do not fit onto the devices of their lines, each with the reason."""
        total = usable_bytes(view.devices)
        if total is None:
            return ()
        reasons: dict[RequestClass, str | None] = {}
        for job in jobs:
            key = cost_key(job.request)
            if key not in reasons:
                reasons[key] = self._shortage(job.request, costs, total)
        return tuple((job.job_id, why) for job in jobs if (why := reasons[cost_key(job.request)]) is not None)

    def _shortage(self, request: Request, costs: CostModel, total_bytes: int) -> str | None:
        needed = footprint(request, costs, total_bytes)
        for role in needed.weights:
            index, degree = self._route(request, role, costs)
            degree = usable_degree(request, degree, costs) if self._lines[index].leader is Role.D else degree
            if (why := shortage(needed, self._lines[index].kind.roles, degree)) is not None:
                return f"{request.shape} does not fit: {why}"
        return None

    def _starts(self, waiting: Iterable[JobView], view: ClusterView, costs: CostModel, now_ns: int) -> Iterator[Start]:
        idle = self._idle(view)
        rooms = [Room(line, idle) for line in self._lines] if idle else []
        queues: list[list[JobView] | None] = [None if room.is_empty() else [] for room in rooms]
        if all(queue is None for queue in queues):
            return
        for job in waiting:
            queue = queues[self._route_of(job, costs)[0]]
            if queue is not None:
                queue.append(job)
        for line, room, queue in zip(self._lines, rooms, queues, strict=True):
            if queue and self.shortest_first:
                queue.sort(key=lambda job: self._order(job, costs, now_ns))
            for job in queue or ():
                group = room.take(self._route_of(job, costs)[1])
                if group is None:
                    break
                self._held[job.job_id] = group
                yield from self._launched(job, line, group, costs, now_ns)

    def _idle(self, view: ClusterView) -> set[int]:
        """Return the devices that no work is on, and no request holds."""
        self._held = {
            job_id: group for job_id, group in self._held.items() if (job := view.job(job_id)) is not None and job.works
        }
        idle = {device.device_id for device in view.devices if not device.works}
        return idle.difference(*self._held.values())

    def _route_of(self, job: JobView, costs: CostModel) -> Route:
        """Return the route of a waiting job's next stages, looked up once for each of its stages: many may wait."""
        position = job.left.position
        known = self._jobs.get(job.job_id)
        if known is None or known[0] != position:
            if len(self._jobs) >= _MOST_ROUTES + 2 * self._num_waiting:  # Most of them are of jobs that have ended.
                self._jobs.clear()
            assert job.left.stage is not None, f"job {job.job_id} waits for no stage"
            role = role_of(costs.graph(job.request.pipeline), job.left.stage)
            assert role is not None, f"job {job.job_id} waits for a CPU slot"
            known = self._jobs[job.job_id] = position, self._route(job.request, role, costs)
        return known[1]

    def _order(self, job: JobView, costs: CostModel, now_ns: int) -> tuple[int, int, int, int]:
        run_ns = job.demand.run_ns
        due_ns = _DUE.urgency_ns(job.request, dropped_to_best_effort=False)
        first = priority(now_ns + run_ns, due_ns, self._seen.profile(job.request, costs).total_ns)
        return first, run_ns, job.urgency_ns, job.job_id

    def _launched(self, job: JobView, line: Line, group: Group, costs: CostModel, now_ns: int) -> Sequence[Start]:
        """Return the stages of a job that run on the devices of a line."""
        used = group[: usable_degree(job.request, len(group), costs)] if line.leader is Role.D else group
        launch = Launch((job.job_id,), job.request, job.left, costs, self._why(job, used, costs, now_ns))
        for role in line.kind.roles:
            launch.run(role, used, len(used) if self._holds else None)
        return launch.starts

    def _why(self, job: JobView, group: Group, costs: CostModel, now_ns: int) -> str:
        on = devices_text(len(group))
        if not self.shortest_first:
            return f"has waited longest of those for these devices; it gets {on}"
        first = self._order(job, costs, now_ns)[0]
        return f"has the least remaining time of priority {first}, {needs(job.demand)}; it gets {on}"
