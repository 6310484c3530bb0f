"""The run of one work: its members, its steps, and what came of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from tilework.comm.groups import Groups
from tilework.core.cache import CacheUse
from tilework.core.comm import Comm, GroupBroken
from tilework.core.packing import Pack
from tilework.core.wire.commands import Execute
from tilework.core.wire.reports import Absent, Ended, Ending, Failed, Progress, Report
from tilework.core.wire.spec import Image, Spec
from tilework.pipelines.errors import RequestRefused, describe
from tilework.pipelines.family import ANY_SEED, Family, StepState, Values
from tilework.worker.exact import check_exact
from tilework.worker.hardware import check_device, memory_in_use
from tilework.worker.jobs import HeldJob, JobMissing, Jobs, WorkJob
from tilework.worker.launched_steps import LaunchedSteps
from tilework.worker.memory import Budget
from tilework.worker.models.loads import Loads
from tilework.worker.models.models import Models
from tilework.worker.previews import Previews
from tilework.worker.state_blobs import StateBlobs
from tilework.worker.sync_members import MemberCheck, sync_members
from tilework.worker.synchronize import events_on, synchronize
from tilework.worker.works import OpenWorks

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Results:
    """Outputs of the last stage of the jobs that a work has ended: id, request and values of each."""

    family: Family
    blobs: StateBlobs
    jobs: Sequence[tuple[int, Spec, Values]]

    def added_to(self, ended: Ended) -> Report:
        """Return the report with images and files made of the outputs; `Failed` if that raises."""
        try:
            images = {one: self.family.image(spec, values) for one, spec, values in self.jobs if spec.video is None}
            files = {one: self.family.file(spec, values) for one, spec, values in self.jobs if spec.video is not None}
        except Exception as error:
            _log.exception("the results of work %d failed", ended.work_id)
            for blob in ended.blobs.values():
                self.blobs.remove(blob)
            return Failed(ended.work_id, describe(error), by_model=True)
        return replace(ended, images=images, files=files)


@dataclass(slots=True, eq=False)
class WorkRun:
    """Runs one work: at once, or up to `num_steps` steps. A run is used once.

    Steps are fewer if a stop is agreed between two of them, or if the group breaks; a stage without steps is not done
    then. A work of a group runs in lockstep with the other ranks; rank 0 decides when to stop. Before each step `loads`
    may begin beside it.

    An error is contained: the report is `Failed`, the jobs are lost here, and their later works fail; in a group the
    work of the other ranks breaks off. A group that breaks leaves each rank's state intact. So does a work that needs
    more memory than `budget` allows: it frees its memory and reports how many steps were done.
    """

    command: Execute
    models: Models
    jobs: Jobs
    works: OpenWorks
    groups: Groups
    budget: Budget
    loads: Loads
    pack: Pack
    emit: Callable[[Report], None]
    results: Results | None = field(default=None, init=False)
    """Outputs of the jobs that have ended here; None if there are none. Those of a group are with rank 0."""
    members: MemberCheck = field(default=MemberCheck(), init=False)

    def run(self) -> Report:
        """Run the work; return its report, to which `results` are still to be added.

        Raises:
            WeightsNotLoaded: weights that it needs cannot be loaded.
            DeviceFailed: the device takes nothing from this process any more.
        """
        command = self.command
        if command.model in self.models.broken:
            return Failed(command.work_id, self.models.broken[command.model], by_model=True)
        self.loads.finish(self.models.needed(command.model, command.stage), self.is_stopped)
        report = self._attempt(self._run)
        if report is None:  # Only now its memory is unreferenced: an error holds its frames.
            self.budget.release()
            report = self._attempt(self._starved) or self._nothing_done(Ending.OUT_OF_MEMORY)
        return report

    def _attempt(self, run: Callable[[], Ended]) -> Report | None:
        """Return the report of a call; None if there was not enough memory."""
        work_id = self.command.work_id
        try:
            return replace(run(), memory_bytes=memory_in_use(self.models.device))
        except JobMissing as error:
            return Failed(work_id, describe(error), error.state_lost)
        except RequestRefused as error:
            self._lose_jobs(str(error))
            (job_id, _), *others = self.command.members
            refuses = None if others else job_id
            return Failed(work_id, str(error), by_model=True, refuses=refuses, refusal=error.refusal)
        except Exception as error:
            if self.budget.is_exceeded_by(error):
                _log.warning("work %d of %s: %s", work_id, _names(self.command), describe(error))
                return None
            _log.exception("work %d of %s failed", work_id, _names(self.command))
            check_device(self.models.device, error)
            self._lose_jobs(describe(error))
            return Failed(work_id, describe(error), by_model=True)

    def _lose_jobs(self, reason: str) -> None:
        for job_id, _ in self.command.members:
            self.jobs.lose(job_id, f"work {self.command.work_id} failed with {reason}")

    def _starved(self) -> Ended:
        """Return the end of a work that ran out of memory; one with steps may have done some before."""
        return self._cut_off(Ending.OUT_OF_MEMORY) if self._has_steps else self._nothing_done(Ending.OUT_OF_MEMORY)

    def _run(self) -> Ended:
        command = self.command
        if not self.is_stopped():  # Else its weights were not awaited.
            self.models.require(command.model, command.stage)
            self._bring_jobs()
        try:
            comm = None if command.group is None else self.groups.open(command.group)
            with self.models.running(comm, command.group):
                return self._run_members(comm)
        except GroupBroken as error:
            _log.warning("work %d of %s broke off: %s", command.work_id, _names(command), error)
            return self._cut_off(Ending.BROKEN)
        except JobMissing:
            raise
        except Exception:
            if command.group is not None:
                self.groups.break_off(command.group.group_id)
            raise
        finally:
            self.groups.rest()

    def _bring_jobs(self) -> None:
        """Begin the jobs of which nothing is done yet, and read spilled ones again."""
        for job_id, position in self.command.members:
            if position:
                self.jobs.return_spilled(job_id, self.command.model)
            else:
                self.jobs.begin(job_id, self.command.model, self.command.specs[job_id])

    def _run_members(self, comm: Comm | None) -> Ended:
        self.members = sync_members(self.jobs, self.command, comm, self.models.device, self.is_stopped)
        if not self.members.present:
            return self._nothing_done(Ending.STOPPED, self.members.absent)
        jobs = [member.job for member in self.members.present]
        ended = self._run_steps(jobs, comm) if self._has_steps else self._run_at_once(jobs, comm)
        return self._written(ended) if _leads(comm) else ended

    def _run_at_once(self, jobs: Sequence[HeldJob], comm: Comm | None) -> Ended:
        command = self.command
        family = self.family
        start_ns = time.monotonic_ns()
        specs = [job.spec for job in jobs]
        self._use_loras(specs)
        if comm is not None:
            family.parallel.join(comm, guided=False)
        try:
            with self.budget.hold(), _kept_if_right(jobs, comm):
                outputs = family.run(command.stage, specs, [job.values for job in jobs], command.sliced)
                synchronize(family.device, comm)
        finally:
            family.parallel.leave()
        for job, of_job in zip(jobs, outputs, strict=True):
            job.take_outputs(dict(of_job))
        ended = Ended(command.work_id, start_ns, self._now_ns(), steps_done=1, absent=self.members.absent)
        members = zip(self.members.present, outputs, strict=True)
        ended.for_any_seed = frozenset(member.job_id for member, of_job in members if of_job.get(ANY_SEED))
        return ended

    def _run_steps(self, jobs: Sequence[HeldJob], comm: Comm | None) -> Ended:
        command = self.command
        family = self.family
        present = self.members.present
        self._use_loras([job.spec for job in jobs])
        for job in jobs:
            job.use_cache(family, *command.caches)
        start_ns = time.monotonic_ns()
        if comm is not None:
            family.join(comm, jobs[0].spec)
        most = min(command.num_steps, *(member.num_steps_left for member in present))
        try:
            with self.budget.hold():
                steps_done = Steps(self, comm).run(most)
        finally:
            family.parallel.leave()
        return self._end_steps(start_ns, steps_done, Ending.STOPPED if steps_done < most else Ending.DONE)

    def _use_loras(self, specs: Sequence[Spec]) -> None:
        """Check that the work may run these requests, and compute with their LoRAs.

        Requests with different LoRAs may share a stage that these do not change, such as a decode.
        """
        command = self.command
        for spec in specs:
            check_exact(spec, command)
        used = {spec.loras for spec in specs}
        if len(used) > 1:
            used = {self.models.changing(command.model, command.stage, loras) for loras in used}
        loras, *others = used
        if others:
            raise ValueError(f"requests with different LoRAs share work {command.work_id}")
        self.models.use(command.model, command.stage, loras)

    def _cut_off(self, ending: Ending) -> Ended:
        """Report the steps that this worker has done; its state may be one step ahead of the other ranks.

        No state is kept of several jobs if some are ahead of others.
        """
        start_ns = time.monotonic_ns()
        steps_done = {member.job.position - member.position for member in self.members.present}
        if len(steps_done) != 1 or max(steps_done) <= 0:
            return self._nothing_done(ending, self.members.absent)
        return self._written(self._end_steps(start_ns, steps_done.pop(), ending))

    def _end_steps(self, start_ns: int, steps_done: int, ending: Ending) -> Ended:
        """Return the report of these steps; jobs that have made all steps of the stage end it."""
        end_ns = self._now_ns()
        uses = _cache_uses(self.members.present)
        for member in self.members.present:
            member.job.end_steps(self.family)
        absent = self.members.absent
        return Ended(self.command.work_id, start_ns, end_ns, steps_done, ending, absent=absent, cache_use=uses)

    def _written(self, ended: Ended) -> Ended:
        """Return the report with blobs of jobs that are not done; those of the others have `results`."""
        present = self.members.present
        ended = replace(ended, blobs=self.jobs.write(self.family, [one for one in present if not one.job.is_ended]))
        if done := [(one.job_id, one.job.spec, one.job.take_values()) for one in present if one.job.is_ended]:
            self.results = Results(self.family, self.jobs.blobs, done)
        return ended

    def _nothing_done(self, ending: Ending, absent: tuple[Absent, ...] = ()) -> Ended:
        now_ns = time.monotonic_ns()
        return Ended(self.command.work_id, now_ns, now_ns, steps_done=0, ending=ending, absent=absent)

    def is_stopped(self) -> bool:
        return self.works.is_stopped(self.command.work_id)

    @property
    def family(self) -> Family:
        return self.models[self.command.model]

    @property
    def _has_steps(self) -> bool:
        return self.family.info.graph.stage(self.command.stage).has_steps

    def _now_ns(self) -> int:
        synchronize(self.models.device)
        return time.monotonic_ns()


def _cache_uses(members: Sequence[WorkJob]) -> dict[int, CacheUse]:
    """Return what the caches of jobs did since the last call."""
    uses = {one.job_id: one.job.state.take_cache_use() for one in members if one.job.state is not None}
    return {job_id: use for job_id, use in uses.items() if use is not None}


def _names(command: Execute) -> str:
    job_ids = [job_id for job_id, _ in command.members]
    return f"job{'s' if len(job_ids) > 1 else ''} {', '.join(map(str, job_ids))}"


class Steps:
    """Makes the steps of a run. Several jobs share forward passes by its `pack`, which may also keep data of jobs with
    a cache; a group, which has a `comm`, runs one job, in lockstep.

    A worker that leads (alone, or rank 0 of its group) reports progress and previews.

    On an accelerator the host of a worker that is alone runs ahead of short steps (`LaunchedSteps`). In a group it
    never does: each step yields whether to stop (`Parallel.stop_agreed`), and the host has to wait for that. Also,
    ranks that measure different times would launch different numbers of steps.
    """

    def __init__(self, run: WorkRun, comm: Comm | None) -> None:
        self._work = run
        self._work_id = run.command.work_id
        self._family = run.family
        self._jobs = run.members.present
        self._comm = comm
        self._leads = _leads(comm)
        shares = len(self._jobs) > 1 or self._jobs[0].job.spec.cache is not None
        self._pack = run.pack if shares else None
        mark = events_on(self._family.device) if comm is None else None
        self._launched = LaunchedSteps(partial(synchronize, self._family.device, comm), mark)
        self._num_reported = 0
        self._previews = {
            job.job_id: Previews(self._work_id, job.job_id, job.job, _every(job, self._leads), run.emit)
            for job in self._jobs
        }

    def run(self, most: int) -> int:
        """Run up to `most` steps; return how many were done, which is fewer after a stop. To be called once.

        At the return the device has done all of them, and after an error all that were launched. A stop ends the work
        after the step that was launched last, which may be one after the step that runs.

        Raises:
            GroupBroken: the states are those of the latest whole step, or dropped if they may be wrong.
        """
        begun = [(job, self._begun(job.job)) for job in self._jobs]
        with _kept_if_right([job.job for job in self._jobs], self._comm):
            try:
                return self._run(begun, most)
            finally:
                self._wait(most_left=0)

    def _run(self, begun: Sequence[tuple[WorkJob, StepState]], most: int) -> int:
        """Launch the steps; return how many. Reports progress after each step that is done, except the last."""
        for num_launched in count(1):
            self._work.loads.begin_ahead()
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
        parallel.wants_stop = self._work.is_stopped()  # At degree 1 this decides.
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
            self._work.emit(Progress(self._work_id, self._num_reported))

    def _begun(self, job: HeldJob) -> StepState:
        state = job.state = job.state or self._family.begin(job.stage.name, job.spec, job.values)
        return state

    def _step(self, jobs: Sequence[tuple[WorkJob, StepState]]) -> None:
        """Make one step of each job."""
        self._family.parallel.wants_stop = self._work.is_stopped()
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
def _kept_if_right(jobs: Iterable[HeldJob], comm: Comm | None) -> Iterator[None]:
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


def _leads(comm: Comm | None) -> bool:
    """Return whether a worker is alone, or the one that reports for its group."""
    return comm is None or comm.rank == 0


def _every(job: WorkJob, leads: bool) -> int:
    return job.job.spec.preview_every if leads and job.job.stage.spec.previews else 0
