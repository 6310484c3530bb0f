"""The contracts between the controller and its parts: policies, cost models, admission."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tilework.core.progress import Cursor
from tilework.core.request import Request, Shape
from tilework.core.work import Group, Plan, StageId, Work


@dataclass(frozen=True, slots=True)
class Demand:
    """What is left of a job, as a block of the GPU x time plane: `width` devices for `run_ns`."""

    width: int
    run_ns: int


@dataclass(frozen=True, slots=True)
class Block:
    """What is reserved for the rest of a promised job: `demand`, not before `ready_ns`, due at `due_ns`.

    `devices` is its group, on which the job is to run; empty if it has none yet.
    """

    due_ns: int
    ready_ns: int
    demand: Demand
    devices: Group = ()


class JobView(Protocol):
    """A job as a policy sees it: what is left of it *after* the works that are already committed."""

    @property
    def job_id(self) -> int: ...
    @property
    def request(self) -> Request: ...
    @property
    def stage(self) -> StageId | None:
        """The next stage that no work covers yet; None once all are committed."""

    @property
    def num_steps_left(self) -> int:
        """Denoising steps that no work covers yet."""

    @property
    def demand(self) -> Demand:
        """What the policy expects that no work covers yet will take; as of the job's latest change."""

    @property
    def eta_prediction(self) -> EtaPrediction: ...
    @property
    def promised(self) -> Block | None:
        """What is reserved for what no work covers yet, if its deadline is promised; ready as if it had no works."""

    @property
    def urgency_ns(self) -> int:
        """The policy's own order, from `Policy.urgency_ns`; smaller is served first, ties by job id."""

    @property
    def delay_ns(self) -> int:
        """Part of `urgency_ns`: for how long its tenant's own requests before it come first."""

    @property
    def dropped_to_best_effort(self) -> bool: ...
    @property
    def is_stopping(self) -> bool:
        """Whether its works have been told to end early, and have not all done so; until then it may not be started."""

    @property
    def may_stop(self) -> bool:
        """Whether a plan may end its works early: not if it is promised, since more would be left of it then, and not
        twice without progress between, so that changes of mind come to an end. Those that share works end together, or
        not at all.
        """

    @property
    def may_share(self) -> bool:
        """Whether a work of it may have other members: not while its works fail, which would fail others with it."""

    @property
    def last_devices(self) -> Group:
        """Devices that will have its state when its works have ended: the group of the latest, without lost ones."""

    @property
    def works(self) -> Sequence[Work]:
        """Committed works that have not ended, in order."""


class DeviceView(Protocol):
    """One device. A policy may queue one work behind the running one."""

    @property
    def device_id(self) -> int: ...
    @property
    def node(self) -> int: ...
    @property
    def works(self) -> Sequence[Work]:
        """Running work first, then queued ones; empty when idle."""

    @property
    def free_ns(self) -> int:
        """Predicted end of the committed works; not before now."""

    @property
    def num_changes(self) -> int:
        """How often a work was committed to it, has left it or was told to end early."""

    def end_ns(self, work: Work) -> int:
        """Predicted end of one of its works, not before now; 0 for a work that it does not have (any more)."""


class ClusterView(Protocol):
    """Live and indexed; read-only to policies."""

    @property
    def devices(self) -> Sequence[DeviceView]:
        """Devices that are up, by id."""

    def waiting(self) -> Iterable[JobView]:
        """Jobs without a committed work, by (urgency_ns, job_id)."""

    def promised(self) -> Sequence[JobView]:
        """Jobs whose deadline is promised and can be kept, by (deadline, job id)."""

    def reserved(self) -> Sequence[Block]:
        """The block of each of these, ready when its works end."""

    def job(self, job_id: int) -> JobView | None:
        """A job that has not ended, and that may be started; a work may outlive its job, which was cancelled."""


