"""The order of service, by arrival or by deadline, and the jobs whose deadline can no longer be met."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tilework.core.block import Demand
from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel, JobView
from tilework.core.request import Request
from tilework.core.time import NS_PER_S, s_from_ns
from tilework.cost.demand import fitting_degrees
from tilework.policy.toolkit.known_demands import Choices, KnownDemands


class ArrivalOrdered:
    """A base of policies: first come, first served. Deadlines, weights and tenants are ignored."""

    __slots__ = ()

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return request.arrival_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineOrder:
    """Earliest deadline first, with a turn for requests that have no deadline or can no longer meet it.

    A job that is dropped to best effort is served as if its deadline were `late_patience_ns` after its arrival. A job
    without a deadline is served as if it had one after `patience_ns`. Both times are divided by the weight of the
    request, and both begin `delay_ns` after its arrival, so that tenants take turns (see `control.cluster.load`).

    Deadlines of later arrivals pass these points in time, so no job starves. Under an overload that outlasts them, late
    jobs displace those that could be on time; only refusing requests (`on_miss: reject`) prevents that.
    """

    patience_ns: int = 60 * NS_PER_S
    late_patience_ns: int = 600 * NS_PER_S

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        if request.deadline_ns is not None and not dropped_to_best_effort:
            return request.deadline_ns
        from_ns = request.arrival_ns + delay_ns
        if request.deadline_ns is None:
            return from_ns + int(self.patience_ns / request.weight)
        return max(request.deadline_ns, from_ns + int(self.late_patience_ns / request.weight))


@dataclass(slots=True, kw_only=True)
class DeadlineOrdered:
    """A base of policies that serve the earliest deadline first."""

    order: DeadlineOrder = field(default_factory=DeadlineOrder)

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return self.order.urgency_ns(request, dropped_to_best_effort, delay_ns)


def by_urgency(job: JobView) -> tuple[int, int]:
    """Return the key by which jobs are sorted into the order of service."""
    return job.urgency_ns, job.job_id


def jobs_at_hand(view: ClusterView, num_waiting: int | None) -> Iterator[JobView]:
    """Yield jobs that have a device, and `num_waiting` from the head of the queue; None: all that wait.

    Each comes once: a job that was begun again waits while a remnant of its former attempt still has a device.
    """
    ids = {job_id: None for device in view.devices for work in device.works for job_id in work.job_ids}
    ids |= {job.job_id: None for job in islice(view.waiting(), num_waiting)}
    yield from (job for job_id in ids if (job := view.job(job_id)) is not None)


@dataclass(slots=True, kw_only=True)
class DeadlinePolicy(DeadlineOrdered):
    """Earliest deadline first, at any degree that fits. The predicted degree is the cheapest one in time."""

    known: KnownDemands = field(init=False)

    def __post_init__(self) -> None:
        self.known = KnownDemands(self.degrees)

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return fitting_degrees(request, costs)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        """Return the work at the cheapest degree that meets the deadline from the arrival on; else at the fastest."""
        return self.cheapest(request, self.known.of(request, left, costs))

    def forget(self, pipeline: str, costs: CostModel) -> None:
        self.known.forget(pipeline)

    def cheapest(self, request: Request, choices: Choices) -> Demand:
        return choices.cheapest_in_time(self.order.urgency_ns(request, False) - request.arrival_ns)


def drop_reason(job: JobView, earliest_ns: int) -> str | None:
    """Return the reason to drop a job that ends at `earliest_ns` at the earliest to best effort; None if there is none.

    A job with a promised deadline keeps its place: if the promise is broken, then by as little as possible.
    """
    deadline_ns = job.request.deadline_ns
    if deadline_ns is None or job.dropped_to_best_effort or job.request.is_promise or earliest_ns <= deadline_ns:
        return None
    return f"even if nothing else ran, it would finish {s_from_ns(earliest_ns - deadline_ns):.2f} s late"


def late_jobs(earliest_ns: Iterable[tuple[JobView, int]]) -> tuple[tuple[int, str], ...]:
    """Return the jobs to drop to best effort, each with the reason, from jobs and their earliest ends.

    A plan that drops jobs starts nothing: the controller then asks for another plan in the new order of service.
    """
    return tuple([(job.job_id, why) for job, end_ns in earliest_ns if (why := drop_reason(job, end_ns)) is not None])
