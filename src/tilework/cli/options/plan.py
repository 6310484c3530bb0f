"""The options of `tilework plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilework.policy.registry import DEFAULT_POLICY

MOST = 1024
SAMPLES = 8
SAMPLE = 400

Workload = Annotated[
    str | None,
    typer.Option(
        metavar="WORKLOAD",
        help="NAME of `workload list`, or NAME,key=value,... with its parameters (also rpm, rate, num); a file of "
        "requests; or the event log of a live run, whose requests and measured costs are taken.",
    ),
]
Target = Annotated[
    float, typer.Option(help="The share of deadlines that has to be kept, from 0.01 to 0.999.", show_default=True)
]
Hardware = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COST",
        help="Cost table of a hardware that may be bought; repeatable. Default: the workload's own, or what the log "
        "measured.",
    ),
]
Price = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COST=USD",
        help="Price of one device of a hardware, per hour; repeatable. With the prices of all, the cheapest is found, "
        "also of two kinds together.",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(help=f"A name of docs/policies.md, or module:Class; default {DEFAULT_POLICY}, or the log's."),
]
Samples = Annotated[
    int, typer.Option(min=1, max=1000, help="The most samples of the traffic that decide about one number of devices.")
]
Sample = Annotated[int, typer.Option(min=20, help="How many deadlines are in a sample; a short workload is one.")]
Step = Annotated[
    int | None,
    typer.Option(min=1, help="Devices are bought by this many; default: single ones on one node, then whole nodes."),
]
Most = Annotated[int, typer.Option(min=1, max=65536, help="The most devices that may be bought of one hardware.")]
WhatIfs = Annotated[
    bool,
    typer.Option("--what-if", help="Also: deadlines x 0.8 and 1.25, rate x 0.5, 1.5 and 2, heaviest size x 0.5 and 2."),
]
Stages = Annotated[
    bool,
    typer.Option("--stages", help="Also divide the devices among the stages: by OnePiece's Theorem 1, by simulation."),
]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the share on time over the number of devices.")
]
ShowProgress = Annotated[
    bool, typer.Option("--progress", help="Write a line of JSON to stderr after each simulation, for programs.")
]
Served = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICES,ON_TIME",
        help="On how many devices the requests of a file were served live, and how many were on time: says how "
        "far simulation is from that.",
    ),
]
