"""`tilework compare`: many policies on many workloads, simulated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tilework.cli.console import UserError, console, print_json, user_errors
from tilework.cli.views.compare import document_of, print_tables
from tilework.cli.views.compare_plot import plot
from tilework.core.time import NS_PER_MS
from tilework.cost.table import BadCostTable
from tilework.formats.json_lines import BadLine
from tilework.policy.registry import UnknownPolicy, make_policy
from tilework.sim.compare.cells import BadCell, Cell, Devices, cell_of, chosen
from tilework.sim.compare.grid import FEW_SEEDS, FULL_SEEDS, GRIDS, POLICIES
from tilework.sim.compare.records import BadRecords, Record, Records, key_of
from tilework.sim.compare.runs import Conditions, Failed, Task, code_digest, config_of, given, run_all
from tilework.sim.compare.summary import CellSummary
from tilework.sim.compare.tally import summaries_of
from tilework.sim.workloads.parameters import BadParameter
from tilework.sim.workloads.registry import UnknownWorkload

EXAMPLE = (
    "Examples: tilework compare --workload tetriserve,rpm=18,mix=skewed --policies tilework,tetriserve,edf  |  "
    "tilework compare --out out/grid --plot grid.png  |  "
    "tilework compare --workload r.jsonl --cost flux1dev_h100_eager --devices 8"
)
RESULTS = "results.jsonl"
_GRID = "grid"
_MOST_SHOWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    cells: tuple[Cell, ...]
    policies: tuple[str, ...]
    num_seeds: int
    conditions: Conditions
    num_processes: int
    has_bound: bool

    def seeds(self, cell: Cell) -> range:
        """One is enough where nothing is drawn."""
        return range(self.num_seeds if cell.is_drawn or self.conditions.jitter else 1)

    def tasks(self) -> list[Task]:
        """Cell by cell, so that what is there if it is cut short is comparable."""
        return [
            Task(cell=cell, seed=seed, policy=policy)
            for cell in self.cells
            for seed in self.seeds(cell)
            for policy in (*self._bounds(cell, seed), *self.policies)
        ]

    def _bounds(self, cell: Cell, seed: int) -> tuple[None, ...]:
        """The bound knows no batches: whoever forms some may be above it."""
        _, table = given(cell, 0)
        return (None,) if self.has_bound and not table.has_batches and (cell.is_drawn or seed == 0) else ()


@dataclass(slots=True, kw_only=True)
class _Work:
    """What is there and what is still to be run. `errors` are those of runs that failed, by task."""

    records: Records
    missing: list[Task]
    keys: dict[Task, str]
    errors: dict[Task, str] = field(default_factory=dict)

    def found(self, task: Task) -> Record | None:
        return self.records.get(self.keys[task])


def command(
    workload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,key=value...]|FILE|GRID",
            help="A name of `workload list` with its parameters (also rpm, rate, num), a file of requests, a grid "
            f"({', '.join(GRIDS)}), or GRID:PATTERN for some of its cells; repeatable. Default: {_GRID}.",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="Names, separated by commas (docs/policies.md). Default: those of the grid that is named, else "
            f"{', '.join(POLICIES)}."
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help=f"How many seeds, from 0 on; default {FULL_SEEDS}, {FEW_SEEDS} on a grid.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Number of devices; default the workload's own, 1 for a file.")
    ] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, help="Devices of a node: no group is wider; default: the cost table's.")
    ] = None,
    cost: Annotated[str | None, typer.Option(help="Cost table; default the workload's own.")] = None,
    jitter: Annotated[float, typer.Option(min=0, max=1, help="Relative standard deviation of each duration.")] = 0.0,
    switch_ms: Annotated[
        float, typer.Option(min=0, help="What is lost when devices go on with another job, or a job on other devices.")
    ] = 0.0,
    processes: Annotated[int | None, typer.Option(min=1, help="Default: one per core.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--out", help="Keep each result here at once; what is there is not run again.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    png: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw it all on one picture.")] = None,
    full: Annotated[bool, typer.Option("--full", help=f"{FULL_SEEDS} seeds, also on the grid.")] = False,
) -> None:
    """Simulate policies on workloads with the controller that serves, and set them side by side.

    Shares of requests on time, of those that could have been (with the extra `solve`), latency, device time, with 95%
    intervals over seeds. All times are simulated, but for those of decisions. See docs/compare.md.
    """
    texts = workload or [_GRID]
    wish = _Wish(
        cells=_cells(texts, Devices(table=cost, num_devices=devices, devices_per_node=devices_per_node)),
        policies=_policies(_default_policies(texts) if policies is None else policies),
        num_seeds=_num_seeds(seeds, full, texts),
        conditions=Conditions(jitter=jitter, switch_ns=round(switch_ms * NS_PER_MS)),
        num_processes=processes or os.cpu_count() or 1,
        has_bound=find_spec("highspy") is not None,
    )
    if png is not None and png.suffix.lower() != ".png":
        raise UserError(f"--plot {png} ends in {png.suffix!r}; the picture is a .png")
    work = _prepare(wish, directory)
    with user_errors(OSError):
        _run(wish, work, quiet=json)
    summaries = _summaries(wish, work)
    if png is not None and summaries:
        with user_errors(OSError):
            plot(png, summaries)
    if json:
        print_json(document_of(summaries, wish.conditions, wish.num_processes))
    else:
        print_tables(summaries, wish.num_processes, wish.conditions, has_bound=wish.has_bound)
    _tell_errors(work)


def _cells(texts: Sequence[str], devices: Devices) -> tuple[Cell, ...]:
    cells: dict[str, Cell] = {}
    for text in texts:
        try:
            found = _cells_of(text, devices)
        except (UnknownWorkload, BadParameter, BadCell) as error:
            raise UserError(f"--workload {text}: {error}") from error
        for cell in found:
            if cell.name in cells:
                raise UserError(f"--workload {text}: {cell.name} is named twice; leave one out")
            cells[cell.name] = cell
    with user_errors(BadCell, BadCostTable, BadParameter, BadLine, OSError):
        for cell in cells.values():
            given(cell, 0)
    return tuple(cells.values())


def _cells_of(text: str, devices: Devices) -> tuple[Cell, ...]:
    name, _, pattern = text.partition(":")
    if name not in GRIDS:
        return (cell_of(text, devices),)
    if devices != Devices():
        raise BadCell(
            "the cells of the grid have their own devices; leave out --cost, --devices and --devices-per-node"
        )
    return chosen(GRIDS[name].cells(), pattern or "*")


def _default_policies(texts: Sequence[str]) -> str:
    """Those of the grids that are named, if any are."""
    named = [GRIDS[name].policies for text in texts if (name := text.partition(":")[0]) in GRIDS]
    return ",".join(dict.fromkeys(policy for policies in named or [POLICIES] for policy in policies))


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        try:
            make_policy(name)
        except UnknownPolicy as error:
            raise UserError(f"--policies {text}: {error}") from error
        if names.count(name) > 1:
            raise UserError(f"--policies {text}: {name} is named twice; leave one out")
    return names


def _num_seeds(seeds: int | None, full: bool, texts: Sequence[str]) -> int:
    if full and seeds is not None:
        raise UserError(f"--full means {FULL_SEEDS} seeds; leave out --full or --seeds {seeds}")
    has_grid = any(text.partition(":")[0] in GRIDS for text in texts)
    return seeds or (FEW_SEEDS if has_grid and not full else FULL_SEEDS)


def _prepare(wish: _Wish, directory: Path | None) -> _Work:
    with user_errors(BadRecords, OSError, BadCell, BadCostTable, BadParameter, BadLine):
        records = Records(None if directory is None else directory / RESULTS)
        with console.status("drawing requests"):
            keys = {task: key_of(config_of(task, wish.conditions)) for task in wish.tasks()}
    work = _Work(records=records, missing=[], keys=keys)
    work.missing = [task for task in keys if work.found(task) is None]
    _tell_what_is_there(work)
    return work


def _tell_what_is_there(work: _Work) -> None:
    there = [record for task in work.keys if (record := work.found(task)) is not None]
    if not there:
        return
    console.print(f"{len(there)} of {len(work.keys)} results are in {work.records.path}", soft_wrap=True)
    others = sum(record.code != code_digest() for record in there)
    if others:
        console.print(
            f"[yellow]{others} of them are of another state of this program;[/yellow] to run them again, give another "
            "--out, or remove the file",
            soft_wrap=True,
        )


def _run(wish: _Wish, work: _Work, quiet: bool) -> None:
    """Raises UserError if it is interrupted; what is done is kept."""
    try:
        with _Course(work.missing, quiet) as course:
            runs = run_all(work.missing, wish.conditions, wish.num_processes, course.begin)
            with closing(runs):
                for task, result in runs:
                    if isinstance(result, Failed):
                        work.errors[task] = result.error
                    else:
                        work.records.add(result)
                    course.end(task)
    except KeyboardInterrupt:
        done = sum(work.found(task) is not None for task in work.keys)
        path = work.records.path
        kept = "nothing is kept without --out DIR" if path is None else f"they are in {path}; to go on, run it again"
        raise UserError(f"interrupted: {done} of {len(work.keys)} runs are done; {kept}") from None


class _Course:
    """The progress bar: what is running, and how long it will take."""

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

    def __enter__(self) -> _Course:
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


def _summaries(wish: _Wish, work: _Work) -> list[CellSummary]:
    seeds = {cell: wish.seeds(cell) for cell in wish.cells}
    errors = {(task.cell.name, task.policy): error for task, error in work.errors.items()}

    def found(cell: Cell, seed: int, policy: str | None) -> Record | None:
        task = Task(cell=cell, seed=seed if policy is not None or cell.is_drawn else 0, policy=policy)
        return work.found(task) if task in work.keys else None

    return summaries_of(seeds, wish.policies, found, errors)


def _tell_errors(work: _Work) -> None:
    """Exit status 1 if a run failed."""
    for task, error in work.errors.items():
        console.print(f"[red]failed:[/red] {task}: ", end="")
        console.print(error, markup=False, highlight=False, soft_wrap=True)
    if work.errors:
        raise typer.Exit(1)