class CostModel(Protocol):
    """Predicted durations. `version` changes whenever an answer may have changed."""

    @property
    def version(self) -> int: ...
    def work_ns(self, stage: StageId, requests: Sequence[Request], degree: int, num_steps: int = 1) -> int:
        """Device time of a work, without what passes between two of them. Raises UnknownCost."""

    def degrees(self, stage: StageId) -> tuple[int, ...]:
        """The degrees at which the stage was profiled, ascending; (1,) for a stage that costs nothing."""

    def fits(self, stage: StageId, shape: Shape, degree: int) -> bool:
        """Whether nothing is known against such a work's fitting into the memory of so many devices."""

    def fits_together(self, stage: StageId, shapes: Sequence[Shape]) -> bool:
        """The same of a work of several members, on one device."""

    def needs_slices(self, stage: StageId, shape: Shape) -> bool:
        """Whether it would fit in slices only."""

    def knows(self, stage: StageId, request: Request) -> bool:
        """Whether the time of such a work alone on one device was measured; otherwise it is interpolated."""

    def prediction_error(self, stage: StageId) -> float:
        """How far the times of batches were from their predictions lately, in the mean, over these."""

    def move_ns(self, source: Group, target: Group) -> int: ...
    def observe(self, stage: StageId, requests: Sequence[Request], degree: int, num_steps: int, run_ns: int) -> None:
        """Correct the prediction by a measurement."""


class Policy(Protocol):
    """A rule that decides what runs where. Deterministic: the same calls, the same plans.

    It may remember (the end of a round), and so belongs to one controller.
    """

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        """The place of a request in the order of service; asked once, and again when it is dropped to best effort.

        `delay_ns` is what its tenant's own requests before it take at the tenant's share (see `Backlog.delay_ns`).
        Policies that are fair to tenants add it where they do not go by deadlines.
        """

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        """The degrees at which it may run the steps of a request. Raises UnknownCost."""

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        """How it expects to run what is left of a request. Raises UnknownCost."""

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan: ...


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request may come in and is expected to finish at `eta_ns`; `why` says what that is made of.

    `promised` is the block of the plane with which its deadline is promised, if it is; `eta_prediction` what the
    prediction was made of, for what admission learns of it.
    """

    eta_ns: int
    why: str
    eta_prediction: EtaPrediction
    promised: Block | None = None


@dataclass(frozen=True, slots=True)
class EtaPrediction:
    """A prediction before its correction: to finish `predicted_ns` after the arrival, beside `num_jobs` others."""

    predicted_ns: int
    num_jobs: int
    ratio: float


@dataclass(frozen=True, slots=True)
class Held:
    """How many requests of a tenant, or of all tenants, have not ended, and the device time of their remaining work."""

    num_jobs: int
    device_ns: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """What jobs take in order of service: the GPU-time of the first ones together, and each of the others."""

    volume_ns: int
    demands: Sequence[Demand]


class Backlog(Protocol):
    """What admission needs to know of the work that is already in the system."""

    @property
    def devices(self) -> Sequence[DeviceView]:
        """Devices that are up."""

    @property
    def widest(self) -> int:
        """The most devices of a node that have been up at a time."""

    def num_jobs(self) -> int: ...
    def held(self, tenant: str | None = None) -> Held:
        """What a tenant has in the system; without one, all of them together."""

    def rivals_weight(self, tenant: str) -> float:
        """The weights of all other tenants that have something in the system."""

    def delay_ns(self, request: Request) -> int:
        """How long what its tenant has waiting without a deadline takes at the tenant's share of the devices.

        What is lighter than the request does not count. With this delay it comes behind all that does.
        """

    def waiting_ahead(self, urgency_ns: int, job_id: int | None = None) -> Ahead:
        """What the jobs without works take that are served before one of this urgency.

        Without a job id, before a newcomer.
        """

    def running_ahead(self, urgency_ns: int, job_id: int | None = None) -> Sequence[Block]:
        """The same of the rests of jobs with works, which are ready when these end."""

    def reserved(self) -> Sequence[Block]:
        """The blocks of jobs whose deadline is promised, by (deadline, job id), ready when their works end."""
