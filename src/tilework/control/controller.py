"""The controller: takes an event and the time, returns actions.

Theory of operation. `handle` does three things in this order:

1. it records the event, and ends the jobs that are done, failed or cancelled by it;
2. it asks the policy for a plan, until the policy drops no more jobs to best effort; a refusal changes nothing, so then
   the policy is not asked;
3. it turns the plan into actions, and moves a job's state first where the plan changes its devices.

Each subject has a module: `admit` (new requests), `reports` (works that ended), `memory` (works that did not fit),
`recovery` (jobs that lost a work, and how jobs end), `expiry` (jobs that are worthless when late), `components`
(weights on devices), `measurements` (devices for them), `plan` (2 and 3).
They share the `tracker`.

Every request ends exactly once, by one `Finish` or one `Reject`. Nothing here reads a clock or draws a random number,
so a log of events gives the same actions again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tilework.admission.admission import PROMISE_PRICE, Admission
from tilework.admission.admission_limits import AdmissionLimits
from tilework.admission.contract import EtaPrediction
from tilework.admission.reservation_guard import GuardCounts, ReservationGuard
from tilework.control.admit import Admit
from tilework.control.cluster.occupancy import Occupancy, backlog_ns, occupancy
from tilework.control.cluster.tracker import Tracker
from tilework.control.components import Components
from tilework.control.expiry import Expiry
from tilework.control.measurements import Measurements
from tilework.control.memory import MemoryShortage
from tilework.control.plan import Planner
from tilework.control.recovery import Recovery
from tilework.control.reports import Reports
from tilework.core.actions import Action, Reject
from tilework.core.events import (
    Broken,
    Cancelled,
    ComponentsLoaded,
    ComponentsRead,
    DeviceJoined,
    DeviceLost,
    Event,
    LeftOut,
    LinksChanged,
    MeasurementAsked,
    MeasurementEnded,
    ModelRemoved,
    ModelServed,
    NodeCordoned,
    NodeLost,
    NodesSilent,
    OutOfMemory,
    Restored,
    StatesFetched,
    Stopped,
    Submitted,
    Woke,
    WorkFailed,
    WorkFinished,
)
from tilework.core.policy import Policy
from tilework.core.request import Status
from tilework.core.time import NS_PER_S
from tilework.core.work import Work
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table
from tilework.policy.registry import DEFAULT_POLICY, check_pools, make_policy
from tilework.policy.traits import RemembersPipelines


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """The configuration of a controller.

    Attributes:
        policy: name of the policy.
        max_attempts: a request fails when it has lost this many works in a row without progress.
        max_jobs: the number of requests that may be waiting or running at a time.
        max_backlog_ns: the time that the devices may need for all of these (see `admission.admission_limits`).
        promise_price: the number of kept deadlines of other jobs that a promise may cost; inf: any number.
        max_batch: the largest number of requests that share a forward pass. With 1 an image still depends on how many
            devices its request gets: see `core.request.Request.exact`.
        max_residents: the number of jobs of which a device keeps state or conditioning, unless more run on it.
    """

    policy: str = DEFAULT_POLICY
    max_attempts: int = 3
    max_jobs: int = 32_768
    max_backlog_ns: int = 3600 * NS_PER_S
    promise_price: float = PROMISE_PRICE
    max_batch: int = 12
    max_residents: int = 64


class Controller:
    """Decides on events; see the theory of operation above. Not thread-safe: one driver calls it."""

    def __init__(
        self,
        config: ControllerConfig,
        table: CostTable,
        *,
        policy: Policy | None = None,
        rule: Admission | None = None,
    ) -> None:
        """Use `policy` and `rule` (of admission), where given, in place of those that `config` names.

        Raises UnknownPolicy, also if the policy does not keep pipelines to the devices that the table has for them.
        """
        check_pools(config.policy, table.devices)
        self.config = config
        self.costs = TableCosts(table, max_batch=config.max_batch)
        self.policy = policy = policy or make_policy(config.policy)
        limits = AdmissionLimits(max_jobs=config.max_jobs, max_backlog_ns=config.max_backlog_ns)
        self._rule = rule or Admission(limits=limits, promise_price=config.promise_price)
        self._guard = guard = ReservationGuard(degrees=policy.degrees, book=self._rule.book)
        self.tracker = Tracker(policy, self.costs)
        self._recovery = Recovery(self.tracker, guard, config.max_attempts)
        expiry = Expiry(policy, self.costs, self.tracker, self._recovery)
        self._admit = Admit(self._rule, policy, self.costs, self.tracker, guard, expiry)
        memory = MemoryShortage(policy, self.costs, self.tracker, guard, self._recovery)
        self._reports = Reports(self._rule, self._admit, self.costs, self.tracker, self._recovery, memory, guard)
        self._components = Components(self.costs, self.tracker)
        self._measurements = Measurements(self.tracker, self._components)
        self._planner = Planner(
            policy,
            self.costs,
            self.tracker,
            guard,
            expiry,
            self._recovery,
            self._components,
            self._measurements,
            config.max_residents,
        )

    def handle(self, event: Event, now_ns: int) -> tuple[Action, ...]:
        """Record an event; returns the actions that follow from it, in the order in which to perform them."""
        self.tracker.set_time(now_ns)
        if self.costs.forget_memory(now_ns):
            self.tracker.unpark()
        actions = self._record(event, now_ns)
        if not any(isinstance(action, Reject) for action in actions):  # A refusal changes nothing.
            following = self._planner.plan(now_ns)
            actions = self._admit.after_plan(actions, now_ns) + following
        return tuple(actions)

    def check(self, served: ModelServed) -> None:
        """Raise BadCostTable, or another error of `handle`, if a model cannot be served by these costs."""
        TableCosts(self.costs.served(_costs(served)), max_batch=self.config.max_batch)

    def predict(self, job_id: int, now_ns: int) -> EtaPrediction:
        """Return when a job that has not ended is expected to be done, as of now."""
        self.tracker.set_time(now_ns)
        return self._rule.predict(self.tracker.jobs[job_id], self.policy, self.costs, self.tracker, now_ns)

    @property
    def guard_counts(self) -> GuardCounts:
        """Numbers of starts and stops that the guard of promises held back, and of works that it started itself."""
        return self._guard.counts

    @property
    def num_jobs(self) -> int:
        """Number of jobs that have not ended."""
        return len(self.tracker.jobs)

    @property
    def num_waiting(self) -> int:
        return self.tracker.num_waiting()

    @property
    def num_in_flight(self) -> int:
        """Number of works that have not ended."""
        return len(self.tracker.works)

    def occupancy(self, now_ns: int) -> Occupancy:
        """Return the numbers of jobs that wait and run now. Takes time in proportion to the number of open jobs."""
        self.tracker.set_time(now_ns)
        return occupancy(self.tracker)

    def standing_refusal(self, now_ns: int) -> Reject | None:
        """Return the refusal that every request without a promise gets now; None if one may be accepted."""
        self.tracker.set_time(now_ns)
        return self._rule.limits.standing_refusal(self.tracker, now_ns)

    def backlog_ns(self, now_ns: int) -> int:
        """Return the device time that open jobs still take, as in `occupancy`, in constant time."""
        self.tracker.set_time(now_ns)
        return backlog_ns(self.tracker)

    def _record(self, event: Event, now_ns: int) -> list[Action]:
        match event:
            case Submitted() as submitted:
                return self._admit.admit(submitted.begun, now_ns)
            case Restored(request, position):
                return self._admit.restore(request, position, now_ns)
            case LeftOut() | WorkFinished() | Stopped() | WorkFailed() | OutOfMemory() | Broken():
                return self._reports.on_report(event, now_ns)
            case Cancelled(uid, reason):
                job_id = self.tracker.job_ids.get(uid)
                if job_id is None:
                    return []
                return self._recovery.end(self.tracker.jobs[job_id], Status.CANCELLED, reason)
            case DeviceJoined() | LinksChanged() | NodeCordoned() | NodesSilent() | StatesFetched():
                self._learn_of_nodes(event)
            case ComponentsLoaded() | ComponentsRead():
                self._components.on_report(event)
            case DeviceLost() | NodeLost():
                return self._on_devices_lost(event, now_ns)
            case ModelServed() | ModelRemoved():
                return self._change_models(event)
            case MeasurementAsked():
                self._measurements.ask(event, now_ns)
            case MeasurementEnded(measurement_id):
                self._measurements.end(measurement_id)
            case Woke():
                self._planner.on_woke(now_ns)
        return []

    def _learn_of_nodes(self, event: DeviceJoined | LinksChanged | NodeCordoned | NodesSilent | StatesFetched) -> None:
        """Record changes of devices and links, or learn how long states take between two nodes."""
        match event:
            case DeviceJoined():
                self._components.join(event)
                self.tracker.unpark()
            case LinksChanged(alone, is_linking):
                self.tracker.change_links(alone, is_linking=is_linking)
                self._guard.recheck()
                self.tracker.unpark()
            case NodeCordoned(_, device_ids):
                for device_id in device_ids:
                    self.tracker.cordon(device_id)
            case NodesSilent(nodes):
                self.tracker.silent_nodes = frozenset(nodes)
            case StatesFetched(origin, node, num_bytes, run_ns):
                self.costs.observe_move((origin, node), num_bytes, run_ns)

    def _change_models(self, event: ModelServed | ModelRemoved) -> list[Action]:
        if isinstance(event, ModelRemoved):
            actions = self._components.remove(event.pipeline)
            self._forget(event.pipeline)
            return actions
        part = _costs(event)
        before = self.costs.table
        actions = self._components.serve(part)
        for pipeline in part.pipelines:
            if pipeline in before.pipelines and before.graph(pipeline) != part.graph(pipeline):
                self._forget(pipeline)  # Another pipeline has its name.
        self.tracker.unpark()
        return actions

    def _forget(self, pipeline: str) -> None:
        """Forget what is known under the name of a pipeline that is served no more."""
        self.costs.forget(pipeline)
        self._rule.forget(pipeline)
        if isinstance(self.policy, RemembersPipelines):
            self.policy.forget(pipeline, self.costs)

    def _on_devices_lost(self, event: DeviceLost | NodeLost, now_ns: int) -> list[Action]:
        """Lose the works that only these devices had; works with survivors end later, by `Broken`."""
        lost: list[Work] = []
        for device_id in event.device_ids:
            if device_id in self.tracker.up:
                lost += self.tracker.remove_device(device_id, self._reports.early_work_ids)
        actions = self._recovery.devices_lost(event, lost)
        return actions + self._reports.release_early(lost, now_ns)


def _costs(served: ModelServed) -> CostTable:
    return parse_table(json.loads(served.costs))
