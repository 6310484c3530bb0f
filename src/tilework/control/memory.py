"""Works that ran out of memory. Their jobs are retried on more devices, in slices or in smaller batches."""

from __future__ import annotations

from tilework.admission.reservation_guard import ReservationGuard
from tilework.control.cluster.job import Job
from tilework.control.cluster.tracker import Tracker
from tilework.control.recovery import Recovery
from tilework.core.actions import Action
from tilework.core.policy import Policy
from tilework.core.request import EXACT_NEEDS_MORE
from tilework.core.work import Work
from tilework.cost.demand import fits_at, usable_degree
from tilework.cost.table_costs import TableCosts


class MemoryShortage:
    """Records in the costs which works did not fit, and retries the jobs within these limits."""

    def __init__(
        self, policy: Policy, costs: TableCosts, tracker: Tracker, guard: ReservationGuard, recovery: Recovery
    ) -> None:
        self._policy = policy
        self._costs = costs
        self._tracker = tracker
        self._guard = guard
        self._recovery = recovery

    def out_of_memory(self, work: Work, steps_done: int, reason: str, now_ns: int) -> list[Action]:
        """End a work that did not fit, and retry its jobs.

        It does not count as a failure of its jobs, unless the costs already knew that it would not fit. If one of its
        jobs has ended meanwhile, it is unknown what did not fit. A job that would fit only on more devices than are up
        is parked until they are up, or until the costs forget the limit. A sliceable stage of an exact job is tried
        again as a whole.
        """
        actions: list[Action] = []
        jobs = self._tracker.end_work(work, steps_done)
        shapes = [job.request.shape for job in jobs]
        is_whole = len(jobs) == len(work.job_ids)
        is_excused = not is_whole or self._costs.observe_memory(work, shapes, fitted=False, now_ns=now_ns)
        for job in jobs:
            lacks_devices = self._lacks_devices(job)
            counts_as_failure = lacks_devices or not is_excused
            why = f"{reason}; {EXACT_NEEDS_MORE}" if job.request.exact else reason
            actions += self._recovery.retry(job, why, counts_as_failure=counts_as_failure)
            if job.job_id in self._tracker.jobs and lacks_devices:
                self._tracker.park(job)
            elif job.promised is not None:
                self._widen_reservation(job)
        return actions

    def _lacks_devices(self, job: Job) -> bool:
        """Return whether the steps of a job fit only on more devices of a node than are up now, but were up before.

        False if the steps may fit on the devices that are up. Then another stage did not fit, and the job must not be
        parked: no limit on steps would be forgotten that could unpark it.
        """
        pipeline = job.request.pipeline
        widest_now = self._tracker.widest_now(pipeline)
        widest = self._tracker.widest(pipeline)
        if fits_at(job.request, usable_degree(job.request, widest_now, self._costs), self._costs):
            return False
        degrees = [one for one in self._policy.degrees(job.request, self._costs) if one <= widest]
        fitting = [degree for degree in degrees if fits_at(job.request, degree, self._costs)]
        return bool(fitting) and min(fitting) > widest_now

    def _widen_reservation(self, job: Job) -> None:
        """Reserve a wider block if the promised job does not fit into the memory of its reservation's devices."""
        assert job.promised is not None
        if not fits_at(job.request, job.promised.demand.width, self._costs):
            self._tracker.reserve(job, min(self._policy.degrees(job.request, self._costs)))
            self._guard.recheck()
