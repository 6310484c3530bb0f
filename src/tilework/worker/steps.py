"""The step loop of one running work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch

from tilework.core.comm import Comm, GroupBroken
from tilework.core.packing import Pack
from tilework.core.wire.reports import Progress, Report
from tilework.core.wire.spec import Image
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
    jobs with a cache, too; a group, which has a `comm`, runs one job, in lockstep.

    A worker that leads (alone, or rank 0 of its group) reports progress and previews.
    """

    def __init__(
        self,
        family: Family,
        jobs: Sequence[WorkJob],
        work_id: int,
        comm: Comm | None,
        works: OpenWorks,
        emit: Callable[[Report], None],
        pack: Pack,
    ) -> None:
        self._family = family
        self._jobs = jobs
        self._work_id = work_id
        self._comm, self._leads = comm, leads(comm)
        self._works = works
        self._emit = emit
        shares = len(jobs) > 1 or jobs[0].job.spec.cache is not None
        self._pack = pack if shares else None
        self._previews = {
            job.job_id: Previews(work_id, job.job_id, job.job, _every(job, self._leads), emit) for job in jobs
        }

    def run(self, most: int, before_each: Callable[[], None] = lambda: None) -> int:
        """Run up to `most` steps; returns how many were done, which is fewer after a stop.

        Raises:
            GroupBroken: the states are those of the latest whole step, or dropped if they may be wrong.
        """
        begun = [(job, self._begun(job.job)) for job in self._jobs]
        parallel = self._family.parallel
        for steps_done in count(1):
            before_each()
            with synchronized([job.job for job, _ in begun], self._family.device, self._comm):
                self._step(begun)
            if steps_done == most:
                break
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
                [state for _, state in jobs],
                self._pack,
                lambda state, draw: previews[id(state)].show(state, partial(self._drawn, draw)),
            )
        except Exception:
            for job, state in jobs:
                if state.is_torn:  # The job continues from its latest blob.
                    job.job.state = None
            raise

    def _drawn(self, draw: Callable[[], Image]) -> Image:
        """A preview, for which the host has waited. Raises GroupBroken."""
        image = draw()
        synchronize(self._family.device, self._comm)
        return image


@contextmanager
def synchronized(jobs: Iterable[Job], device: torch.device, comm: Comm | None) -> Iterator[None]:
    """While entered, something is computed of these jobs; left when the device has done it.

    Raises:
        GroupBroken: messages that it was computed of may be wrong, whatever error followed from that. The jobs keep
            nothing of it.
    """
    try:
        yield
        synchronize(device, comm)
    except Exception as error:
        if comm is None or not comm.has_aborted_calls:
            raise
        for job in jobs:
            job.drop_progress()
        raise GroupBroken("the group was broken off while messages were under way") from error


def leads(comm: Comm | None) -> bool:
    """Whether a worker is alone, or the one that reports for its group."""
    return comm is None or comm.rank == 0


def _every(job: WorkJob, leads: bool) -> int:
    return job.job.spec.preview_every if leads and job.job.stage.spec.previews else 0
