"""Executes the commands of a worker; knows no process, thread or pipe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from tilework.comm.groups import Groups
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
from tilework.core.wire.reports import Ended, Report, StartedOver
from tilework.patches.cache import PatchCache
from tilework.worker.calibrate import execute_calibrate
from tilework.worker.jobs import Jobs
from tilework.worker.memory import Budget
from tilework.worker.models.loads import Loads
from tilework.worker.models.models import Models
from tilework.worker.state_blobs import StateBlobs
from tilework.worker.work_run import WorkRun
from tilework.worker.works import OpenWorks


class Worker:
    """Executes one command after another, and reports through `emit` how each work ended (see `WorkRun`).

    If a work has results, `emit_made` makes and sends its report later, in order with what is emitted before and after.
    `works` holds the works that were received; `execute` closes those that it ends. Weights are loaded block by block
    while there is no command (`loads`), and a work waits only for those that its stage needs; those of `loads_ahead`,
    for which there is room already, may begin beside its steps. Jobs without a received work keep `states_bytes` at
    most (see `jobs`). The steps of jobs with a cache keep `cache_bytes` at most for later ones.
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
        self.jobs = Jobs(models, blobs, works, states_bytes)
        self._models = models
        self._works = works
        self._groups = groups
        self._emit = emit
        self._emit_made = emit_made or (lambda make: emit(make()))
        self._budget = budget or Budget(models.device, None)
        self._pack = PatchCache(cache_bytes)
        self.loads = Loads(models, self._budget, emit, loads_ahead)

    def execute(self, command: Command) -> None:
        """Execute a command; the receiver handles `StopWork`, `BreakGroup`, `EnterNode` and `Quit`.

        Raises:
            WeightsNotLoaded: weights that it needs cannot be loaded.
            DeviceFailed: the device takes nothing from this process any more.
        """
        match command:
            case Execute():
                self._run(command)
            case ImportState():
                self.loads.finish(self._needed_next(command))
                self.jobs.take(command)
            case NoteSaved(job_id, saved):
                self.jobs.note(job_id, saved)
            case Forget(job_id):
                self.jobs.forget(job_id)
            case StartOver():
                self.jobs.clear()
                self._emit(StartedOver())
            case CloseGroup():
                self._groups.close(command.group_id)
            case LoadWeights():
                self.loads.add(command)
            case DropWeights(components):
                self.loads.drop(components)
            case Calibrate():
                self.loads.finish()
                self._emit(execute_calibrate(command, self._models, self._groups, self._budget))
            case AddModel() | AddLora() | RemoveModel() | RemoveLora():
                self.loads.finish()
                if (answer := self._models.change(command)) is not None:
                    self._emit(answer)
            case _:
                raise TypeError(f"a worker does not execute {type(command).__name__}")

    def _needed_next(self, command: ImportState) -> Collection[str]:
        """Return what the stage of an imported job needs: some models call its components when they get a state."""
        if command.model not in self._models:
            return ()
        itinerary = self._models[command.model].info.graph.itinerary(command.spec.steps, result=command.spec.result)
        stage = itinerary.at[command.position].stage
        return () if stage is None else self._models.needed(command.model, stage.name)

    def _run(self, work: Execute) -> None:
        """Run a work and report its end."""
        run = WorkRun(
            work, self._models, self.jobs, self._works, self._groups, self._budget, self.loads, self._pack, self._emit
        )
        report = run.run()
        self._works.close(work.work_id)
        if isinstance(report, Ended):
            report.kept = self.jobs.kept
        if isinstance(report, Ended) and run.results is not None:
            self._emit_made(partial(run.results.added_to, report))
        else:
            self._emit(report)
        self.jobs.spill()  # Nothing waits for this.
