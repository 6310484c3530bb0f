"""The page of a policy's author: the methods of a policy, and all that it sees of the cluster and of costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tilework.core.block import Block, Demand
from tilework.core.component import Memory
from tilework.core.graph.graph import Graph
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import Stage
from tilework.core.pools import Pools
from tilework.core.request import Request, Shape
from tilework.core.time import Margins
from tilework.core.weights import SourcesView, WeightCosts
from tilework.core.work import Group, Plan, Work


class Policy(Protocol):
    """A rule that decides what runs where. Deterministic: the same calls give the same plans.

    It may keep state, such as the end of a round, so it belongs to one controller. Admission and the reservation guard
    use `urgency_ns`, `degrees` and `demand`, too.
    """

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        """Return the place of a request in the order of service, smaller first.

        Asked once, and again when it drops to best effort. `delay_ns` is what its tenant's own requests before it take
        at the tenant's share (`control.cluster.load`). Policies that are fair to tenants add it where they do not order
        by deadlines.
        """

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        """Return the degrees at which the policy may run the steps of a request. Raises UnknownCost."""

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        """Return the remaining work of a request as the policy expects to run it. Raises UnknownCost."""

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """Return what starts now, and what else is to be done."""


class ClusterView(Protocol):
    """The cluster as a policy sees it: live, indexed and read-only.

    Attributes:
        devices: accelerators that are up, by id; policies do not deal with CPU slots. The object is another one
            whenever devices have joined or are lost, or lie in other pools.
        is_linking: True if accelerators that are alone in their pools now will be in wider ones within seconds.
        margins: times by which reservations must end before their deadlines; they follow the measured times of works.
        needs_loads: True if a device lacks components that some stage needs, or may have to drop some for activations.
            If false, no work ever waits for a load.
        sources: sources from which devices load what they lack.
    """

    @property
    def devices(self) -> Sequence[DeviceView]: ...
    @property
    def is_linking(self) -> bool: ...
    @property
    def margins(self) -> Margins: ...
    @property
    def needs_loads(self) -> bool: ...
    @property
    def sources(self) -> SourcesView: ...

    def device(self, device_id: int) -> DeviceView | None:
        """Return the device with this id; None while it is down."""

    def on_node(self, node: int) -> Sequence[DeviceView]:
        """Return the accelerators of a node that are up, by id."""

    def job(self, job_id: int) -> JobView | None:
        """Return the job with this id; None if it has ended or is parked. A work may outlive its job."""

    def waiting(self) -> Iterable[JobView]:
        """Return the jobs without a committed work whose next stage runs on an accelerator, by (urgency_ns, job_id)."""

    def most_urgent(self, per_pool: int) -> Sequence[JobView]:
        """Return the first of the `waiting`, in the same order: `per_pool` for each pool that is up and serves them."""

    def promised(self) -> Sequence[JobView]:
        """Return the jobs whose deadline is promised and can be kept, by (deadline, job id)."""


class JobView(Protocol):
    """A job as a policy sees it. Its remaining work is what comes *after* the works that are already committed.

    Attributes:
        works: committed works that have not ended, in order.
        committed: its progress when these have ended.
        left: the work that a policy may start now: `committed`, on a way that ends before the next stage on a CPU slot.
            Its `stage` is None if all is committed, if the last work runs on a slot, or if the next stage does.
        last_devices: devices that will have its state when its works have ended: its latest work's group without lost
            devices.
        demand: its remaining work as the policy expects to run it, as of its latest change.
        promised: the reservation for this work if its deadline is promised; `ready_ns` is as if it had no works.
        urgency_ns: its place in the policy's order, from `Policy.urgency_ns`: smaller first, ties by job id.
        delay_ns: the part of `urgency_ns` by which it is delayed for its tenant's own earlier requests.
        dropped_to_best_effort: True once its deadline can no longer be met.
        is_stopping: True if its works were told to stop and have not all ended; until then it must not be started.
        may_stop: True if a plan may stop its works: not twice without progress in between, so that stops end. Jobs that
            share works stop together or not at all. A promised job's works run on if stopping them would leave no proof
            (`admission.reservation_guard`).
        may_share: True if its works may have other members. Not while its works fail, since the others would fail with
            it. Never if it is exact, or if its arguments add passes (`Request.passes`).
    """

    @property
    def job_id(self) -> int: ...
    @property
    def request(self) -> Request: ...
    @property
    def works(self) -> Sequence[Work]: ...
    @property
    def committed(self) -> Cursor: ...
    @property
    def left(self) -> Cursor: ...
    @property
    def last_devices(self) -> Group: ...
    @property
    def demand(self) -> Demand: ...
    @property
    def promised(self) -> Block | None: ...
    @property
    def urgency_ns(self) -> int: ...
    @property
    def delay_ns(self) -> int: ...
    @property
    def dropped_to_best_effort(self) -> bool: ...
    @property
    def is_stopping(self) -> bool: ...
    @property
    def may_stop(self) -> bool: ...
    @property
    def may_share(self) -> bool: ...


class DeviceView(Protocol):
    """An accelerator as a policy sees it. A policy may queue one work after the running one.

    Attributes:
        pool: number of its pool (`core.pools.Pools`): a group lies in one pool. Usually that is the pool of its node.
            An accelerator that is not connected with the others of its node is a pool of its own.
        works: the running work first, then queued ones; empty when idle. A measurement is a work of `core.work.NO_JOB`;
            it begins when it is alone there.
        free_ns: predicted end of these, and of the loads for which none of them waits; not before now.
        memory: its components and free bytes then. A start that needs other components loads them first.
        is_loading: True while it loads components for which none of its works waits. `memory` counts these as loaded
            already. A work that needs others is not delayed: the load is paused while it runs.
        num_changes: number of times that a work was committed, left or was told to stop, or a load ahead of need ended.
    """

    @property
    def device_id(self) -> int: ...
    @property
    def node(self) -> int: ...
    @property
    def pool(self) -> int: ...
    @property
    def works(self) -> Sequence[Work]: ...
    @property
    def free_ns(self) -> int: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def is_loading(self) -> bool: ...
    @property
    def num_changes(self) -> int: ...

    def end_ns(self, work: Work) -> int:
        """Return the predicted end of one of its works, not before now; 0 for a work that it does not have."""


class CostModel(Protocol):
    """Predicted durations, and the graphs of the pipelines that have them.

    Attributes:
        pools: pools, which say which accelerators serve which pipelines.
        weights: components and activations of stages, and the times of loads.
    """

    @property
    def pools(self) -> Pools: ...
    @property
    def weights(self) -> WeightCosts: ...

    def graph(self, pipeline: str) -> Graph:
        """Return the graph of a pipeline. Raises UnknownCost."""

    def start(self, request: Request) -> Cursor:
        """Return the progress of a request of which nothing is done. Raises UnknownCost."""

    def version_of(self, request: Request) -> int:
        """Return a number that changes when an answer about works of this request, or of similar ones, may change."""

    def work_ns(self, stage: Stage, requests: Sequence[Request], degree: int, num_steps: int = 1) -> int:
        """Return the device time of a work, without the gap between two works. Raises UnknownCost."""

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

    def knows(self, stage: Stage, request: Request) -> bool:
        """Return whether the time of such a work alone on one device was measured; otherwise it is interpolated."""

    def prediction_error(self, stage: Stage) -> float:
        """Return the recent mean of |measured / predicted - 1| of batches."""

    def move_ns(self, request: Request, progress: Cursor, nodes: tuple[int, int]) -> int:
        """Return how long the state of a request takes from one of these nodes to a device of the other.

        They may be the same node; then the target is a device that has nothing of it.
        """
