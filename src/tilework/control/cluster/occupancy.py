"""Numbers of jobs that wait and run, and the time that they will take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tilework.control.cluster.tracker import Tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Open jobs: `waiting` and `running` count them by class, `backlog_ns` is the device time that they still take."""

    waiting: Mapping[str, int]
    running: Mapping[str, int]
    backlog_ns: int


def occupancy(tracker: Tracker) -> Occupancy:
    """Return the occupancy at the time of the tracker."""
    jobs = tracker.jobs.values()
    return Occupancy(
        waiting=Counter(job.request.priority for job in jobs if not job.works),
        running=Counter(job.request.priority for job in jobs if job.works),
        backlog_ns=backlog_ns(tracker),
    )


def backlog_ns(tracker: Tracker) -> int:
    """Return the device time that open jobs still take."""
    return tracker.held().device_ns + tracker.taken_ns()
