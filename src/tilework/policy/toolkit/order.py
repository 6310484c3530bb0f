"""The order of service: by arrival or by deadline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from tilework.core.interfaces import ClusterView, JobView
from tilework.core.request import Request
from tilework.core.time import NS_PER_S


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
    """The key by which jobs are sorted into the order of service."""
    return job.urgency_ns, job.job_id


def jobs_at_hand(view: ClusterView, num_waiting: int | None) -> Iterator[JobView]:
    """Jobs that have a device, and `num_waiting` from the head of the queue; None: all that wait.

    Each comes once: a job that was begun again waits while a remnant of its former attempt still has a device.
    """
    ids = {job_id: None for device in view.devices for work in device.works for job_id in work.job_ids}
    ids |= {job.job_id: None for job in islice(view.waiting(), num_waiting)}
    yield from (job for job_id in ids if (job := view.job(job_id)) is not None)
