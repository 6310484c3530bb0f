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
from tilework.worker.jobs import HeldJob
from tilework.worker.launched_steps import LaunchedSteps
from tilework.worker.previews import Previews
from tilework.worker.synchronize import Mark, synchronize
from tilework.worker.works import OpenWorks


@dataclass(frozen=True, slots=True, eq=False)
class WorkJob:
    """A job of a work, which starts at this `position` of it."""

    job_id: int
    position: int
    job: HeldJob

    @property
    def num_steps_left(self) -> int:
        """Number of steps of the work's stage that are left when the work begins."""
        return self.job.itinerary.at[self.position].num_left_here


class Steps:
    """Runs the steps of the `jobs` of a work. Several jobs share forward passes by `pack`, which may also keep data of
    jobs with a cache; a group, which has a `comm`, runs one job, in lockstep.

    A worker that leads (alone, or rank 0 of its group) reports progress and previews.

    With `mark` the host of a worker that is alone runs ahead of short steps (`LaunchedSteps`). In a group it never
    does: each step yields whether to stop (`Parallel.stop_agreed`), and the host has to wait for that. Also, ranks that
    measure different times would launch different numbers of steps.
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
        mark: Mark | None = None,
    ) -> None:
        self._family = family
        self._jobs = jobs
        self._work_id = work_id
        self._comm = comm
        self._leads = leads(comm)
        self._works = works
        self._emit = emit
        shares = len(jobs) > 1 or jobs[0].job.spec.cache is not None
        self._pack = pack if shares else None
        self._launched = LaunchedSteps(partial(synchronize, family.device, comm), mark if comm is None else None)
        self._num_reported = 0
        self._previews = {
            job.job_id: Previews(work_id, job.job_id, job.job, _every(job, self._leads), emit) for job in jobs
        }

    def run(self, most: int, before_each: Callable[[], None] = lambda: None) -> int:
        """Run up to `most` steps; return how many were done, which is fewer after a stop. To be called once.

        At the return the device has done all of them, and after an error all that were launched. A stop ends the work
        after the step that was launched last, which may be one after the step that runs.

        Raises:
            GroupBroken: the states are those of the latest whole step, or dropped if they may be wrong.
        """
        begun = [(job, self._begun(job.job)) for job in self._jobs]
        with kept_if_right([job.job for job in self._jobs], self._comm):
            try:
                return self._run(begun, most, before_each)
            finally:
                self._wait(most_left=0)

    def _run(self, begun: Sequence[tuple[WorkJob, StepState]], most: int, before_each: Callable[[], None]) -> int:
        """Launch the steps; return how many. Reports progress after each step that is done, except the last."""
        for num_launched in count(1):
            before_each()
            self._step(begun)
            self._launched.add()
            self._wait(most_left=1)
            self._report()
            self._wait(most_left=self._launched.most_ahead)
            if num_launched == most or self._is_stopped():
                break
            self._report()
        return num_launched

    def _is_stopped(self) -> bool:
        parallel = self._family.parallel
        parallel.wants_stop = self._works.is_stopped(self._work_id)  # At degree 1 this decides.
        return parallel.stop_agreed

    def _wait(self, most_left: int) -> None:
        """Wait for all launched steps but `most_left`. If the device fails in one, the jobs drop their progress."""
        try:
            self._launched.wait(most_left)
        except Exception:
            for job in self._jobs:
                job.job.drop_progress()
            raise

    def _report(self) -> None:
        """Report progress if a step has been done since the last time."""
        if self._leads and self._launched.num_done > self._num_reported:
            self._num_reported = self._launched.num_done
            self._emit(Progress(self._work_id, self._num_reported))

    def _begun(self, job: HeldJob) -> StepState:
        state = job.state = job.state or self._family.begin(job.stage.name, job.spec, job.values)
        return state

    def _step(self, jobs: Sequence[tuple[WorkJob, StepState]]) -> None:
        """Make one step of each job."""
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
        """Draw a preview and wait for the device. Raises GroupBroken."""
        image = draw()
        synchronize(self._family.device, self._comm)
        return image


@contextmanager
def synchronized(jobs: Iterable[HeldJob], device: torch.device, comm: Comm | None) -> Iterator[None]:
    """Compute something of these jobs while entered; wait for the device at the end.

    Raises:
        GroupBroken: see `kept_if_right`.
    """
    with kept_if_right(jobs, comm):
        yield
        synchronize(device, comm)


@contextmanager
def kept_if_right(jobs: Iterable[HeldJob], comm: Comm | None) -> Iterator[None]:
    """Keep these jobs' progress only if it is right. While entered, the caller computes and waits for the device.

    Raises:
        GroupBroken: messages in the computation may be wrong, whatever error followed from that. The jobs drop their
            progress.
    """
    try:
        yield
    except Exception as error:
        if comm is None or not comm.has_aborted_calls:
            raise
        for job in jobs:
            job.drop_progress()
        raise GroupBroken("the group was broken off while messages were under way") from error


def leads(comm: Comm | None) -> bool:
    """Return whether a worker is alone, or the one that reports for its group."""
    return comm is None or comm.rank == 0


def _every(job: WorkJob, leads: bool) -> int:
    return job.job.spec.preview_every if leads and job.job.stage.spec.previews else 0
