"""The contracts between the controller and its parts: policies, cost models, admission."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from tilework.core.actions import Reject
from tilework.core.component import Component, LoadSource, Memory
from tilework.core.graph.graph import Graph
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import Stage
from tilework.core.pools import Pools, Within
from tilework.core.request import Request, Shape
from tilework.core.time import Margins
from tilework.core.work import Group, Plan, Work


class Demand(NamedTuple):
    """The remaining work of a job as blocks of device x time, one after another, `run_ns` in all.

    The first device is taken from start to end: it runs the stages without steps, too. The other devices, of `width`,
    are not taken in the first `before_ns` and the last `after_ns`. `slot` is the time, from and until, counted from the
    start, in which a CPU slot is taken; None: never. The first device waits meanwhile.
    """

    width: int
    run_ns: int
    before_ns: int = 0
    after_ns: int = 0
    slot: tuple[int, int] | None = None

    @property
    def device_ns(self) -> int:
        """Time of all its accelerators together."""
        others = self.width - 1
        return self.run_ns + others * (self.run_ns - self.before_ns - self.after_ns) if others else self.run_ns

    @property
    def is_flat(self) -> bool:
        """True if all its devices are taken from start to end, and no CPU slot is."""
        return not self.before_ns and not self.after_ns and self.slot is None


@dataclass(frozen=True, slots=True)
class Block:
    """The reservation for the remaining work of a promised job: `demand`, not before `ready_ns`, due at `due_ns`.

    `devices` is the group on which the job is to run, the device for stages without steps first; empty if none is
    chosen yet. `slot` is its CPU slot if it needs one; None if none is chosen yet, or none is up. `demand` assumes that
    certain components are loaded; `unloaded` is the demand where they must be loaded: on other devices, or after other
    works on these. It is None if `demand` assumes none. Only devices `within` may run it.
    """

    due_ns: int
    ready_ns: int
    demand: Demand
    devices: Group = ()
    slot: int | None = None
    unloaded: Demand | None = None
    within: Within = None

    def after(self, ready_ns: int) -> Block:
        """Return the block for a job that has works until `ready_ns`. Written out: `replace` takes twice as long."""
        return Block(self.due_ns, ready_ns, self.demand, self.devices, self.slot, self.unloaded, self.within)

    @property
    def if_unloaded(self) -> Block:
        """Block in case the components of the job's next stages are not on its devices when it begins."""
        return self if self.unloaded is None else replace(self, demand=self.unloaded, unloaded=None)

    def windows(self) -> Iterator[tuple[int, int, int]]:
        """Yield each of its devices with when it is taken, from and until, counted from the start of the block."""
        demand = self.demand
        for index, device_id in enumerate(self.devices):
            yield device_id, demand.before_ns if index else 0, demand.run_ns - (demand.after_ns if index else 0)
        if self.slot is not None and demand.slot is not None:
            yield self.slot, *demand.slot


class Boundary(NamedTuple):
    """Positions of jobs, by id, when their works have stopped; the time of that; and when their devices are free then.

    The jobs are all those that share works with each other.
    """

    positions: Mapping[int, int]
    end_ns: int
    free_ns: Mapping[int, int]


