"""Decides which jobs can no longer be on time and are dropped to best effort."""

from __future__ import annotations

from collections.abc import Iterable

from tilework.core.interfaces import JobView
from tilework.core.time import s_from_ns


def drop_reason(job: JobView, earliest_ns: int) -> str | None:
    """The reason to drop a job that ends at `earliest_ns` at the earliest to best effort; None if there is none.

    A job with a promised deadline keeps its place: if the promise is broken, then by as little as possible.
    """
    deadline_ns = job.request.deadline_ns
    if deadline_ns is None or job.dropped_to_best_effort or job.request.is_promise or earliest_ns <= deadline_ns:
        return None
    return f"even if nothing else ran, it would finish {s_from_ns(earliest_ns - deadline_ns):.2f} s late"


def late_jobs(earliest_ns: Iterable[tuple[JobView, int]]) -> tuple[tuple[int, str], ...]:
    """The jobs to drop to best effort, each with the reason, from jobs and their earliest ends.

    A plan that drops jobs starts nothing: the controller then asks for another plan in the new order of service.
    """
    return tuple([(job.job_id, why) for job, end_ns in earliest_ns if (why := drop_reason(job, end_ns)) is not None])
