"""Executes the commands of a worker; knows no process, thread or pipe."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tilework.comm.groups import Groups
from tilework.core.cache import CacheUse
from tilework.core.comm import Comm, GroupBroken
from tilework.core.wire.commands import (
    CACHE_BYTES,
    STATES_BYTES,
    AddLora,
    AddModel,
    Calibrate,
    CloseGroup,
    Command,
    DropWeights,
    Execute,
    Forget,
    ImportState,
    LoadWeights,
    NoteSaved,
    RemoveLora,
    RemoveModel,
    StartOver,
)
from tilework.core.wire.reports import Absent, Calibrated, Ended, Ending, Failed, KeptStates, Report, StartedOver
from tilework.core.wire.spec import Spec
from tilework.patches.cache import PatchCache
from tilework.pipelines.errors import RequestRefused
from tilework.pipelines.family import ANY_SEED, Family, Values
from tilework.pipelines.serialization import BadState
from tilework.worker.calibrate import calibrate
from tilework.worker.exact import check_exact
from tilework.worker.hardware import DeviceFailed, has_failed, memory_in_use
from tilework.worker.jobs import HeldJob, JobMissing, Jobs
from tilework.worker.memory import Budget
from tilework.worker.models.loads import Loads
from tilework.worker.models.models import Models
from tilework.worker.moving import import_job, write_states
from tilework.worker.state_blobs import StateBlobs, TruncatedStateBlob
from tilework.worker.steps import Steps, WorkJob, leads, synchronized
from tilework.worker.sync_members import MemberCheck, sync_members
from tilework.worker.synchronize import events_on, synchronize
from tilework.worker.works import OpenWorks

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Result:
    """Result of a job: the outputs of its last stage."""

    job_id: int
    spec: Spec
    values: Values


class Worker:
    """Executes one command after another, and reports through `emit` how each work ended.

    If a work has results, `emit_made` makes and sends its report later, in order with what is emitted before and after.
    `works` holds the works that were received; `execute` closes those that it ends. Weights are loaded block by block
    (`load_block`), and a work waits only for those that its stage needs; those of `loads_ahead`, for which there is
    room already, may begin beside its steps. A work of a group runs in lockstep with the other ranks; rank 0 decides
    when to stop.

    An error in a work is contained: the work answers `Failed`, its jobs are lost here, and their later works fail; in a
    group the work of the other ranks breaks off. A group that breaks leaves each rank's state intact. So does a work
    that needs more memory than `budget` allows: it frees its memory and reports how many steps were done. Jobs without
    a received work keep `states_bytes` at most (see `jobs`). The steps of jobs with a cache keep `cache_bytes` at most
    for later ones.
    """

    def __init__(
        self,
        models: Models,
        works: OpenWorks,
        groups: Groups,
        blobs: StateBlobs,
        emit: Callable[[Report], None],
        budget: Budget | None = None,
        states_bytes: int = STATES_BYTES,
        cache_bytes: int = CACHE_BYTES,
        loads_ahead: Callable[[], Sequence[LoadWeights]] = tuple,
        emit_made: Callable[[Callable[[], Report]], None] | None = None,
    ) -> None:
        self._models = models
        self._works = works
        self._groups = groups
        self._blobs = blobs
        self._emit = emit
        self._emit_made = emit_made or (lambda make: emit(make()))
        self._budget = budget or Budget(models.device, None)
        self._jobs = Jobs()
        self._states_bytes = states_bytes
        self._cache = PatchCache(cache_bytes)
        self._num_returns = 0
        self.kept = KeptStates(0, 0, 0)  # As of the latest time that it was bounded.
        self._loads = Loads(models, self._budget, emit)
        self._loads_ahead = loads_ahead
        self._absent: tuple[Absent, ...] = ()  # The jobs that have no part in the running work.
        self._results: tuple[_Result, ...] = ()  # Of the jobs that the running work has ended.

    @property
    def num_jobs(self) -> int:
        """Number of jobs of which something is kept, in memory or in blobs."""
        return len(self._jobs)

    def execute(self, command: Command) -> None:
        """Execute a command; the receiver handles `StopWork`, `BreakGroup`, `EnterNode` and `Quit`.

        Raises:
            WeightsNotLoaded: weights that it needs cannot be loaded.
            DeviceFailed: the device takes nothing from this process any more.
        """
        match command:
            case Execute() if command.model in self._models.broken:
                self._works.close(command.work_id)
                self._emit(Failed(command.work_id, self._models.broken[command.model], by_model=True))
            case Execute():
                self._await_weights(command.model, command.stage, partial(self._works.is_stopped, command.work_id))
                self._work(command, self._run)
            case ImportState():
                self._await_weights(command.model, self._next_stage(command))
                self._import(command)
            case Forget() | NoteSaved() | StartOver():
                self._update_kept(command)
            case CloseGroup():
                self._groups.close(command.group_id)
            case LoadWeights():
                self._loads.add(command)
            case DropWeights(components):
                self._loads.drop(components)
            case Calibrate():
                self._await_all_weights()
                self._emit(self._calibrate(command))
            case AddModel() | AddLora() | RemoveModel() | RemoveLora():
                self._await_all_weights()
                if (answer := self._models.change(command)) is not None:
                    self._emit(answer)
            case _:
                raise TypeError(f"a worker does not execute {type(command).__name__}")

    def _update_kept(self, command: Forget | NoteSaved | StartOver) -> None:
        """Forget a job or all of them, or note a blob that a job can spill to."""
        if isinstance(command, StartOver):
            self._jobs.clear()
            self._emit(StartedOver())
            return
        if isinstance(command, Forget):
            self._jobs.forget(command.job_id)
            return
        if job := self._jobs.find(command.job_id):
            job.note(command.saved)
        self._spill()

    def load_block(self) -> bool:
        """Load a block of the weights that this worker was told to load; return False if none is left.

        To be called while there is no command.

        Raises:
            WeightsNotLoaded: they cannot be loaded.
        """
        return self._loads.load_block()

    def _await_weights(self, model: str, stage: str | None, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Load what a stage needs of the weights that this worker was told to load, and no more of them.

        Ends early if the work for which it waits is stopped.
        """
        needed = () if stage is None else self._models.needed(model, stage)
        while not is_stopped() and self._loads.load_block(needed):
            pass

    def _begin_loads(self) -> None:
        """Begin loads that come after the running work, beside it; not with a memory limit, which would count them."""
        if not self._budget.is_limited:
            for command in self._loads_ahead():
                self._loads.begin(command)

    def _await_all_weights(self) -> None:
        while self._loads.load_block():
            pass

    def _next_stage(self, command: ImportState) -> str | None:
        """Return the stage of an imported job: some models call the stage's components when they get a state."""
        if command.model not in self._models:
            return None
        itinerary = self._models[command.model].info.graph.itinerary(command.spec.steps, result=command.spec.result)
        stage = itinerary.at[command.position].stage
        return None if stage is None else stage.name

    def _has_steps(self, command: Execute) -> bool:
        return self._models[command.model].info.graph.stage(command.stage).has_steps

    def _work(self, command: Execute, run: Callable[[Execute], Ended]) -> None:
        """Run a work and report its end."""
        report = self._attempt(command, run)
        if report is None:  # Only now its memory is unreferenced: an error holds its frames.
            self._budget.release()
            report = self._attempt(command, self._starved) or _without_memory(command.work_id)
        self._works.close(command.work_id)
        if isinstance(report, Ended):
            report.kept = self.kept
        if isinstance(report, Ended) and self._results:
            self._emit_made(partial(self._with_results, report, self._models[command.model], self._results))
        else:
            self._emit(report)
        self._results = ()
        self._spill()  # Nothing waits for this.

    def _spill(self) -> None:
        """Bound the memory that jobs without a work keep."""
        num_bytes = self._jobs.spill(self._states_bytes, self._works.job_ids)
        self.kept = KeptStates(num_bytes, self._jobs.num_spills, self._num_returns)

    def _return_spilled(self, command: Execute) -> None:
        """Read the spilled jobs of a work again. A job whose blobs are gone is not on this worker any more."""
        for job_id, position in command.members:
            job = self._jobs.find(job_id)
            if job is None or not job.is_spilled or not position or self._works.is_stopped(command.work_id):
                continue
            assert job.sources is not None, f"job {job_id} was spilled without its blobs"
            import_again = ImportState(job_id, command.model, job.spec, job.position, job.sources, known=False)
            self._import(import_again, are_latest=False)
            self._num_returns += job_id in self._jobs

    def _attempt(self, command: Execute, run: Callable[[Execute], Ended]) -> Report | None:
        """Return the report of a work; None if there was not enough memory."""
        try:
            if not self._works.is_stopped(command.work_id):  # Else its weights were not awaited.
                self._models.require(command.model, command.stage)
            self._return_spilled(command)
            return replace(run(command), memory_bytes=memory_in_use(self._models.device))
        except JobMissing as error:
            return Failed(command.work_id, describe(error), error.state_lost)
        except RequestRefused as error:
            self._lose_jobs(command, str(error))
            (job_id, _), *others = command.members
            refuses = None if others else job_id
            return Failed(command.work_id, str(error), by_model=True, refuses=refuses, refusal=error.refusal)
        except Exception as error:
            if self._budget.is_exceeded_by(error):
                _log.warning("work %d of %s: %s", command.work_id, _names(command), describe(error))
                return None
            _log.exception("work %d of %s failed", command.work_id, _names(command))
            self._check_device(error)
            self._lose_jobs(command, describe(error))
            return Failed(command.work_id, describe(error), by_model=True)

    def _check_device(self, error: Exception) -> None:
        """Raise DeviceFailed if the device can do nothing after this error, whichever request met it."""
        if has_failed(self._models.device):
            raise DeviceFailed(f"its device has failed: {describe(error)}") from error

    def _lose_jobs(self, command: Execute, reason: str) -> None:
        for job_id, _ in command.members:
            self._jobs.lose(job_id, f"work {command.work_id} failed with {reason}")

    def _starved(self, command: Execute) -> Ended:
        """Return the end of a work that ran out of memory; one with steps may have done some before."""
        if self._has_steps(command):
            return replace(self._cut_off(command), ending=Ending.OUT_OF_MEMORY)
        return _without_memory(command.work_id)

    def _begin_jobs(self, command: Execute) -> None:
        """Begin those jobs of a work of which nothing is done yet."""
        graph = self._models[command.model].info.graph
        for job_id, position in command.members:
            if not position:
                spec = command.specs[job_id]
                self._jobs.put(job_id, HeldJob(spec=spec, itinerary=graph.itinerary(spec.steps, result=spec.result)))

    def _run(self, command: Execute) -> Ended:
        """Run a work: at once, or up to `num_steps` steps.

        Steps are fewer if a stop is agreed between two of them, or if the group breaks; a stage without steps is not
        done then.
        """
        self._absent = ()
        if not self._works.is_stopped(command.work_id):
            self._begin_jobs(command)
        run = self._run_steps if self._has_steps(command) else self._run_at_once
        if command.group is None:
            return run(command, None)
        try:
            comm = self._groups.open(command.group)
            with self._models.running(comm, command.group):
                return run(command, comm)
        except GroupBroken as error:
            _log.warning("work %d of %s broke off: %s", command.work_id, _names(command), error)
            return replace(self._cut_off(command), ending=Ending.BROKEN)
        except JobMissing:
            raise
        except Exception:
            self._groups.break_off(command.group.group_id)
            raise
        finally:
            self._groups.rest()

    def _run_at_once(self, command: Execute, comm: Comm | None) -> Ended:
        """Run a stage without steps."""
        family = self._models[command.model]
        check = self._sync_members(command, comm)
        if not check.present:
            return replace(_revoked(command.work_id), absent=check.absent)
        start_ns = time.monotonic_ns()
        jobs = [member.job for member in check.present]
        self._check_specs(command, [job.spec for job in jobs])
        if comm is not None:
            family.parallel.join(comm, guided=False)
        try:
            with self._budget.hold(), synchronized(jobs, family.device, comm):
                outputs = family.run(
                    command.stage, [job.spec for job in jobs], [job.values for job in jobs], command.sliced
                )
        finally:
            family.parallel.leave()
        for job, of_job in zip(jobs, outputs, strict=True):
            job.take_outputs(dict(of_job))
        ended = Ended(command.work_id, start_ns, self._now_ns(), steps_done=1, absent=check.absent)
        members = zip(check.present, outputs, strict=True)
        ended.for_any_seed = frozenset(member.job_id for member, of_job in members if of_job.get(ANY_SEED))
        return self._written(family, ended, check.present) if leads(comm) else ended

    def _sync_members(self, command: Execute, comm: Comm | None) -> MemberCheck:
        device = self._models.device
        return sync_members(self._jobs, command, comm, device, lambda: self._works.is_stopped(command.work_id))

    def _check_specs(self, command: Execute, specs: Sequence[Spec]) -> None:
        """Check that a work may run these requests, and compute with their LoRAs.

        Requests with different LoRAs may share a stage that these do not change, such as a decode.
        """
        for spec in specs:
            check_exact(spec, command)
        used = {spec.loras for spec in specs}
        if len(used) > 1:
            used = {self._models.changing(command.model, command.stage, loras) for loras in used}
        loras, *others = used
        if others:
            raise ValueError(f"requests with different LoRAs share work {command.work_id}")
        self._models.use(command.model, command.stage, loras)

    def _written(self, family: Family, ended: Ended, members: Sequence[WorkJob]) -> Ended:
        """Return the report with blobs of jobs that are not done; results of the others are made when it is sent."""
        done = [member for member in members if member.job.is_ended]
        others = [member for member in members if not member.job.is_ended]
        ended = replace(ended, blobs=write_states(family, self._blobs, others))
        self._results = tuple(_Result(one.job_id, one.job.spec, one.job.take_values()) for one in done)
        return ended

    def _with_results(self, ended: Ended, family: Family, results: Sequence[_Result]) -> Report:
        """Return the report with results, which a worker makes beside its next work; `Failed` if that raises."""
        try:
            images = {one.job_id: family.image(one.spec, one.values) for one in results if one.spec.video is None}
            files = {one.job_id: family.file(one.spec, one.values) for one in results if one.spec.video is not None}
        except Exception as error:
            _log.exception("the results of work %d failed", ended.work_id)
            for blob in ended.blobs.values():
                self._blobs.remove(blob)
            return Failed(ended.work_id, describe(error), by_model=True)
        return replace(ended, images=images, files=files)

    def _run_steps(self, command: Execute, comm: Comm | None) -> Ended:
        family = self._models[command.model]
        check = self._sync_members(command, comm)
        self._absent = check.absent
        if not check.present:
            return replace(_revoked(command.work_id), absent=check.absent)
        self._check_specs(command, [member.job.spec for member in check.present])
        for member in check.present:
            member.job.use_cache(family, *command.caches)
        start_ns = time.monotonic_ns()
        if comm is not None:
            (member,) = check.present
            family.join(comm, member.job.spec)
        most = min(command.num_steps, *(member.num_steps_left for member in check.present))
        mark = events_on(family.device)
        steps = Steps(family, check.present, command.work_id, comm, self._works, self._emit, self._cache, mark)
        try:
            with self._budget.hold():
                steps_done = steps.run(most, self._begin_loads)
        finally:
            family.parallel.leave()
        end_ns = self._now_ns()
        uses = _cache_uses(check.present)
        for member in check.present:
            member.job.end_steps(family)
        ending = Ending.STOPPED if steps_done < most else Ending.DONE
        ended = Ended(command.work_id, start_ns, end_ns, steps_done, ending, absent=check.absent)
        ended.cache_use = uses
        return self._written(family, ended, check.present) if leads(comm) else ended

    def _cut_off(self, command: Execute) -> Ended:
        """Report the steps that this worker has done; its state may be one step ahead of the other ranks.

        No state is kept of several jobs if some are ahead of others.
        """
        now_ns = time.monotonic_ns()
        absent = {one.job_id for one in self._absent}
        members = [
            WorkJob(job_id, position, self._jobs.get(job_id))
            for job_id, position in command.members
            if job_id in self._jobs and job_id not in absent
        ]
        steps_done = {member.job.position - member.position for member in members}
        is_even = len(steps_done) == 1 and len(members) + len(absent) == len(command.members)
        if not is_even or max(steps_done) <= 0:
            return Ended(command.work_id, now_ns, now_ns, steps_done=0, absent=self._absent)
        family = self._models[command.model]
        uses = _cache_uses(members)
        for member in members:
            member.job.end_steps(family)
        ended = Ended(command.work_id, now_ns, self._now_ns(), steps_done.pop(), absent=self._absent, cache_use=uses)
        return self._written(family, ended, members)

    def _import(self, command: ImportState, *, are_latest: bool = True) -> None:
        """Import a job. If one of its blobs is lost and they `are_latest`, the job has to begin again."""
        job_id = command.job_id
        try:
            self._models.use(command.model, None, command.spec.loras)
            self._jobs.put(job_id, import_job(self._models[command.model], self._blobs, self._jobs, command))
        except (BadState, FileNotFoundError, TruncatedStateBlob) as error:
            # Either the job continues without this worker and needs nothing here, or a blob of it is lost.
            reason = f"a blob of its state is missing or damaged ({describe(error)})"
            self._jobs.lose(job_id, reason, state_lost=are_latest)
        except Exception as error:
            _log.exception("import of job %d failed", job_id)
            self._check_device(error)
            self._jobs.lose(job_id, f"its import failed with {describe(error)}")

    def _calibrate(self, command: Calibrate) -> Calibrated:
        errors: list[str] = []
        measure = partial(
            calibrate,
            self._models[command.model],
            command.batches,
            num_runs=command.num_runs,
            prepare=partial(self._prepare, command),
            cell_size=self._models.cell_size,
            known=command.known,
            on_error=errors.append,
        )
        if command.group is None:
            with self._budget.hold():
                rows = measure()
            return Calibrated(rows, "; ".join(errors))
        try:
            comm = self._groups.open(command.group)
            with self._models.running(comm, command.group), self._budget.hold():
                rows = measure(comm=comm)
        except GroupBroken as error:
            return Calibrated((), str(error))
        finally:
            self._groups.rest()
        return Calibrated(rows, *errors)

    def _prepare(self, command: Calibrate, stage: str) -> None:
        """Bring the weights of a stage to the device, if it has no room for all, and compute with the LoRAs."""
        if command.weights:
            needed = command.weights[stage]
            self._models.drop({one for some in command.weights.values() for one in some}.difference(needed))
            self._models.load(needed)
        self._models.use(command.model, stage, command.loras)

    def _now_ns(self) -> int:
        synchronize(self._models.device)
        return time.monotonic_ns()


def _cache_uses(members: Sequence[WorkJob]) -> dict[int, CacheUse]:
    """Return what the caches of jobs did since the last call."""
    uses = {one.job_id: one.job.state.take_cache_use() for one in members if one.job.state is not None}
    return {job_id: use for job_id, use in uses.items() if use is not None}


def _revoked(work_id: int) -> Ended:
    now_ns = time.monotonic_ns()
    return Ended(work_id, now_ns, now_ns, steps_done=0, ending=Ending.STOPPED)


def _without_memory(work_id: int) -> Ended:
    now_ns = time.monotonic_ns()
    return Ended(work_id, now_ns, now_ns, steps_done=0, ending=Ending.OUT_OF_MEMORY)


def _names(command: Execute) -> str:
    job_ids = [job_id for job_id, _ in command.members]
    return f"job{'s' if len(job_ids) > 1 else ''} {', '.join(map(str, job_ids))}"


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
