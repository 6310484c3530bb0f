"""The default policy: looks ahead, gives each request the fewest devices that meet its deadline, and gives up as few
deadlines as possible.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from tilework.core.block import Demand
from tilework.core.component import num_bytes
from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel, DeviceView, JobView
from tilework.core.pools import Within
from tilework.core.request import Request, RequestClass, cost_key
from tilework.core.time import NS_PER_MS
from tilework.core.work import LoadAhead, Plan, ReadAhead, Start
from tilework.policy.lookahead.arrivals import Rationing, TightClasses
from tilework.policy.lookahead.dispatch import Dispatch
from tilework.policy.lookahead.forecaster import Forecaster
from tilework.policy.lookahead.node_assignment import NodeAssignment
from tilework.policy.lookahead.node_table import NodeTable
from tilework.policy.lookahead.request_costs import RequestCosts
from tilework.policy.lookahead.residency import ComponentRates, Eviction, LoadingAhead, Reading
from tilework.policy.lookahead.selection import Selection
from tilework.policy.toolkit.known_demands import ByClass
from tilework.policy.toolkit.order import DeadlinePolicy

_MOST_WAITING = 24  # Per node: the most urgent.
_MOST_CLASSES = 256
_MOST_DECIDED = 4096
_GRACE = 0.5  # Share of the shortest time that a request takes alone.


@dataclass(slots=True, kw_only=True)
class LookaheadPolicy(DeadlinePolicy):
    """Keeps as many deadlines as possible, at every event.

    `NodeAssignment` decides which node serves a job, `Selection` which jobs a node serves, and `Dispatch` what the node
    does next.

    Requests without a deadline are served by their priority (`Forecaster`), each at the degree up to which a doubling
    pays. No request starves: once it has waited `patience` times as long as it takes alone, divided by its weight, a
    request goes before all that have deadlines. Requests whose deadline cannot be met go by that point from the start.
    """

    keeps_pools: ClassVar[bool] = True

    chunk_ns: int = 200 * NS_PER_MS  # Time between decisions for a device: one takes as long for any model.
    patience: float = 300.0
    _request_costs: RequestCosts = field(default_factory=RequestCosts, init=False)
    _alone_ns: ByClass[RequestClass, int] = field(default_factory=partial(ByClass, _MOST_CLASSES), init=False)
    _tight: dict[Within, TightClasses] = field(default_factory=dict, init=False)
    _rates: ComponentRates = field(default_factory=ComponentRates, init=False)
    _loading: LoadingAhead = field(default_factory=LoadingAhead, init=False)
    _reading: Reading = field(default_factory=Reading, init=False)
    _rationing: dict[Within, Rationing] = field(default_factory=dict, init=False)
    _decided: dict[int, bool] = field(default_factory=dict, init=False)  # True for a job that is to be on time.
    _table: NodeTable | None = field(default=None, init=False)
    _latest: dict[int, Selection] = field(
        default_factory=dict, init=False
    )  # Selection of each node in its latest plan.
    _unused: Sequence[DeviceView] | None = field(default=None, init=False)  # Devices before the first request.

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        """Return the deadline, or else the end of the patience with the request.

        Its time alone is known from `demand`, which admission asks for first.
        """
        if request.deadline_ns is not None and not dropped_to_best_effort:
            return request.deadline_ns
        patience_ns = int(self.patience * self._alone_ns.get(cost_key(request), 0) / request.weight)
        return max(request.deadline_ns or 0, request.arrival_ns + delay_ns + patience_ns)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        choices = self.known.of(request, left, costs)
        demand = self.cheapest(request, choices)
        if not left.position:
            key = cost_key(request)
            is_new = self._rates.add(request, costs)
            if request.deadline_ns is not None:
                slack_ns = request.deadline_ns - request.arrival_ns - choices.demands[0].run_ns
                within = costs.pools.within(request.pipeline)
                if is_new:
                    rationing = self._rationing.setdefault(within, Rationing())
                    rationing.add(key, request.arrival_ns, float(demand.device_ns), request.weight)
                self._tight.setdefault(within, TightClasses()).add(key, request.arrival_ns, slack_ns)
            alone = self._request_costs.of(request, left, choices.degrees[-1], costs)
            self._alone_ns.renew(key, alone.alone_ns(left.num_steps_left))
        return demand

    def forget(self, pipeline: str, costs: CostModel) -> None:
        DeadlinePolicy.forget(self, pipeline, costs)  # Dataclasses with slots know no super().
        self._rates.forget(pipeline, costs)
        self._loading, self._reading = LoadingAhead(), Reading()  # They know the latest holdings in which none paid.
        self._alone_ns.forget(pipeline)
        self._request_costs.forget(pipeline)
        for tight in self._tight.values():
            tight.forget(pipeline)
        for rationing in self._rationing.values():
            rationing.forget(pipeline)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """Return the next starts and stops of every node on which something has changed.

        A plan that drops jobs to best effort starts nothing; the next one is asked for with the new order.
        """
        waiting = view.most_urgent(_MOST_WAITING)
        if self._table is None and not waiting:  # Thousands of devices may join before the first request comes.
            self._unused = view.devices
            return Plan()
        if self._table is None or self._table.devices is not view.devices:
            self._table = NodeTable(view.devices, changed=self._unused is not view.devices)
            self._latest.clear()
        table = self._table
        self._ration(waiting, table, view, costs, now_ns)
        assignment = self._assignment(table, view, costs, now_ns)
        assignment.assign_waiting(waiting)
        committed = assignment.committed()
        changed = sorted(table.changed - committed.keys())
        unreachable = [each for number in changed for each in assignment.at(number).node.unreachable()]
        if unreachable and not view.is_linking:  # A wider group may be there soon enough.
            return Plan(dropped_to_best_effort=tuple(unreachable))
        for number, jobs in committed.items():
            table.set_committed(number, (job.request.arrival_ns for job in jobs))
        assignment.choose()
        starts: list[Start] = []
        stops: list[int] = []
        loads: list[LoadAhead] = []
        started: set[int] = set()
        eviction = Eviction(self._rates, view, costs, now_ns)
        changed = sorted(table.changed)
        for number in changed:
            self._latest[number] = selection = assignment.at(number)
            dispatch = Dispatch(selection, costs)
            dispatch.decide()
            starts += dispatch.starts
            stops += dispatch.stops
            if view.needs_loads:
                loads += self._loading.best(eviction, table.by_node[number], dispatch.left)
                started.update(job_id for start in dispatch.starts for job_id in start.job_ids)
            if not dispatch.starts and not dispatch.stops:
                table.changed.remove(number)
        reads = self._reads(eviction, table, changed, started) if view.needs_loads else []
        if view.needs_loads and starts:
            starts = eviction.ordered(starts)
        return Plan(
            starts=tuple(starts),
            loads=tuple(loads),
            reads=tuple(reads),
            stops=tuple(stops),
            wake_ns=table.wake_ns(),
        )

    def num_missed(self, job: JobView, view: ClusterView, costs: CostModel, now_ns: int) -> int:
        """Return how many others would be late with one more job, by the rollouts of the nodes where it could be."""
        table, latest = self._table, self._latest
        if table is None or table.devices is not view.devices:
            table, latest = NodeTable(view.devices), {}
            table.update(view.most_urgent(_MOST_WAITING), view, now_ns)
        return self._assignment(table, view, costs, now_ns).num_missed(job, latest)

    def _assignment(self, table: NodeTable, view: ClusterView, costs: CostModel, now_ns: int) -> NodeAssignment:
        grace_ns = _GRACE * min(self._alone_ns.values(), default=0)
        forecaster = Forecaster(self._request_costs, costs, now_ns, grace_ns, keeps=self._decided)
        return NodeAssignment(table, forecaster, view, self.chunk_ns, self._tight)

    def end_ns(self, job: JobView) -> int | None:
        """Return the end by the rollout of its node at the latest plan: plans follow it until something happens."""
        if self._table is None:
            return None
        number = self._table.node_of.get(job.job_id, self._table.node_with(job))
        selection = None if number is None else self._latest.get(number)
        end_ns = None if selection is None else selection.ends_ns().get(job.job_id)
        return None if end_ns is None else int(end_ns)

    def _ration(
        self, waiting: Sequence[JobView], table: NodeTable, view: ClusterView, costs: CostModel, now_ns: int
    ) -> None:
        """Decide of each job that has come whether it is to be on time.

        Not where devices change their weights all the time: what a request takes depends on what they have then.
        """
        new = [job for job in waiting if job.job_id not in self._decided]
        if not new:
            return
        if len(self._decided) > _MOST_DECIDED:
            self._decided = {
                job_id: is_kept for job_id, is_kept in self._decided.items() if view.job(job_id) is not None
            }
        fits = self._fits_on_each(table, costs)
        for job in new:
            self._decided[job.job_id] = job.promised is not None or not fits or self._admits(job, view, costs, now_ns)

    def _admits(self, job: JobView, view: ClusterView, costs: CostModel, now_ns: int) -> bool:
        if job.request.deadline_ns is None or job.dropped_to_best_effort:
            return True
        within = costs.pools.within(job.request.pipeline)
        num_devices = len(view.devices) if within is None else len(within)
        rationing = self._rationing.get(within)
        return rationing is None or rationing.admits(cost_key(job.request), now_ns, num_devices)

    def _fits_on_each(self, table: NodeTable, costs: CostModel) -> bool:
        """Return whether each device has the memory for the weights of all pipelines that were asked for."""
        total = num_bytes({one for stage in self._rates.stages for one in costs.weights.components(stage)})
        return table.least_bytes is None or table.least_bytes >= total

    def _reads(
        self, eviction: Eviction, table: NodeTable, changed: Sequence[int], started: Set[int]
    ) -> list[ReadAhead]:
        """Return what the hosts of changed nodes read ahead for jobs that wait there and are not `started`."""
        reads: list[ReadAhead] = []
        for host in dict.fromkeys(table.by_node[number][0].node for number in changed):
            jobs = [job for number in table.by_host[host] for job in table.waiting[number].values()]
            reads += self._reading.best(eviction, host, [job for job in jobs if job.job_id not in started])
        return reads