class JobView(Protocol):
    """A job as a policy sees it. Its remaining work is what comes *after* the works that are already committed."""

    @property
    def job_id(self) -> int: ...
    @property
    def request(self) -> Request: ...
    @property
    def committed(self) -> Cursor:
        """Progress of the job when all works in flight have ended."""

    @property
    def left(self) -> Cursor:
        """Work that a policy may start now: `committed`, on a way that ends before the next stage on a CPU slot.

        Nothing is left while the last work runs on a slot.
        """

    @property
    def stage(self) -> Stage | None:
        """First stage of `left`; None if all is committed, or if the next stage runs on a CPU slot."""

    @property
    def num_steps_left(self) -> int:
        """Number of steps, of all stages of `left`."""

    @property
    def demand(self) -> Demand:
        """Remaining work as the policy expects to run it, as of the job's latest change."""

    @property
    def eta_prediction(self) -> EtaPrediction:
        """Prediction that the client was told when the job was accepted."""

    @property
    def promised(self) -> Block | None:
        """Reservation for its remaining work, if its deadline is promised; `ready_ns` is as if it had no works."""

    @property
    def urgency_ns(self) -> int:
        """Place in the policy's order, from `Policy.urgency_ns`: smaller is served first, ties by job id."""

    @property
    def delay_ns(self) -> int:
        """Part of `urgency_ns` by which the job is delayed for its tenant's own earlier requests."""

    @property
    def dropped_to_best_effort(self) -> bool: ...
    @property
    def is_stopping(self) -> bool:
        """True if its works were told to stop and have not all ended; until then it must not be started."""

    @property
    def may_stop(self) -> bool:
        """True if a plan may stop its works: not twice without progress in between, so that stops end.

        Jobs that share works stop together or not at all. A promised job's works run on if stopping them would leave no
        proof (`admission.reservation_guard`).
        """

    @property
    def may_share(self) -> bool:
        """True if its works may have other members.
        Not while its works fail, since the others would fail with it. Never if it is exact, or if its arguments add
        passes (`Request.passes`).
        """

    @property
    def last_devices(self) -> Group:
        """Devices that will have its state when its works have ended: its latest work's group without lost devices."""

    @property
    def works(self) -> Sequence[Work]:
        """Committed works that have not ended, in order."""


class DeviceView(Protocol):
    """An accelerator as a policy sees it. A policy may queue one work after the running one."""

    @property
    def device_id(self) -> int: ...
    @property
    def node(self) -> int: ...
    @property
    def pool(self) -> int:
        """Number of its pool (`core.pools.Pools`): a group lies in one pool. Usually the pool is that of its node; an

        accelerator that is not connected with the others of its node is a pool of its own.
        """

    @property
    def works(self) -> Sequence[Work]:
        """Running work first, then queued ones; empty when idle."""

    @property
    def is_loading(self) -> bool:
        """True while it loads components for which none of its works waits. `memory` counts these as loaded already.

        A work that needs others is not delayed: the load is paused while it runs.
        """

    @property
    def free_ns(self) -> int:
        """Predicted end of the committed works, and of the loads for which none of them waits; not before now."""

    @property
    def num_changes(self) -> int:
        """Number of times that a work was committed, left or was told to stop, or a load ahead of need has ended."""

    @property
    def memory(self) -> Memory:
        """Components and free bytes when its works have ended. A start that needs other components loads them first."""

    def end_ns(self, work: Work) -> int:
        """Return the predicted end of one of its works, not before now; 0 for a work that it does not have."""


class ReservationChange(NamedTuple):
    """A new or changed reservation of a promised job; `block` is None if it is gone."""

    due_ns: int
    job_id: int
    block: Block | None


class ReservationChanges(NamedTuple):
    """Latest changes of reservations, the latest last. `number` counts all changes ever made, to ask from next time.

    `is_all`: these are all reservations, since the earlier changes are no longer known.
    """

    number: int
    changes: Sequence[ReservationChange]
    is_all: bool


class Reserves(Protocol):
    """The reservations of promised jobs, and the devices that are up."""

    @property
    def devices(self) -> Sequence[DeviceView]:
        """Accelerators that are up, by id. Policies do not deal with CPU slots.

        The object is another one whenever devices have joined or are lost, or lie in other pools.
        """

    @property
    def slots(self) -> Sequence[DeviceView]:
        """CPU slots that are up, by id; another object whenever one has joined or is lost."""

    @property
    def silent(self) -> frozenset[int]:
        """Accelerators and CPU slots of nodes that have sent nothing for a moment, and may be lost."""

    @property
    def needs_loads(self) -> bool:
        """True if a device lacks components that some stage needs, or may have to drop some for activations.

        If false, no work ever waits for a load.
        """

    def promised(self) -> Sequence[JobView]:
        """Return the jobs whose deadline is promised and can be kept, by (deadline, job id)."""

    def job(self, job_id: int) -> JobView | None:
        """Return the job with this id; None if it has ended or is parked. A work may outlive its job."""

    @property
    def margins(self) -> Margins:
        """Times by which reservations must end before their deadlines; they follow the measured times of works."""

    def reserved(self, most: int | None = None) -> Sequence[Block]:
        """Return the reservation of each promised job, or of the first `most`, by (deadline, job id).
        Each is ready when the works of its job end.
        """

    def begun_reservations(self) -> Sequence[tuple[int, int, Block]]:
        """Return those of the `reserved` whose jobs have works: deadline, job id, reservation."""

    def reservation_changes(self, since: int) -> ReservationChanges:
        """Return the changes of reservations since this number of changes, as if no job had works."""


