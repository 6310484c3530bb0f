"""Jobs that can no longer be on time, and are dropped to best effort."""

from __future__ import annotations

from collections.abc import Iterable

from tilework.core.interfaces import JobView
from tilework.core.time import s_from_ns


def drop_reason(job: JobView, earliest_ns: int) -> str | None:
    """Why a job is to be dropped to best effort, if it ends at `earliest_ns` at the earliest; None if it is not to be.

    A job whose deadline is promised keeps its place: if the promise is broken, it is by as little as possible.
    """
    deadline_ns = job.request.deadline_ns
    if deadline_ns is None or job.dropped_to_best_effort or job.request.is_promise or earliest_ns <= deadline_ns:
        return None
    return f"even if nothing else ran, it would finish {s_from_ns(earliest_ns - deadline_ns):.2f} s late"


def late_jobs(earliest_ns: Iterable[tuple[JobView, int]]) -> tuple[tuple[int, str], ...]:
    """The jobs to drop to best effort, each with the reason. Given are jobs, and when each ends at the earliest.

    A plan that drops jobs starts nothing: the controller asks for another one, in the new order of service.
    """
    return tuple((job.job_id, why) for job, end_ns in earliest_ns if (why := drop_reason(job, end_ns)) is not None)
