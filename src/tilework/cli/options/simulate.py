"""The options of `tilework simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilework.policy.registry import DEFAULT_POLICY

Requests = Annotated[Path | None, typer.Argument(help="Requests as JSON lines or CSV (docs/formats.md).")]
Cost = Annotated[
    str | None, typer.Option(help="Cost table: a JSON file (docs/formats.md), or a name of `tilework cost list`.")
]
TrueCost = Annotated[
    str | None,
    typer.Option(
        metavar="COST",
        help="Cost table of the simulated devices, where it is not the one by which is planned; default --cost.",
    ),
]
Log = Annotated[Path | None, typer.Option(help="Take requests and measured costs from a live run's log.")]
Policy = Annotated[
    str | None,
    typer.Option(help=f"A name of docs/policies.md, or module:Class; default {DEFAULT_POLICY}, or the log's."),
]
MaxBatch = Annotated[
    int | None, typer.Option(min=1, help="Most requests in one forward pass; default 12, or the log's.")
]
Devices = Annotated[int | None, typer.Option(min=1, help="Number of devices; default 1, or the log's.")]
CpuSlots = Annotated[
    int, typer.Option("--cpu-slots", min=1, help="CPU slots of each node, if a pipeline has stages for them.")
]
Seed = Annotated[int, typer.Option(help="Seed of the jitter.")]
Schedule = Annotated[Path | None, typer.Option(help="Write what ran when, as JSON lines.")]
Timeline = Annotated[
    list[Path] | None,
    typer.Option(help="Draw devices over time: .html, .png or .json (for Perfetto); repeatable."),
]
Events = Annotated[
    Path | None, typer.Option(help="Write the event log, for explain, timeline and replay, as serve --log does.")
]
