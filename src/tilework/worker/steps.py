"""The step loop of one running work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from tilework.core.packing import Pack
from tilework.core.wire.reports import Progress, Report
from tilework.pipelines.family import Family, StepState
from tilework.worker.jobs import Job
from tilework.worker.previews import Previews
from tilework.worker.synchronize import synchronize
from tilework.worker.works import OpenWorks


@dataclass(frozen=True, slots=True, eq=False)
class WorkJob:
    """A job of a work, which starts at this `position` of it."""

    job_id: int
    position: int
    job: Job

    @property
    def num_steps_left(self) -> int:
        """The steps of the work's stage that are left when the work begins."""
        return self.job.itinerary.at[self.position].num_left_here


class Steps:
    """Runs the steps of the `jobs` of a work. Several jobs share forward passes, by `pack`, which may keep something of
    jobs with a cache, too; a group runs one job, in lockstep.

    A worker that `leads` (alone, or rank 0 of its group) reports progress and previews.
    """

    def __init__(
        self,
        family: Family,
        jobs: Sequence[WorkJob],
        work_id: int,
        leads: bool,
        works: OpenWorks,
        emit: Callable[[Report], None],
        pack: Pack,
    ) -> None:
        self._family = family
        self._jobs = jobs
        self._work_id = work_id
        self._leads = leads
        self._works = works
        self._emit = emit
        shares = len(jobs) > 1 or jobs[0].job.spec.cache is not None
        self._pack = pack if shares else None
        self._previews = {job.job_id: Previews(work_id, job.job_id, job.job, _every(job, leads), emit) for job in jobs}

    def run(self, most: int) -> int:
        """Run up to `most` steps; returns how many were done, which is fewer after a stop."""
        begun = [(job, self._begun(job.job)) for job in self._jobs]
        parallel = self._family.parallel
        for steps_done in count(1):
            self._step(begun)
            if steps_done == most:
                break
            synchronize(self._family.device)
            parallel.wants_stop = self._works.is_stopped(self._work_id)  # At degree 1 this decides.
            if parallel.stop_agreed:
                break
            if self._leads:
                self._emit(Progress(self._work_id, steps_done))
        return steps_done

    def _begun(self, job: Job) -> StepState:
        state = job.state = job.state or self._family.begin(job.stage.name, job.spec, job.values)
        return state

    def _step(self, jobs: Sequence[tuple[WorkJob, StepState]]) -> None:
        """One step of each job."""
        self._family.parallel.wants_stop = self._works.is_stopped(self._work_id)
        previews = {id(state): self._previews[job.job_id] for job, state in jobs}
        try:
            self._family.step(
                [state for _, state in jobs], self._pack, lambda state, draw: previews[id(state)].show(state, draw)
            )
        except Exception:
            for job, state in jobs:
                if state.is_torn:  # The job continues from its latest blob.
                    job.job.state = None
            raise


def _every(job: WorkJob, leads: bool) -> int:
    return job.job.spec.preview_every if leads and job.job.stage.spec.previews else 0
