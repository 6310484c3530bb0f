"""`tilework workload`: workloads by name, as files and as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tilework.cli.console import UserError, out, print_json, user_errors
from tilework.cli.options.common import AsJson, examples
from tilework.cli.views.workload import Shown, described, overview, plain, print_one, sentence, sizes_table, summary
from tilework.cost.table import BadCostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.cost.tabled import UnknownCost
from tilework.formats.json_lines import BadLine
from tilework.formats.trace import read_trace
from tilework.formats.workload import write_workload
from tilework.report.workload import draw_workload
from tilework.sim.workloads.family import Family
from tilework.sim.workloads.load import device_seconds
from tilework.sim.workloads.parameters import BadParameter
from tilework.sim.workloads.registry import (
    UnknownWorkload,
    family,
    make_workload,
    parameters_of,
    values_of,
    workload_names,
)

LIST_EXAMPLE = examples("tilework workload list", "tilework workload list tetriserve")
app = typer.Typer(help="Make, show and list workloads.", epilog=LIST_EXAMPLE, no_args_is_help=True)
MAKE_EXAMPLE = examples(
    "tilework workload make tetriserve --out r.jsonl --rpm 18 --scale 1.2 \\\n  --set mix=skewed",
    "tilework simulate r.jsonl --cost flux1dev_h100_eager --devices 8",
    "tilework workload make mixes --out r.jsonl --rate 2.4 \\\n  --set cost=flux1_l20 --set load=dynamic",
)
SHOW_EXAMPLE = examples(
    "tilework workload show ddit --rate 1 --png ddit.png",
    "tilework workload show r.jsonl --cost flux1_l20 --devices 8 --png r.png",
)

Rate = Annotated[float | None, typer.Option(help="Requests per second on average.")]
Rpm = Annotated[float | None, typer.Option(help="Requests per minute, instead of --rate.")]
Scale = Annotated[float | None, typer.Option(help="Multiplies all deadlines.")]
Num = Annotated[int | None, typer.Option(help="How many requests.")]
Trace = Annotated[Path | None, typer.Option(help="Take arrivals from a CSV or JSON-lines file, stretched to the rate.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the workload (workload list NAME); repeatable."),
]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """The options that change a workload; None leaves its default."""

    rate: float | None
    rpm: float | None
    scale: float | None
    num: int | None
    trace: Path | None
    set_: Sequence[str] | None

    def workload(self, name: str) -> Family:
        """Raises UserError for an option that this workload does not have, or one of a wrong value."""
        with user_errors(UnknownWorkload, BadParameter):
            known = parameters_of(family(name))
            values: dict[str, Any] = {}
            for option, parameter, value in self._options():
                if parameter not in known:
                    raise UserError(f"{name} has no {parameter}; leave out {option} (it has {', '.join(known)})")
                values[parameter] = value
            texts = self._texts()
            for parameter in values.keys() & texts.keys():
                raise UserError(f"{parameter} is set twice, by an option and by --set; leave one out")
            return make_workload(name, values | values_of(name, texts))

    def is_empty(self) -> bool:
        return not self._options() and not self.set_

    def _options(self) -> list[tuple[str, str, Any]]:
        """(option, parameter, value) of those that were given."""
        if self.rate is not None and self.rpm is not None:
            raise UserError("--rate and --rpm set the same parameter; give one of them")
        rows = [
            ("--rate", "rate_per_s", self.rate),
            ("--rpm", "rate_per_s", None if self.rpm is None else self.rpm / 60),
            ("--scale", "scale", self.scale),
            ("--num", "num_requests", self.num),
            ("--trace", "trace", self.trace),
        ]
        return [row for row in rows if row[2] is not None]

    def _texts(self) -> dict[str, str]:
        texts: dict[str, str] = {}
        for text in self.set_ or ():
            name, equals, value = text.partition("=")
            if not equals or not name:
                raise UserError(f"--set is {text!r}; write NAME=VALUE, as in mix=skewed")
            if name in texts:
                raise UserError(f"--set names {name} twice; leave one out")
            texts[name] = value
        return texts


@app.command("list", epilog=LIST_EXAMPLE)
def list_(
    name: Annotated[str | None, typer.Argument(help="Only this one, with all its parameters.")] = None,
    json: AsJson = False,
) -> None:
    """List the workloads, or what one of them is and which parameters it has."""
    with user_errors(UnknownWorkload):
        families = [family(each) for each in (workload_names() if name is None else (name,))]
    if json:
        print_json({"workloads": [described(each) for each in families]})
        return
    if name is None:
        out.print(overview(families))
    else:
        print_one(families[0])


@app.command("make", epilog=MAKE_EXAMPLE)
def make(
    name: Annotated[str, typer.Argument(help="A name of `workload list`.")],
    output: Annotated[Path, typer.Option("--out", help="JSON-lines file to write (docs/formats.md).")],
    rate: Rate = None,
    rpm: Rpm = None,
    scale: Scale = None,
    num: Num = None,
    seed: Seed = 0,
    trace: Trace = None,
    set_: Set = None,
    json: AsJson = False,
) -> None:
    """Write the requests of a workload to a file, for `simulate` and `bench --requests`.

    The workload `mixes` has the mixes of sizes that a cost table lists, of the package or your own.
    """
    workload = _Changes(rate=rate, rpm=rpm, scale=scale, num=num, trace=trace, set_=set_).workload(name)
    with user_errors(BadParameter, BadLine, OSError):
        requests = workload.requests(seed)
        write_workload(output, requests)
    if json:
        parameters = plain(workload.parameters())
        about = {"workload": name, "parameters": parameters, "seed": seed, "file": str(output)}
        print_json(
            about | {"num_requests": len(requests), "cost": workload.cost_table, "devices": workload.num_devices}
        )
        return
    out.print(f"{output}: {len(requests)} requests", soft_wrap=True)
    out.print(
        f"tilework simulate {output} --cost {workload.cost_table} --devices {workload.num_devices}",
        soft_wrap=True,
        style="dim",
    )


@app.command("show", epilog=SHOW_EXAMPLE)
def show(
    place: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="A name of `workload list`, or a file of requests.")
    ],
    png: Annotated[Path | None, typer.Option(help="Draw arrivals by size, and load, over time.")] = None,
    cost: Annotated[str | None, typer.Option(help="Cost table for the load; default the workload's own.")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices for the load; default the workload's own.")
    ] = None,
    rate: Rate = None,
    rpm: Rpm = None,
    scale: Scale = None,
    num: Num = None,
    seed: Seed = 0,
    trace: Trace = None,
    set_: Set = None,
    json: AsJson = False,
) -> None:
    """Show the requests of a workload or a file, and the load that they are for the devices.

    The load is the least device time that arrives per second, over the number of devices. At 100% the devices are
    always busy even if every request runs at its most economical degree.
    """
    changes = _Changes(rate=rate, rpm=rpm, scale=scale, num=num, trace=trace, set_=set_)
    with user_errors(BadParameter, BadLine, BadCostTable, UnknownCost, OSError):
        shown = _find(place, changes, seed, cost, devices)
        if png is not None:
            if png.suffix.lower() != ".png":
                raise UserError(f"{png} ends in {png.suffix!r}; the picture is a .png")
            draw_workload(
                png, shown.requests, device_s=shown.device_s, num_devices=shown.num_devices, title=shown.title
            )
    if json:
        print_json(summary(shown))
        return
    out.print(sizes_table(shown))
    out.print(sentence(shown), soft_wrap=True)


def _find(place: str, changes: _Changes, seed: int, cost: str | None, devices: int | None) -> Shown:
    if place in workload_names():
        workload = changes.workload(place)
        requests, title = workload.requests(seed), f"{place}, seed {seed}"
        cost, num_devices = cost or workload.cost_table, devices or workload.num_devices
    else:
        if not Path(place).exists():
            with user_errors(UnknownWorkload):
                family(place)
        if not changes.is_empty():
            raise UserError(
                f"{place} is a file, whose requests are fixed; leave out the options that change a workload"
            )
        requests = read_trace(place, *(("",) if cost is None else read_table(cost).pipelines))
        title, num_devices = Path(place).name, devices or 1
    if not requests:
        raise UserError(f"{place} holds no requests; write one per line")
    device_s = None if cost is None else device_seconds(requests, TableCosts(read_table(cost)))
    return Shown(title=title, requests=requests, device_s=device_s, cost=cost, num_devices=num_devices)