class ClusterView(Reserves, Protocol):
    """The cluster as a policy sees it: live, indexed and read-only."""

    def device(self, device_id: int) -> DeviceView | None:
        """Return the device with this id; None while it is down."""

    def on_node(self, node: int) -> Sequence[DeviceView]:
        """Return the accelerators of a node that are up, by id."""

    @property
    def is_linking(self) -> bool:
        """True if accelerators that are alone in their pools now will be in wider ones within seconds."""

    def load_ns(self, device_id: int, stage: Stage) -> int:
        """Return how long an accelerator would load, after its works, the components of a stage that it lacks.

        They come from the quickest sources that have them now. 0 if it lacks none.
        """

    def kept_by_host(self, node: int) -> Sequence[Component]:
        """Return the components that the host of a node keeps in memory, the least recently used first."""

    def may_read(self, node: int) -> bool:
        """Return whether the host of a node can read ahead of need now; it does so for one stage at a time."""

    @property
    def unreadable(self) -> Collection[Component]:
        """Components that a host could not read ahead. Devices load them themselves."""

    def waiting(self) -> Iterable[JobView]:
        """Return the jobs without a committed work whose next stage runs on an accelerator, by (urgency_ns, job_id)."""

    def most_urgent(self, per_pool: int) -> Sequence[JobView]:
        """Return the first of the `waiting`, in the same order: `per_pool` for each pool that is up and serves them."""


