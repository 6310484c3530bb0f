"""The order of service of policies that serve the earliest deadline first and let nobody starve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tilework.core.interfaces import ClusterView, Demand, JobView
from tilework.core.request import Request
from tilework.core.time import NS_PER_S, s_from_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineOrder:
    """Earliest deadline first, with a deadline for everybody.

    A job that cannot be on time any more is set aside: it is served as if its deadline were `late_patience_ns` after
    its arrival. A job without a deadline is served as if it had one after `patience_ns`. Both are divided by the weight
    of the request, and both begin `delay_ns` after its arrival, so that tenants take turns (see `control.load`).
    Deadlines of later arrivals pass these points in time, so nobody starves; under an overload that outlasts them, the
    late displace those that could be on time, which only refusing requests (`on_miss: reject`) prevents.
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


def by_urgency(job: JobView) -> tuple[int, int]:
    return job.urgency_ns, job.job_id


def jobs_at_hand(view: ClusterView, num_waiting: int | None) -> Iterator[JobView]:
    """Jobs that have a device, and `num_waiting` from the head of the queue; None: all that wait.

    Each comes once: a job that was begun again waits while a remnant of its former attempt still has a device.
    """
    ids = {job_id: None for device in view.devices for work in device.works for job_id in work.job_ids}
    ids |= {job.job_id: None for job in islice(view.waiting(), num_waiting)}
    yield from (job for job_id in ids if (job := view.job(job_id)) is not None)


def doom(job: JobView, finish_ns: int) -> str | None:
    """Why a job that is not yet set aside must be, if it must, since it ends at `finish_ns` at the earliest.

    A promised one stays where it is: if its promise is broken, it is by as little as possible.
    """
    deadline_ns = job.request.deadline_ns
    if deadline_ns is None or job.dropped_to_best_effort or job.request.is_promise or finish_ns <= deadline_ns:
        return None
    return f"even if nothing else ran, it would finish {s_from_ns(finish_ns - deadline_ns):.2f} s late"


def explain(job: JobView, verb: str, now_ns: int) -> str:
    """`verb` says what happens to the job; added is how urgent it is."""
    if job.request.deadline_ns is None:
        return f"{verb}; no deadline"
    if job.dropped_to_best_effort:
        return f"{verb}; it cannot be on time any more"
    due_s = s_from_ns(job.request.deadline_ns - now_ns)
    return f"{verb}; due in {due_s:.2f} s, needs {needs(job.demand)}"


def needs(demand: Demand) -> str:
    devices = "1 GPU" if demand.width == 1 else f"{demand.width} GPUs"
    return f"{s_from_ns(demand.run_ns):.2f} s of {devices}"
