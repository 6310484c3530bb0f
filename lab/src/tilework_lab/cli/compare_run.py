"""The runs of one `tilework compare`: finds the missing ones, and runs them with a progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tilework.cli.console import UserError, console, user_errors
from tilework.cost.table import BadCostTable
from tilework.formats.json_lines import BadLine
from tilework.sim.workloads.cells import BadCell, Cell
from tilework.sim.workloads.family import BadParameter
from tilework.sim.workloads.requests import BadRequests
from tilework_lab.compare.promises import BEST_EFFORT, PromiseCell, promise_cells
from tilework_lab.compare.records import BadRecords, Record, Records, key_of
from tilework_lab.compare.runs import Conditions, Failed, Task, code_digest, config_of, given, run_all
from tilework_lab.compare.summary import CellSummary, summaries_of

RESULTS = "results.jsonl"
_MOST_SHOWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of every policy on every cell, for each seed.

    With `promises` each run is made twice: all requests as best effort, and with this share asking for promises.
    """

    cells: tuple[Cell, ...]
    policies: tuple[str, ...]
    num_seeds: int
    conditions: Conditions
    num_processes: int
    promises: float | None = None

    def seeds(self, cell: Cell) -> range:
        """Return the seeds of a cell: one is enough where nothing is drawn."""
        return range(self.num_seeds if cell.is_drawn or self.conditions.jitter else 1)

    def tasks(self) -> list[Task]:
        """Return all runs, cell by cell, so that the results of an interrupted comparison can be compared."""
        return [
            Task(cell=cell, seed=seed, policy=policy, promises=share)
            for cell in self.cells
            for seed in self.seeds(cell)
            for policy in (*self._bounds(cell, seed), *self.policies)
            for share in ((None,) if self.promises is None else (BEST_EFFORT, self.promises))
        ]

    def _bounds(self, cell: Cell, seed: int) -> tuple[None, ...]:
        """Return the run of the bound, if the bound holds: it knows no batches, and a policy may form some."""
        if self.promises is not None:
            return ()
        _, table = given(cell, 0)
        return (None,) if not table.has_batches and (cell.is_drawn or seed == 0) else ()


@dataclass(slots=True, kw_only=True)
class Runs:
    """The results that are there and the runs that are missing. `errors` are those of runs that failed, by task."""

    records: Records
    missing: list[Task]
    keys: dict[Task, str]
    errors: dict[Task, str] = field(default_factory=dict)

    def found(self, task: Task) -> Record | None:
        return self.records.get(self.keys[task])

    def summaries(self, comparison: Comparison) -> list[CellSummary]:
        """Return one summary per cell, of the runs that are there."""
        seeds = {cell: comparison.seeds(cell) for cell in comparison.cells}

        def found(cell: Cell, seed: int, policy: str | None) -> Record | None:
            task = Task(cell=cell, seed=seed if policy is not None or cell.is_drawn else 0, policy=policy)
            return self.found(task) if task in self.keys else None

        return summaries_of(seeds, comparison.policies, found, self._errors)

    def promise_cells(self, comparison: Comparison, share: float) -> list[PromiseCell]:
        """Return the costs of promises in each cell, of the runs that are there."""
        seeds = {cell: comparison.seeds(cell) for cell in comparison.cells}

        def found(cell: Cell, seed: int, policy: str, promises: float) -> Record | None:
            return self.found(Task(cell=cell, seed=seed, policy=policy, promises=promises))

        return promise_cells(seeds, comparison.policies, share, found, self._errors)

    @property
    def _errors(self) -> dict[tuple[str, str | None], str]:
        return {(task.cell.name, task.policy): error for task, error in self.errors.items()}


def prepare(comparison: Comparison, directory: Path | None) -> Runs:
    """Read the results that `directory` keeps, and list the runs that are missing. Raises UserError."""
    with user_errors(BadRecords, OSError, BadCell, BadRequests, BadCostTable, BadParameter, BadLine):
        records = Records(None if directory is None else directory / RESULTS)
        with console.status("drawing requests"):
            keys = {task: key_of(config_of(task, comparison.conditions)) for task in comparison.tasks()}
    runs = Runs(records=records, missing=[], keys=keys)
    runs.missing = [task for task in keys if runs.found(task) is None]
    _report_what_is_there(runs)
    return runs


def run_missing(comparison: Comparison, runs: Runs, quiet: bool) -> None:
    """Run what is missing, and keep each result at once. Raises UserError if it is interrupted."""
    try:
        with _RunProgress(runs.missing, quiet) as bar:
            results = run_all(runs.missing, comparison.conditions, comparison.num_processes, bar.begin)
            with closing(results):
                for task, result in results:
                    if isinstance(result, Failed):
                        runs.errors[task] = result.error
                    else:
                        runs.records.add(result)
                    bar.end(task)
    except KeyboardInterrupt:
        done = sum(runs.found(task) is not None for task in runs.keys)
        path = runs.records.path
        kept = "nothing is kept without --out DIR" if path is None else f"they are in {path}; to resume, run it again"
        raise UserError(f"interrupted: {done} of {len(runs.keys)} runs are done; {kept}") from None


def _report_what_is_there(runs: Runs) -> None:
    there = [record for task in runs.keys if (record := runs.found(task)) is not None]
    if not there:
        return
    console.print(f"{len(there)} of {len(runs.keys)} results are in {runs.records.path}", soft_wrap=True)
    others = sum(record.code != code_digest() for record in there)
    if others:
        console.print(
            f"[yellow]{others} of them were made by another state of this program;[/yellow] to run them again, give "
            "another --out, or remove the file",
            soft_wrap=True,
        )


class _RunProgress:
    """The progress bar: the runs that are running, and the time that is left."""

    def __init__(self, tasks: Sequence[Task], quiet: bool) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._running: list[Task] = []
        self._task: TaskID = self._bar.add_task("comparing", total=len(tasks))

    def __enter__(self) -> _RunProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, task: Task) -> None:
        self._running.append(task)
        self._show()

    def end(self, task: Task) -> None:
        self._running.remove(task)
        self._bar.update(self._task, advance=1)
        self._show()

    def _show(self) -> None:
        shown = " | ".join(map(str, self._running[:_MOST_SHOWN]))
        more = f" and {len(self._running) - _MOST_SHOWN} more" if len(self._running) > _MOST_SHOWN else ""
        self._bar.update(self._task, description=shown + more)
