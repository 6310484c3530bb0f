"""The contracts between the controller and its parts (design section 12)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tilework.core.request import Request, Shape
from tilework.core.work import Group, Plan, StageId, Work


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
    def remaining_ns(self) -> int:
        """Predicted device time of what no work covers yet, at degree 1; as of the job's latest change."""

    @property
    def urgency_ns(self) -> int:
        """The policy's own order, from `Policy.urgency_ns`; smaller is served first, ties by job id."""

    @property
    def set_aside(self) -> bool: ...
    @property
    def last_gpus(self) -> Group:
        """The group of its latest work; empty before the first. Its state lives there."""

    @property
    def works(self) -> Sequence[Work]:
        """Committed works that have not ended, in order."""


class GpuView(Protocol):
    """One device. A policy may queue one work behind the running one."""

    @property
    def gpu(self) -> int: ...
    @property
    def node(self) -> int: ...
    @property
    def works(self) -> Sequence[Work]:
        """Running work first, then queued ones; empty when idle."""

    @property
    def free_ns(self) -> int:
        """Predicted end of the committed works; not before now."""


class ClusterView(Protocol):
    """Live and indexed; read-only to policies."""

    @property
    def gpus(self) -> Sequence[GpuView]:
        """Devices that are up, by id."""

    def waiting(self) -> Iterable[JobView]:
        """Jobs without a committed work, by (urgency_ns, job_id)."""

    def job(self, job_id: int) -> JobView | None:
        """A job that has not ended; a work may outlive its job, which was cancelled or restarted."""


class CostModel(Protocol):
    """Predicted durations. `version` changes whenever an answer may have changed."""

    @property
    def version(self) -> int: ...
    def run_ns(self, stage: StageId, shapes: Sequence[Shape], degree: int, num_steps: int = 1) -> int: ...
    def move_ns(self, source: Group, target: Group) -> int: ...
    def observe(self, stage: StageId, shapes: Sequence[Shape], degree: int, num_steps: int, run_ns: int) -> None:
        """Correct the prediction by a measurement."""


class Policy(Protocol):
    """A rule that decides what runs where. Deterministic: same view, costs and time, same plan."""

    def urgency_ns(self, request: Request, set_aside: bool) -> int:
        """Place of a request in the order of service; asked once, and again when it is set aside."""

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan: ...


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request may come in and is expected to finish at `eta_ns`."""

    eta_ns: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The request may not come in; `earliest_ns` is the earliest deadline that could be met, if there is one."""

    reason: str
    earliest_ns: int | None


class Backlog(Protocol):
    """What admission needs to know of the work that is already in the system."""

    def num_jobs(self) -> int: ...
    def device_free_ns(self, now_ns: int) -> list[int]:
        """For each device that is up, the predicted end of its committed works."""

    def ahead_ns(self, urgency_ns: int) -> Sequence[int]:
        """Predicted device time of each job that is served before one of this urgency, in order of service."""


class Admission(Protocol):
    def admit(
        self, request: Request, urgency_ns: int, backlog: Backlog, costs: CostModel, now_ns: int
    ) -> Admitted | Refused: ...
