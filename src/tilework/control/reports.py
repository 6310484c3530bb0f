"""Reports on works. Each takes effect once, in the order of a job's works."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilework.admission.admission import Admission
from tilework.admission.margins import MarginEstimator
from tilework.admission.reservation_guard import ReservationGuard
from tilework.control.admit import Admit
from tilework.control.cluster.job import Job
from tilework.control.cluster.tracker import Tracker
from tilework.control.memory import MemoryShortage
from tilework.control.recovery import Recovery
from tilework.core.actions import Action, DropState
from tilework.core.events import Broken, LeftOut, OutOfMemory, Stopped, WorkFailed, WorkFinished
from tilework.core.request import Status
from tilework.core.work import Work
from tilework.cost.table_costs import TableCosts

WorkEnd = WorkFinished | Stopped | WorkFailed | OutOfMemory | Broken
Report = LeftOut | WorkEnd


class Reports:
    """Handles reports on works; an early report waits for the report on an earlier work of its jobs."""

    def __init__(
        self,
        rule: Admission,
        admit: Admit,
        costs: TableCosts,
        tracker: Tracker,
        recovery: Recovery,
        memory: MemoryShortage,
        guard: ReservationGuard,
    ) -> None:
        self._rule = rule
        self._admit = admit
        self._costs = costs
        self._tracker = tracker
        self._recovery = recovery
        self._memory = memory
        self._guard = guard
        self._margins = MarginEstimator()
        self._early: dict[int, list[Report]] = {}  # Early reports, by the id of the work that they wait for.

    @property
    def early_work_ids(self) -> set[int]:
        """Ids of the works of the early reports."""
        return {report.work_id for early in self._early.values() for report in early}

    def on_report(self, report: Report, now_ns: int) -> list[Action]:
        """Handle a report, and the early reports that waited for it.

        A report on a work that is not in flight changes nothing: it is repeated, or from a lost device.
        """
        work = self._tracker.works.get(report.work_id)
        if work is None:
            return []
        before = self._tracker.awaited(work)
        if before is not None:
            self._early.setdefault(before.work_id, []).append(report)
            return []
        if isinstance(report, LeftOut):
            left_out = [job for job in self._tracker.members(work) if job.job_id == report.job_id]
            return self._retry(left_out, report.reason, report.state_lost)
        actions = self._end_work(work, report, now_ns)
        return actions + self._recovery.retry_without_next_work(work) + self.release_early([work], now_ns)

    def release_early(self, works: Iterable[Work], now_ns: int) -> list[Action]:
        """Handle the early reports that waited for these works, which have ended or are lost."""
        actions: list[Action] = []
        for work in works:
            for report in self._early.pop(work.work_id, ()):
                actions += self.on_report(report, now_ns)
        return actions

    def _end_work(self, work: Work, report: WorkEnd, now_ns: int) -> list[Action]:
        if isinstance(report, WorkFinished | Stopped):
            self._learn_margins(work)
        match report:
            case WorkFinished(_, run_ns):
                return self._complete(work, run_ns, now_ns)
            case Stopped(_, steps_done):
                return self._end_stopped(work, steps_done)
            case WorkFailed(_, reason, state_lost, by_model):
                jobs = self._tracker.end_work(work, 0)
                if by_model and len(jobs) == len(work.job_ids) == 1:
                    return self._recovery.retry_error(jobs[0], reason)
                return self._retry(jobs, reason, state_lost)
            case Broken(_, steps_done):
                return self._retry(self._tracker.end_work(work, steps_done), report.why)
            case OutOfMemory(_, steps_done):
                return self._memory.out_of_memory(work, steps_done, report.why, now_ns)

    def _end_stopped(self, work: Work, steps_done: int) -> list[Action]:
        """End a work that was told to stop. If a promised job has more work left than predicted, its proof is stale."""
        predicted = {job.job_id: job.stops_at for job in self._tracker.members(work)}
        jobs = self._tracker.end_work(work, steps_done)
        for job in jobs:
            at = predicted[job.job_id]
            if job.promised is not None and not job.works and at is not None and job.done.position < at:
                self._guard.recheck()
        return [] if steps_done else self._drop_unused(jobs, work)

    def _learn_margins(self, work: Work) -> None:
        """Let the margins of promises follow the lateness of a work."""
        overrun = self._tracker.overrun(work)
        if overrun is not None:
            self._margins.learn(work.devices, overrun.by_ns, overrun.predicted_ns)
            self._tracker.margins = self._margins.margins

    def _retry(self, jobs: Sequence[Job], reason: str, state_lost: bool = False) -> list[Action]:
        position = 0 if state_lost else None
        return [action for job in jobs for action in self._recovery.retry(job, reason, position=position)]

    def _complete(self, work: Work, run_ns: int, now_ns: int) -> list[Action]:
        jobs = self._tracker.end_work(work, work.num_steps)
        self._learn(work, jobs, run_ns, now_ns)
        finished = [job for job in jobs if job.done.stage is None]
        for job in finished:
            self._rule.learn(job.request, job.eta_prediction, now_ns, self._admit.num_accepted - 1 - job.job_id)
        return [action for job in finished for action in self._recovery.end(job, Status.DONE, "")]

    def _learn(self, work: Work, jobs: list[Job], run_ns: int, now_ns: int) -> None:
        """Correct the costs, unless a job has left the work: then it is unknown which jobs the time is for."""
        if len(jobs) != len(work.job_ids):
            return
        requests = [job.request for job in jobs]
        self._costs.observe(work.stage, requests, len(work.devices), work.num_steps, run_ns)
        shapes = [request.shape for request in requests]
        if self._costs.observe_memory(work, shapes, fitted=True, now_ns=now_ns):
            self._tracker.unpark()  # The memory limit that parked jobs may be gone.

    def _drop_unused(self, jobs: Sequence[Job], work: Work) -> list[Action]:
        """Drop a revoked work's jobs from those of its devices on which none of their works has run.

        Their state may not have arrived there.
        """
        drops: list[Action] = []
        for job in jobs:
            unused = tuple(
                device_id
                for device_id in work.devices
                if device_id in job.holders and device_id not in job.done_devices
            )
            for device_id in unused:
                self._tracker.residents.remove(job, device_id)
            if unused:
                drops.append(DropState(job.job_id, unused))
        return drops
