"""The life of an accepted job: its states, and what takes it from each to the next.

Theory of operation. A job is in one state, and the tracker keeps the jobs of a state together: those that wait in
queues, those with works, those that are parked. Whatever happens to a job is one of the events below, and `TRANSITIONS`
holds the next state for each pair that can occur. Another pair is a bug of the controller. Two facts hold in every
table that replaces this one: each state has a way to `ENDED`, and none leads out of it, so a job ends exactly once.

An attempt that is lost (`RETRY`) takes a job back to `WAITING` from any state but the last: works of that attempt may
still be in flight then, and their reports do not reach the job any more (`Job.attempt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class JobState(StrEnum):
    """Each state with the way in which the tracker keeps its jobs."""

    WAITING = "waiting"  # In a queue for devices or CPU slots; none of its works is in flight.
    RUNNING = "running"  # It has works, on devices or in their queues.
    STOPPING = "stopping"  # The same, and they were told to stop at their next step boundary.
    PARKED = "parked"  # It fits on no device that is up: no policy sees it until devices or memory limits change.
    DONE = "done"  # All stages have run; the job ends within the same event.
    ENDED = "ended"  # Finished, failed or cancelled, and forgotten.


class JobEvent(StrEnum):
    """What happens to a job."""

    START = "start"  # A work of it is committed to devices.
    STOP = "stop"  # Its works are told to stop.
    WORK_ENDED = "work ended"  # The first of its works has ended, and others follow.
    LAST_WORK_ENDED = "last work ended"  # It has no further work, and stages are left.
    COMPLETED = "completed"  # It has no further work, and no stage is left.
    PARK = "park"
    UNPARK = "unpark"
    RETRY = "retry"  # Its next attempt begins: a work failed or was lost, or a state.
    END = "end"


_OF_WORKS = {
    JobEvent.LAST_WORK_ENDED: JobState.WAITING,
    JobEvent.COMPLETED: JobState.DONE,
    JobEvent.RETRY: JobState.WAITING,
    JobEvent.END: JobState.ENDED,
}

TRANSITIONS: Mapping[JobState, Mapping[JobEvent, JobState]] = {
    JobState.WAITING: {
        JobEvent.START: JobState.RUNNING,
        JobEvent.PARK: JobState.PARKED,
        JobEvent.RETRY: JobState.WAITING,
        JobEvent.END: JobState.ENDED,
    },
    JobState.RUNNING: {
        JobEvent.START: JobState.RUNNING,
        JobEvent.STOP: JobState.STOPPING,
        JobEvent.WORK_ENDED: JobState.RUNNING,
        **_OF_WORKS,
    },
    JobState.STOPPING: {JobEvent.WORK_ENDED: JobState.STOPPING, **_OF_WORKS},
    JobState.PARKED: {
        JobEvent.UNPARK: JobState.WAITING,
        JobEvent.RETRY: JobState.WAITING,
        JobEvent.END: JobState.ENDED,
    },
    JobState.DONE: {JobEvent.END: JobState.ENDED},
    JobState.ENDED: {},
}

HAS_WORKS = frozenset({JobState.RUNNING, JobState.STOPPING})
