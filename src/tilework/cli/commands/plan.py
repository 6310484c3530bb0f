"""`tilework plan`: computes how many devices to buy."""

from __future__ import annotations

import json as jsonlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tilework.cli.console import UserError, console, print_json, user_errors
from tilework.cli.options.common import AsJson, DevicesPerNode, Jitter, Processes, SwitchMs, examples
from tilework.cli.plan.answer import Answer, Extent, OnStep, answered
from tilework.cli.plan.asked import Wanted, asked
from tilework.cli.plan.document import document_of
from tilework.cli.plan.view import show
from tilework.core.time import NS_PER_MS
from tilework.cost.tabled import UnknownCost
from tilework.policy.registry import DEFAULT_POLICY
from tilework.report.growth import GrowthPoint, draw_growth
from tilework.sim.config import SimConfig

MOST = 1024
SAMPLES = 8
SAMPLE = 400

Workload = Annotated[
    str | None,
    typer.Option(
        metavar="WORKLOAD",
        help="NAME of `workload list`, or NAME,key=value,... with its parameters (also rpm, rate, num); a file of "
        "requests; or the event log of a live run, for its requests and measured costs.",
    ),
]
Target = Annotated[float, typer.Option(help="Share of deadlines to keep, from 0.01 to 0.999.", show_default=True)]
Hardware = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COST",
        help="Cost table of a hardware that you may buy; repeatable. Default: the workload's own, or the log's "
        "measurements.",
    ),
]
Price = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COST=USD",
        help="Price of one device of a hardware, per hour; repeatable. With all prices, the plan is the cheapest, also "
        "of two kinds together.",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(help=f"A name of docs/policies.md, or module:Class; default {DEFAULT_POLICY}, or the log's."),
]
Samples = Annotated[int, typer.Option(min=1, max=1000, help="Most samples of the traffic for one number of devices.")]
Sample = Annotated[int, typer.Option(min=20, help="Number of deadlines in a sample; a short workload is one sample.")]
Step = Annotated[
    int | None,
    typer.Option(min=1, help="Buy devices by this many; default: single ones on one node, then whole nodes."),
]
Most = Annotated[int, typer.Option(min=1, max=65536, help="Most devices of one hardware.")]
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
        help="Number of devices that served a file's requests live, and number on time: the plan then says how far "
        "simulation is from that.",
    ),
]
EXAMPLE = examples(
    "tilework plan --workload tetriserve,rpm=18 --target 0.9 --plot plan.png",
    "tilework plan --workload requests.jsonl --hardware h100.json \\\n"
    "  --hardware l40s.json --price h100.json=2.49 --price l40s.json=0.86",
    "tilework plan --workload events.jsonl --what-if",
    "tilework plan --workload tridentserve-sd3,rate=8,minutes=5 \\\n  --target 0.9 --stages",
)


def command(
    workload: Workload = None,
    target: Target = 0.95,
    hardware: Hardware = None,
    price: Price = None,
    policy: Policy = None,
    samples: Samples = SAMPLES,
    sample: Sample = SAMPLE,
    step: Step = None,
    most: Most = MOST,
    devices_per_node: DevicesPerNode = None,
    what_if: WhatIfs = False,
    stages: Stages = False,
    jitter: Jitter = 0.0,
    switch_ms: SwitchMs = 0.0,
    processes: Processes = None,
    served: Served = None,
    png: Plot = None,
    json: AsJson = False,
    show_progress: ShowProgress = False,
) -> None:
    """Find the fewest devices, or the cheapest, that keep a share of the deadlines of a workload.

    The command simulates the controller that serves. A number of devices is enough if the whole 95% interval of its
    share on time is at the target or above. See docs/planning.md.
    """
    if png is not None:
        _check_plot(png)
    wanted = Wanted(
        workload=workload,
        target=target,
        hardware=hardware or (),
        prices=price or (),
        policy=policy,
        sim=SimConfig(num_devices=1, jitter=jitter, switch_ns=round(switch_ms * NS_PER_MS)),
        devices_per_node=devices_per_node,
        step=step,
        most=most,
        sample=sample,
        num_samples=samples,
        served=served,
    )
    extent = Extent(
        num_samples=samples,
        has_what_ifs=what_if,
        has_stages=stages,
        has_curve=png is not None,
        num_processes=processes or os.cpu_count() or 1,
    )
    question = asked(wanted, quiet=json)
    with user_errors(UnknownCost), _steps(json, show_progress) as on_step:
        answer = answered(question, extent, on_step)
    if png is not None:
        _draw(png, answer)
    if json:
        print_json(document_of(answer))
    else:
        show(answer)


def _check_plot(path: Path) -> None:
    """Raise UserError for a chart that could not be written after all the simulations."""
    if path.suffix.lower() != ".png":
        raise UserError(f"--plot {path} ends in {path.suffix!r}; the chart is a .png")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: the directory {path.absolute().parent} does not exist; make it first")


@contextmanager
def _steps(quiet: bool, for_programs: bool) -> Iterator[OnStep]:
    """Yield a function that shows each simulation: as one changing line of the terminal, or as lines of JSON."""
    if for_programs:
        yield lambda text, number: print(
            jsonlib.dumps({"simulations": number, "now": text}), file=sys.stderr, flush=True
        )
    elif quiet or not console.is_terminal:
        yield lambda text, number: None
    else:
        with console.status("simulating") as status:
            yield lambda text, number: status.update(f"{number} simulations; {text}")


def _draw(path: Path, answer: Answer) -> None:
    """Draw the curves, if anything was simulated. Raises UserError."""
    if not any(one.points for one in answer.alone):
        console.print(f"{path} is not drawn: nothing was simulated", markup=False, highlight=False, soft_wrap=True)
        return
    curves = {
        one.sizing.hardware: [
            GrowthPoint(
                num_devices=point.num_devices,
                share=point.share.value,
                low=point.share.low,
                high=point.share.high,
                is_most=not point.is_whole,
            )
            for point in one.points
        ]
        for one in answer.alone
        if one.points
    }
    chosen = {one.sizing.hardware: one.fewest for one in answer.alone if one.fewest is not None}
    title = f"{answer.asked.name}, simulated"
    with user_errors(OSError):
        draw_growth(path, curves, target=answer.asked.question.target, chosen=chosen, title=title)
