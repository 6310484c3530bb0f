"""`tilework compare`: simulates many policies on many workloads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tilework.cli.console import UserError, console, print_json, user_errors
from tilework.cli.options.common import AsJson, DevicesPerNode, Jitter, Processes, SwitchMs, examples
from tilework.core.time import NS_PER_MS
from tilework.cost.table import BadCostTable
from tilework.formats.json_lines import BadLine
from tilework.policy.registry import UnknownPolicy, check_pools, make_policy
from tilework.sim.workloads.cells import BadCell, Cell, CellDevices, cell_of
from tilework.sim.workloads.family import BadParameter
from tilework.sim.workloads.registry import UnknownWorkload
from tilework.sim.workloads.requests import BadRequests
from tilework_lab.cli.compare_run import Comparison, Runs, prepare, run_missing
from tilework_lab.cli.document import document_of, promises_document
from tilework_lab.cli.plot import plot, plot_promises
from tilework_lab.cli.tables import print_promises, print_tables
from tilework_lab.compare.grid import FEW_SEEDS, FULL_SEEDS, GRIDS, POLICIES, chosen
from tilework_lab.compare.runs import Conditions, given, true_costs

GRID = "grid"
"""The grid that is compared if no workload is named."""

Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        metavar="WORKLOAD",
        help="NAME of `workload list` or module:Class, or NAME,key=value,... with its parameters (also rpm, rate, "
        f"num); a file of requests; a grid ({', '.join(GRIDS)}); or GRID:PATTERN for some of its cells. Repeatable. "
        f"Default: {GRID}.",
    ),
]
Policies = Annotated[
    str | None,
    typer.Option(
        help="Names of docs/policies.md, or module:Class, separated by commas; default: the policies of the grid."
    ),
]
Seeds = Annotated[
    int | None, typer.Option(min=1, help=f"Number of seeds, from 0 on; default {FULL_SEEDS}, {FEW_SEEDS} on a grid.")
]
NumDevices = Annotated[
    int | None, typer.Option(min=1, help="Number of devices; default the workload's own, 1 for a file.")
]
Cost = Annotated[str | None, typer.Option(help="Cost table; default the workload's own.")]
TrueCost = Annotated[
    str | None,
    typer.Option(
        metavar="COST",
        help="Cost table by which the simulated devices run, if it differs from the planner's. The planner starts from "
        "its own table and learns from measurements; the bound goes by the devices' table.",
    ),
]
Promises = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Measure what promises cost: run everything twice. First all requests are best effort; then this share of "
        "those with a deadline asks for a promise.",
    ),
]
Directory = Annotated[
    Path | None,
    typer.Option("--out", help="Keep each result in this directory at once; kept results are not run again."),
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw all results as one chart.")]
Full = Annotated[bool, typer.Option("--full", help=f"Use {FULL_SEEDS} seeds on grids, too.")]
EXAMPLE = examples(
    "tilework compare --workload tetriserve,rpm=18,mix=skewed \\\n  --policies tilework,tetriserve,edf",
    "tilework compare --out out/grid --plot grid.png",
    "tilework compare --workload promises-grid --promises 0.5 --seeds 2",
    "tilework compare --workload r.jsonl --cost flux1dev_h100_eager --devices 8",
    "tilework compare --workload 'grid:flux8-*' --true-cost measured.json",
)


def command(
    workload: Workloads = None,
    policies: Policies = None,
    seeds: Seeds = None,
    devices: NumDevices = None,
    devices_per_node: DevicesPerNode = None,
    cost: Cost = None,
    true_cost: TrueCost = None,
    jitter: Jitter = 0.0,
    switch_ms: SwitchMs = 0.0,
    promises: Promises = None,
    processes: Processes = None,
    directory: Directory = None,
    json: AsJson = False,
    png: Plot = None,
    full: Full = False,
) -> None:
    """Simulate policies on workloads with the controller that serves, and set them side by side.

    The tables show the share of requests on time, of all and of those that could have been,
    latency and device time, with 95% intervals over seeds. All times are simulated except those of decisions. See
    lab/docs/compare.md.
    """
    texts = workload or [GRID]
    comparison = Comparison(
        cells=_cells(texts, CellDevices(table=cost, num_devices=devices, devices_per_node=devices_per_node), true_cost),
        policies=_policies(_default_policies(texts) if policies is None else policies),
        num_seeds=_num_seeds(seeds, full, texts),
        conditions=Conditions(jitter=jitter, switch_ns=round(switch_ms * NS_PER_MS)),
        num_processes=processes or os.cpu_count() or 1,
        promises=_share(promises),
    )
    _check_pools(comparison)
    if png is not None and png.suffix.lower() != ".png":
        raise UserError(f"--plot {png} ends in {png.suffix!r}; the chart is a .png")
    runs = prepare(comparison, directory)
    with user_errors(OSError):
        run_missing(comparison, runs, quiet=json)
    if promises is None:
        _show(comparison, runs, png, json=json)
    else:
        _show_promises(comparison, runs, promises, png, json=json)
    _report_errors(runs)


def _show(comparison: Comparison, runs: Runs, png: Path | None, *, json: bool) -> None:
    summaries = runs.summaries(comparison)
    if png is not None and summaries:
        with user_errors(OSError):
            plot(png, summaries)
    if json:
        print_json(document_of(summaries, comparison.conditions, comparison.num_processes))
    else:
        print_tables(summaries, comparison.num_processes, comparison.conditions)


def _show_promises(comparison: Comparison, runs: Runs, share: float, png: Path | None, *, json: bool) -> None:
    cells = runs.promise_cells(comparison, share)
    if png is not None and cells:
        with user_errors(OSError):
            plot_promises(png, cells, share)
    if json:
        print_json(promises_document(cells, share, comparison.conditions, comparison.num_processes))
    else:
        print_promises(cells, share)


def _share(promises: float | None) -> float | None:
    if promises is not None and not 0 < promises <= 1:
        raise UserError(f"--promises {promises:g} is no share; give a number above 0 and at most 1, such as 0.5")
    return promises


def _cells(texts: Sequence[str], devices: CellDevices, true_cost: str | None) -> tuple[Cell, ...]:
    cells: dict[str, Cell] = {}
    for text in texts:
        try:
            found = _cells_of(text, devices)
        except (UnknownWorkload, BadParameter, BadCell) as error:
            raise UserError(f"--workload {text}: {error}") from error
        for cell in found:
            if cell.name in cells:
                raise UserError(f"--workload {text}: {cell.name} is named twice; leave one out")
            cells[cell.name] = replace(cell, true_table=true_cost)
    with user_errors(BadCell, BadRequests, BadCostTable, BadParameter, BadLine, OSError):
        for cell in cells.values():
            given(cell, 0)
            true_costs(cell)
    return tuple(cells.values())


def _cells_of(text: str, devices: CellDevices) -> tuple[Cell, ...]:
    name, _, pattern = text.partition(":")
    if name not in GRIDS:
        return (cell_of(text, devices),)
    if devices != CellDevices():
        raise BadCell(
            "the cells of the grid have their own devices; leave out --cost, --devices and --devices-per-node"
        )
    return chosen(GRIDS[name].cells(), pattern or "*")


def _default_policies(texts: Sequence[str]) -> str:
    """Return the policies of the grids that are named, if any are."""
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


def _check_pools(comparison: Comparison) -> None:
    for cell in comparison.cells:
        for name in comparison.policies:
            with user_errors(UnknownPolicy):
                check_pools(name, given(cell, 0)[1].devices)


def _num_seeds(seeds: int | None, full: bool, texts: Sequence[str]) -> int:
    if full and seeds is not None:
        raise UserError(f"--full means {FULL_SEEDS} seeds; leave out --full or --seeds {seeds}")
    has_grid = any(text.partition(":")[0] in GRIDS for text in texts)
    return seeds or (FEW_SEEDS if has_grid and not full else FULL_SEEDS)


def _report_errors(runs: Runs) -> None:
    """Exit status 1 if a run failed."""
    for task, error in runs.errors.items():
        console.print(f"[red]failed:[/red] {task}: ", end="")
        console.print(error, markup=False, highlight=False, soft_wrap=True)
    if runs.errors:
        raise typer.Exit(1)
