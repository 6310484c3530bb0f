"""OnePiece's dispatch: requests go from instance to instance, the oldest first.

Theory of operation. `node_manager` says which instances are for which service (a stage). A request that comes from
outside waits for any instance of its first service; one that has been served hands its state to the next service, to
each of its instances in turn (round robin), and waits there. Workers of an instance that are idle take the oldest
request that waits for it, as many workers as the request needs.

So there is one planner for all stages; what OnePiece's instances, proxies and node manager each do by themselves are
rules of this policy, and promises, replay and explanation hold for them as for any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilework.core.block import Demand
from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel, JobView
from tilework.core.request import Request
from tilework.core.work import Group, Plan, Start
from tilework.cost.demand import demand_at
from tilework.policy.placement.launch import Launch
from tilework.policy.placement.roles import Role, role_of
from tilework.policy.placement.utilisation import UtilisationRule, proportional
from tilework.policy.published.onepiece.node_manager import Divide, NodeManager
from tilework.policy.published.onepiece.services import Service, Services
from tilework.policy.published.onepiece.traffic import Mode, Traffic, narrowed
from tilework.policy.toolkit.order import ArrivalOrdered
from tilework.policy.toolkit.starts import devices_text
from tilework.policy.traits import PlacementStatus

_SPARE_HOPS = 1024


@dataclass(slots=True, kw_only=True)
class OnePieceDispatch(ArrivalOrdered):
    """Serves the oldest request first on instances of its next stage.

    Deadlines, weights and tenants are ignored. All steps of a request are one work, so none is interrupted.

    Source: OnePiece §4.3 (pull), §4.5 (round robin), §8.2 (instances change their stage). Departures, beside those of
    `node_manager`, `services` and `traffic`:

    - A request that is lost between two stages, with its device, is served again; the paper drops it (§9).
    - The paper has one kind of requests per workflow. Here sizes differ, so that a request takes as many workers of an
      instance as it can use, not one or all; the oldest that waits for an instance blocks those behind it.
    - Instances queue by themselves in the paper; here the controller keeps their queues, and requests that wait for an
      instance that changes its service are handed on to another.

    Attributes:
        mode: how many workers a request gets.
        in_turn: whether requests are handed on round robin; else they wait for any instance of the next service.
        moves: whether instances change their service (the placement `utilisation`).
        rule: when instances change their service.
        division: how all instances are divided among the services (Theorem 1).
    """

    mode: Mode = Mode.EFFICIENT
    in_turn: bool = True
    moves: bool = True
    rule: UtilisationRule = field(default_factory=UtilisationRule)
    division: Divide = proportional
    _traffic: Traffic = field(init=False)
    _manager: NodeManager = field(init=False)
    _next_id: int = field(default=0, init=False)  # Jobs from this one on are new.
    _num_waiting: int = field(default=0, init=False)
    _hops: dict[int, tuple[int, Group]] = field(default_factory=dict, init=False)  # Position and instance of a job.
    _turns: Counter[Service] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self._traffic = Traffic(mode=self.mode, services=Services())
        self._manager = NodeManager(traffic=self._traffic, rule=self.rule, moves=self.moves, division=self.division)

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (self._traffic.degrees(request, costs).get(Role.D, 1),)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        """Return the remaining work, as if one group did all of it."""
        (degree,) = self.degrees(request, costs)
        return demand_at(request, left, degree, costs)

    def placement_status(self, now_ns: int) -> Sequence[PlacementStatus]:
        return self._manager.status(now_ns)

    def forget(self, pipeline: str, costs: CostModel) -> None:
        self._traffic.forget(pipeline)
        self._manager.forget_unserved()
        served = self._traffic.services.all()
        self._turns = Counter({one: num for one, num in self._turns.items() if one in served})

    # The plan.

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        waiting = list(view.waiting())
        self._num_waiting = len(waiting)
        new = self._note(waiting, view, costs)
        if not view.devices or not self._traffic.num:
            return Plan()
        self._manager.look(view.devices, now_ns)
        self._manager.update(costs, Counter(self._service_of(job, costs) for job in waiting), now_ns)
        self._accepted(new, costs, now_ns)
        starts = tuple(self._starts(waiting, view, costs, now_ns))
        return Plan(starts=starts, placement=self._manager.take_news(), wake_ns=self._manager.wake_ns())

    def _accepted(self, requests: Sequence[Request], costs: CostModel, now_ns: int) -> None:
        """Take note of requests that were accepted, once instances have their services."""

    def _note(self, waiting: Sequence[JobView], view: ClusterView, costs: CostModel) -> list[Request]:
        """Count the requests that came since the latest plan, and return them.

        Those that begin on a CPU slot come with the next one that does not.
        """
        end = max((job.job_id + 1 for job in waiting), default=0)
        new = [job.request for one in range(self._next_id, end) if (job := view.job(one)) is not None]
        self._next_id = max(self._next_id, end)
        for request in new:
            self._traffic.note(request, costs)
        return new

    def _service_of(self, job: JobView, costs: CostModel) -> Service:
        assert job.left.stage is not None, f"job {job.job_id} waits for no stage"
        role = role_of(costs.graph(job.request.pipeline), job.left.stage)
        assert role is not None, f"job {job.job_id} waits for a CPU slot"
        self._traffic.services.note(job.request.pipeline, costs)
        return self._traffic.services.of(job.request.pipeline, role)

    def _starts(self, waiting: Sequence[JobView], view: ClusterView, costs: CostModel, now_ns: int) -> Iterator[Start]:
        """Start the oldest first on idle workers of its instance, or of any of its service: the fewest that are enough.

        If there are too few, an instance is held for it, so that it becomes free for it: of any, the one with the most.
        """
        idle = {
            instance: [one for one in instance if (device := view.device(one)) is not None and not device.works]
            for instance in self._manager.instances
        }
        open_to = {
            service: [one for one in self._manager.of(service) if idle[one]] for service in self._manager.services
        }
        for job in waiting:
            service = self._service_of(job, costs)
            own = self._instance_of(job, service)
            others = open_to[service]
            usable = others if own is None else [one for one in others if one == own]
            if not usable:
                continue
            fitting = [one for one in usable if len(idle[one]) >= self._width(job, service, one, costs)]
            if not fitting:
                others.remove(max(usable, key=lambda one: len(idle[one])))
                continue
            instance = min(fitting, key=lambda one: len(idle[one]))
            launch = self._launch(job, service, instance, idle[instance], costs)
            used = {one for start in launch.starts for one in start.devices}
            idle[instance] = [one for one in idle[instance] if one not in used]
            if not idle[instance]:
                others.remove(instance)
            self._manager.started(service, now_ns + _run_ns(launch))
            yield from launch.starts

    def _instance_of(self, job: JobView, service: Service) -> Group | None:
        """Return the instance that a request is handed on to, chosen now if it was not yet; None if any may take it."""
        if not self.in_turn or not job.last_devices:
            return None
        known = self._hops.get(job.job_id)
        instances = self._manager.instances
        if known is not None and known[0] == job.left.position and instances.get(known[1]) == service:
            return known[1]
        others = self._manager.of(service)
        if not others:
            return None
        if len(self._hops) >= _SPARE_HOPS + 2 * self._num_waiting:  # Most of them are of jobs that have ended.
            self._hops.clear()
        instance = others[self._turns[service] % len(others)]
        self._turns[service] += 1
        self._hops[job.job_id] = job.left.position, instance
        return instance

    def _degrees(self, job: JobView, service: Service, instance: Group, costs: CostModel) -> dict[Role, int]:
        """Return how many workers of an instance a request gets for each role of a service."""
        request = job.request
        services = self._traffic.services
        return {
            role: narrowed(role, run.degree, len(instance), request, costs)
            for role, run in self._traffic.runs(request, costs).items()
            if services.of(request.pipeline, role) == service
        }

    def _width(self, job: JobView, service: Service, instance: Group, costs: CostModel) -> int:
        return max(self._degrees(job, service, instance, costs).values())

    def _launch(self, job: JobView, service: Service, instance: Group, idle: Sequence[int], costs: CostModel) -> Launch:
        """Return the stages of a job that a service has, on the first of these workers."""
        degrees = self._degrees(job, service, instance, costs)
        why = f"has waited longest for {service}; it gets {devices_text(max(degrees.values()))}"
        launch = Launch((job.job_id,), job.request, job.left, costs, why)
        while (role := launch.role) in degrees and role is not None:
            launch.run(role, tuple(idle[: degrees[role]]))
        return launch


def _run_ns(launch: Launch) -> int:
    works = ((start.stage, len(start.devices), start.num_steps) for start in launch.starts)
    return sum(launch.costs.work_ns(stage, (launch.request,), degree, num) for stage, degree, num in works)