class CostModel(Protocol):
    """Predicted durations, and the graphs of the pipelines that have them."""

    def graph(self, pipeline: str) -> Graph:
        """Return the graph of a pipeline. Raises UnknownCost."""

    @property
    def pools(self) -> Pools:
        """Pools, which say which accelerators serve which pipelines."""

    def start(self, request: Request) -> Cursor:
        """Return the progress of a request of which nothing is done. Raises UnknownCost."""

    def version_of(self, request: Request) -> int:
        """Return a number that changes when an answer about works of this request, or of similar ones, may change."""

    def work_ns(self, stage: Stage, requests: Sequence[Request], degree: int, num_steps: int = 1) -> int:
        """Return the device time of a work, without the gap between two works. Raises UnknownCost."""

    def activation_bytes(self, stage: Stage, requests: Sequence[Request], degree: int) -> int:
        """Return the bytes that a work needs on each of its `degree` devices beyond the weights; 0 if not known."""

    def degrees(self, stage: Stage) -> tuple[int, ...]:
        """Return the degrees at which the stage was profiled, ascending; (1,) for a stage that costs nothing."""

    def common_degrees(self, pipeline: str) -> tuple[int, ...]:
        """Return the degrees at which all stages with steps were profiled, ascending; 1 if there is none.

        A pipeline is run at these degrees, so that a request may keep its group from one stage to the next. None is
        wider than the pipeline's widest pool can be. Raises UnknownCost.
        """

    def fits(self, stage: Stage, shape: Shape, degree: int) -> bool:
        """Return whether such a work fits into memory at this degree, as far as is known, on an empty device."""

    def fits_together(self, stage: Stage, shapes: Sequence[Shape]) -> bool:
        """Return whether a work of several members fits into the memory of one device."""

    def needs_slices(self, stage: Stage, shape: Shape) -> bool:
        """Return whether such a work fits only in slices."""

    def knows(self, stage: Stage, request: Request) -> bool:
        """Return whether the time of such a work alone on one device was measured; otherwise it is interpolated."""

    def has_measured(self, stage: Stage, requests: Sequence[Request], degree: int) -> bool:
        """Return whether such works are predicted by the times of earlier ones, not by a table alone."""

    def components(self, stage: Stage) -> tuple[Component, ...]:
        """Return the components that a stage needs, as far as the table knows them."""

    @property
    def all_components(self) -> tuple[Component, ...]:
        """Components that stages of all pipelines need, each once."""

    @property
    def most_bytes(self) -> int:
        """Bytes with which a device never drops a component: all that stages need, and the largest activation known."""

    def load_ns(self, num_bytes: int, source: LoadSource | None = None) -> int:
        """Return how long components of this size take to load from a source; None: from the slowest."""

    def quickest_source(self, available: frozenset[LoadSource]) -> LoadSource:
        """Return the source from which loads are quickest, of those that have the components."""

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of components that a device holds; None: no limit."""

    @property
    def host_bytes(self) -> int | None:
        """Bytes of components that the host of a node keeps after its devices have read them; None: all."""

    def prediction_error(self, stage: Stage) -> float:
        """Return the recent mean of |measured / predicted - 1| of batches."""

    def move_ns(self, request: Request, progress: Cursor, nodes: tuple[int, int]) -> int:
        """Return how long the state of a request takes from one of these nodes to a device of the other.

        They may be the same node; then the target is a device that has nothing of it.
        """

    def observe(self, stage: Stage, requests: Sequence[Request], degree: int, num_steps: int, run_ns: int) -> None:
        """Correct the prediction by a measurement."""


class Policy(Protocol):
    """A rule that decides what runs where. Deterministic: the same calls give the same plans.

    It may keep state, such as the end of a round, so it belongs to one controller.
    """

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        """Return the place of a request in the order of service; asked once, and again when it drops to best effort.

        `delay_ns` is what its tenant's own requests before it take at the tenant's share (see `Backlog.delay_ns`).
        Policies that are fair to tenants add it where they do not order by deadlines.
        """

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        """Return the degrees at which the policy may run the steps of a request. Raises UnknownCost."""

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        """Return the remaining work of a request as the policy expects to run it. Raises UnknownCost."""

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan: ...


@runtime_checkable
class NeedsFuture(Protocol):
    """A policy that decides by requests that have not come yet: for comparisons, since only a simulation can run it."""

    def foresee(self, requests: Sequence[Request]) -> None:
        """Learn all future requests, before the first one comes."""


@runtime_checkable
class RefusesRequests(Protocol):
    """A policy that refuses requests for its own reasons, beside those of admission."""

    def refusal(self, request: Request, costs: CostModel, now_ns: int) -> Reject | None:
        """Return the refusal of a request, with `retry_ns`; None if the policy has room for it. Raises UnknownCost.

        Asked while a device is up. Of requests submitted together, each is judged as if the others were not there.
        """


@runtime_checkable
class WeighsJobs(Protocol):
    """A policy that can say what one more job would cost others. It stops works, so admission may do so for it."""

    def num_missed(self, job: JobView, view: ClusterView, costs: CostModel, now_ns: int) -> int:
        """Return how many deadlines of other jobs would be missed with this job that are kept without it.

        The job waits, is not in the view, and is served whatever that costs. No further request is assumed to come.
        Asking changes no decision.
        """


@runtime_checkable
class PredictsEnds(Protocol):
    """A policy that plans so far ahead that it knows when jobs end if no other request comes."""

    def end_ns(self, job: JobView) -> int | None:
        """Return when a job ends by the latest plan, which may be past; None if that plan did not look at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementStatus:
    """State of the devices of one placement type, as counted by a policy that chooses placements by it.

    Attributes:
        name: the type, as in `NewPlacement`.
        num_devices: the number of devices of this type.
        window_ns: the length of the sliding window.
        completions: requests whose stages they have ended in the window, as predicted when these were started.
        busy_ns: the time for which that kept the devices busy, summed over them.
        backlog: the number of requests that wait for them.
    """

    name: str
    num_devices: int
    window_ns: int
    completions: int
    busy_ns: int
    backlog: int


@runtime_checkable
class RemembersPipelines(Protocol):
    """A policy that keeps data about the pipelines for which requests came."""

    def forget(self, pipeline: str, costs: CostModel) -> None:
        """Drop all that is known under a pipeline's name: the next pipeline of that name may be another.

        The pipeline is served no more and has no jobs. `costs` do not know it, or know the next one.
        """


@runtime_checkable
class PlacesStages(Protocol):
    """A policy that decides which stages each device is for, and when that changes."""

    def placement_status(self, now_ns: int) -> Sequence[PlacementStatus]:
        """Return the types that devices have now, or that requests wait for. Asking changes nothing."""


