"""The options of `tilework compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilework_lab.compare.grid import FEW_SEEDS, FULL_SEEDS, GRIDS

GRID = "grid"
"""The grid that is compared if no workload is named."""

Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        metavar="WORKLOAD",
        help="NAME of `workload list`, or NAME,key=value,... with its parameters (also rpm, rate, num); a file of "
        f"requests; a grid ({', '.join(GRIDS)}); or GRID:PATTERN for some of its cells. Repeatable. Default: {GRID}.",
    ),
]
Policies = Annotated[
    str | None,
    typer.Option(help="Names of docs/policies.md, separated by commas; default: those that the grid compares."),
]
Seeds = Annotated[
    int | None, typer.Option(min=1, help=f"How many seeds, from 0 on; default {FULL_SEEDS}, {FEW_SEEDS} on a grid.")
]
Devices = Annotated[
    int | None, typer.Option(min=1, help="Number of devices; default the workload's own, 1 for a file.")
]
Cost = Annotated[str | None, typer.Option(help="Cost table; default the workload's own.")]
TrueCost = Annotated[
    str | None,
    typer.Option(
        metavar="COST",
        help="Cost table of the simulated devices, where it is not the one by which is planned. The planner starts "
        "from its own and learns from what it measures; the bound is that of the devices.",
    ),
]
Promises = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="What promises cost: run everything twice, with all requests as best effort, and with this share of those "
        "that have a deadline asking for a promise of it.",
    ),
]
Directory = Annotated[
    Path | None,
    typer.Option("--out", help="Keep each result here as soon as it is there; those that are kept are not run again."),
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw all results as one picture.")]
Full = Annotated[bool, typer.Option("--full", help=f"{FULL_SEEDS} seeds, also on a grid.")]
