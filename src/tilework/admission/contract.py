"""The contract of admission and the controller: the jobs and reservations that it sees, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from tilework.core.block import Block, Demand
from tilework.core.policy import ClusterView, DeviceView
from tilework.core.pools import Within
from tilework.core.request import Request


class Boundary(NamedTuple):
    """Positions of jobs, by id, when their works have stopped; the time of that; and when their devices are free then.

    The jobs are all those that share works with each other.
    """

    positions: Mapping[int, int]
    end_ns: int
    free_ns: Mapping[int, int]


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


class Reserves(ClusterView, Protocol):
    """The reservations of promised jobs, and what they may be on."""

    @property
    def slots(self) -> Sequence[DeviceView]:
        """CPU slots that are up, by id; another object whenever one has joined or is lost."""

    @property
    def silent(self) -> frozenset[int]:
        """Accelerators and CPU slots of nodes that have sent nothing for a moment, and may be lost."""

    def reserved(self, most: int | None = None) -> Sequence[Block]:
        """Return the reservation of each promised job, or of the first `most`, by (deadline, job id).

        Each is ready when the works of its job end.
        """

    def begun_reservations(self) -> Sequence[tuple[int, int, Block]]:
        """Return those of the `reserved` whose jobs have works: deadline, job id, reservation."""

    def reservation_changes(self, since: int) -> ReservationChanges:
        """Return the changes of reservations since this number of changes, as if no job had works."""


class Held(NamedTuple):
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


class Backlog(Reserves, Protocol):
    """The jobs that have not ended, as admission sees them."""

    def widest(self, pipeline: str) -> int:
        """Return the largest number of devices of one pool, serving a pipeline, that were up at the same time."""

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