class Promise(NamedTuple):
    """The changes by which a deadline can be promised: the reservation of the request, and what must change for it.

    `others` are the reservations that change with it, by job id; `stops` are the jobs whose works must stop.
    """

    block: Block
    others: Mapping[int, Block] = MappingProxyType({})
    stops: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request is accepted, with the prediction of its finish; `why` explains it in words.

    `promise` is how its deadline is promised, if it is. `demand` is the remaining work, as the policy expects to run
    it.
    """

    why: str
    eta_prediction: EtaPrediction
    demand: Demand
    promise: Promise | None = None


@dataclass(frozen=True, slots=True)
class EtaPrediction:
    """A prediction of when a request finishes, made at `at_ns` with `num_jobs` others present.

    Attributes:
        end_ns: the prediction before its correction.
        eta_ns: the finish that the client is told; never before `at_ns`.
        p90_ns: the time by which nine of ten such requests finish; never before `eta_ns`.
        is_foreseen: True if the policy predicted the end (`PredictsEnds`), not a list schedule.
    """

    at_ns: int
    end_ns: int
    eta_ns: int
    p90_ns: int
    num_jobs: int
    is_foreseen: bool = False

    @staticmethod
    def alone(now_ns: int, demand: Demand) -> EtaPrediction:
        """Return the prediction for a request that begins now while nothing else runs."""
        end_ns = now_ns + demand.run_ns
        return EtaPrediction(now_ns, end_ns, end_ns, end_ns, 0)

    def by(self, deadline_ns: int) -> EtaPrediction:
        """Return the same prediction for a request whose deadline is kept."""
        latest_ns = max(deadline_ns, self.at_ns)
        return replace(self, eta_ns=min(self.eta_ns, latest_ns), p90_ns=min(self.p90_ns, latest_ns))


@dataclass(frozen=True, slots=True)
class Held:
    """Number of unfinished requests of a tenant, or of all tenants, and the device time of their remaining work."""

    num_jobs: int
    device_ns: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """The demands of jobs in order of service: the device time of the first jobs together, and each of the others."""

    volume_ns: int
    demands: Sequence[Demand]


class Running(NamedTuple):
    """A job that has works: its place in the order of service (urgency, job id), the end of these, and its demand then.

    A job that waits for a CPU slot has no works; they count as ended now.
    """

    place: tuple[int, int]
    ready_ns: int
    demand: Demand


class Moment(NamedTuple):
    """A version of the state of devices and running jobs: at two equal moments the state is the same.

    Both counts only grow. `now_ns` is the time, or None while nothing depends on it.
    """

    num_job_changes: int
    num_device_changes: int
    now_ns: int | None


class Backlog(ClusterView, Protocol):
    """The jobs that have not ended, as admission sees them."""

    def widest(self, pipeline: str) -> int:
        """Return the largest number of devices of one pool, serving a pipeline, that were up at the same time."""

    def num_jobs(self) -> int: ...
    def held(self, tenant: str | None = None) -> Held:
        """Return the number and device time of the jobs of a tenant, or of all tenants."""

    def promised_to(self, tenant: str) -> Held:
        """Return the number of jobs of a tenant that have reservations, and the device time of these."""

    def rivals_weight(self, tenant: str) -> float:
        """Return the sum of the weights of all other tenants that have jobs."""

    def delay_ns(self, request: Request) -> int:
        """Return how long its tenant's waiting jobs without a deadline take at the tenant's share of the devices.

        Jobs lighter than the request do not count. With this delay the request is served after all jobs that count.
        """

    def waiting_ahead(self, urgency_ns: int, job_id: int | None = None, within: Within = None) -> Ahead:
        """Return the demands of the jobs without works that are served before a job of this urgency.

        Without a job id, before a new job. A job that devices not `within` may run as well counts with a share only.
        """

    def boundaries(self) -> Sequence[Boundary]:
        """Return the boundary of each set of jobs that share works and may be stopped."""

    @property
    def moment(self) -> Moment:
        """Moment as of which `free_ns`, `running` and the time of `reserved` jobs' works hold."""

    def taken_ns(self) -> int:
        """Return how long the accelerators are still taken: the sum of their `free_ns`, counted from now."""

    def free_ns(self, within: Within = None) -> list[int]:
        """Return when the accelerators `within` are free, ascending; the caller may change the list."""

    def running(self, within: Within = None) -> Sequence[Running]:
        """Return the jobs with works on devices `within`, and those that wait for a CPU slot, in order of service.
        A job is left out if nothing is left of it but its works.
        """
