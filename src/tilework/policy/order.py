"""The order of service of policies that serve the earliest deadline first and let nobody starve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tilework.core.interfaces import ClusterView, JobView
from tilework.core.request import Request
from tilework.core.time import NS_PER_S, s_from_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineOrder:
    """Earliest deadline first, with a deadline for everybody.

    A job that cannot be on time any more is set aside: it is served as if its deadline were `late_patience_ns` after
    its arrival. A job without a deadline is served as if it had one after `patience_ns`. Deadlines of later arrivals
    pass these points in time, so nobody starves; under an overload that outlasts them, the late displace those that
    could be on time, which only refusing requests (`on_miss: reject`) prevents.
    """

    patience_ns: int = 60 * NS_PER_S
    late_patience_ns: int = 600 * NS_PER_S

    def urgency_ns(self, request: Request, set_aside: bool) -> int:
        if request.deadline_ns is None:
            return request.arrival_ns + self.patience_ns
        return request.arrival_ns + self.late_patience_ns if set_aside else request.deadline_ns


def by_urgency(job: JobView) -> tuple[int, int]:
    return job.urgency_ns, job.job_id


def jobs_at_hand(view: ClusterView, num_waiting: int) -> Iterator[JobView]:
    """Jobs that have a device, and `num_waiting` from the head of the queue.

    Each comes once: a job that was begun again waits while a remnant of its former attempt still has a device.
    """
    ids = {job_id: None for gpu in view.gpus for work in gpu.works for job_id in work.job_ids}
    ids |= {job.job_id: None for job in islice(view.waiting(), num_waiting)}
    yield from (job for job_id in ids if (job := view.job(job_id)) is not None)


def is_doomed(job: JobView, finish_ns: int) -> bool:
    """Whether a job that is not yet set aside must be, since it ends at `finish_ns` at the earliest."""
    deadline_ns = job.request.deadline_ns
    return deadline_ns is not None and not job.set_aside and finish_ns > deadline_ns


def explain(job: JobView, verb: str) -> str:
    """`verb` says what happens to the job; added is how urgent it is."""
    if job.request.deadline_ns is None:
        return f"{verb}; no deadline"
    if job.set_aside:
        return f"{verb}; it cannot be on time any more"
    slack_s = s_from_ns(job.request.deadline_ns - job.request.arrival_ns)
    return f"{verb}; due {slack_s:.2f} s after arrival"
