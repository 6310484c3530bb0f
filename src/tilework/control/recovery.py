"""Recovery of jobs that lose a work: they resume from their latest state, start over, or fail. Also every job's end."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.admission.reservation_guard import ReservationGuard
from tilework.control.cluster.job import Job
from tilework.control.cluster.tracker import Tracker
from tilework.core.actions import Action, DropState, Finish, Stop
from tilework.core.events import DeviceLost, NodeLost
from tilework.core.request import Status
from tilework.core.work import Group, Work


class Recovery:
    """Retries and ends jobs. A job fails when it has lost `max_attempts` works in a row without progress."""

    def __init__(self, tracker: Tracker, guard: ReservationGuard, max_attempts: int) -> None:
        self._tracker = tracker
        self._guard = guard
        self._max_attempts = max_attempts

    def devices_lost(self, event: DeviceLost | NodeLost, lost: Sequence[Work]) -> list[Action]:
        """Retry the jobs of works that only the lost devices had, and the jobs whose states are lost.

        A job whose first work still has other devices resumes from their state: their report, `Broken`, follows.
        """
        positions = dict(event.positions)
        jobs = self._tracker.jobs
        affected = {job.job_id: job for work in lost for job in self._tracker.members(work)}
        retried = [job for job in affected.values() if not self._will_break(job.works[0], event.device_ids)]
        retried += [jobs[job_id] for job_id in positions if job_id in jobs and job_id not in affected]
        return [
            action
            for job in retried
            for action in self.retry(
                job, event.why, position=positions.get(job.job_id), counts_as_failure=job.job_id in affected
            )
        ]

    def retry_without_next_work(self, work: Work) -> list[Action]:
        """Retry the jobs of an ended work whose next work was lost meanwhile.

        They were not retried at once, since this work, which had lost a device of its group, could still advance them.
        """
        works = self._tracker.works
        jobs = [job for job in self._tracker.members(work) if job.works and job.works[0].work_id not in works]
        return [action for job in jobs for action in self.retry(job, "the device of its next work was lost")]

    def retry(
        self, job: Job, reason: str, *, position: int | None = None, counts_as_failure: bool = True
    ) -> list[Action]:
        """Resume a job from its latest state, or from this earlier `position`; fail it after too many attempts."""
        if counts_as_failure:
            job.failures += 1
        if job.failures >= self._max_attempts:
            return self.end(job, Status.FAILED, f"{reason} (attempt {job.failures} of {self._max_attempts})")
        actions = self._abandon(job)
        self._tracker.restart(job, position)
        self._guard.recheck()
        return actions

    def retry_error(self, job: Job, error: str) -> list[Action]:
        """Retry a job for which the model raised an error; fail it if the model raised the same error before.

        A job whose work has failed shares no works, so the error is not another request's.
        """
        if job.last_error == error:
            return self.end(job, Status.FAILED, f"{error} (twice in a row)")
        job.last_error = error
        return self.retry(job, error)

    def end(self, job: Job, status: Status, reason: str) -> list[Action]:
        """End a job. Each job ends here, once."""
        actions = self._abandon(job)
        self._tracker.remove_job(job)
        return [*actions, Finish(job.job_id, job.request.uid, status, reason)]

    def _will_break(self, work: Work, device_ids: Group) -> bool:
        """Return whether `Broken` follows the loss of these devices, since others of the work's group remain."""
        return not set(device_ids).isdisjoint(work.devices) and work.work_id in self._tracker.works

    def _abandon(self, job: Job) -> list[Action]:
        """Stop the works in flight of a job, and drop it from all devices. Works with other members continue."""
        own = [
            work for work in job.works if work.work_id in self._tracker.works and self._tracker.members(work) == [job]
        ]
        actions: list[Action] = [Stop(work.work_id) for work in own]
        if job.holders:
            actions.append(DropState(job.job_id, tuple(sorted(job.holders))))
        return actions
