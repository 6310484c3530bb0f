"""`tilework workload`: lists, makes and shows workloads."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from tilework.cli.console import UserError, console, out, print_json, user_errors
from tilework.cli.options.common import AsJson, examples
from tilework.cost.table import BadCostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.cost.tabled import UnknownCost
from tilework.formats.json_lines import BadLine
from tilework.formats.trace import read_trace
from tilework.formats.workload import WorkloadRequest, write_workload
from tilework.report.tables import counted_devices
from tilework.report.workload import draw_workload
from tilework.sim.workloads.family import BadParameter, RatedFamily, WorkloadFamily
from tilework.sim.workloads.registry import (
    UnknownWorkload,
    family,
    make_workload,
    parameters_of,
    values_of,
    workload_names,
)
from tilework.sim.workloads.requests import device_seconds

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
Scale = Annotated[float | None, typer.Option(help="Factor for all deadlines.")]
Num = Annotated[int | None, typer.Option(help="Number of requests.")]
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

    def workload(self, name: str) -> WorkloadFamily:
        """Make the workload. Raises UserError for an option that it does not have, or one of a wrong value."""
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
        """Return (option, parameter, value) of the options that are given."""
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
    name: Annotated[str | None, typer.Argument(help="Show only this one, with all its parameters.")] = None,
    json: AsJson = False,
) -> None:
    """List the workloads, or what one of them is and which parameters it has."""
    families = _all() if name is None else [_named(name)]
    if json:
        print_json({"workloads": [described(each) for each in families]})
        return
    if name is None:
        out.print(overview(families))
    else:
        print_one(families[0])


def _all() -> list[type[WorkloadFamily]]:
    """Return all workloads that can be used; those that cannot are named on stderr."""
    found = []
    for name in workload_names():
        try:
            found.append(family(name))
        except UnknownWorkload as error:
            console.print(str(error), markup=False, highlight=False, soft_wrap=True)
    return found


def _named(name: str) -> type[WorkloadFamily]:
    with user_errors(UnknownWorkload):
        return family(name)


@app.command("make", epilog=MAKE_EXAMPLE)
def make(
    name: Annotated[str, typer.Argument(help="A name of `workload list`, or module:Class.")],
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
        str, typer.Argument(metavar="NAME|FILE", help="A name of `workload list`, module:Class, or a file of requests.")
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
                raise UserError(f"{png} ends in {png.suffix!r}; the chart is a .png")
            draw_workload(
                png, shown.requests, device_s=shown.device_s, num_devices=shown.num_devices, title=shown.title
            )
    if json:
        print_json(summary(shown))
        return
    out.print(sizes_table(shown))
    out.print(sentence(shown), soft_wrap=True)


def _find(place: str, changes: _Changes, seed: int, cost: str | None, devices: int | None) -> Shown:
    if place in workload_names() or (":" in place and not Path(place).exists()):
        workload = changes.workload(place)
        requests = workload.requests(seed)
        title = f"{place}, seed {seed}"
        cost = cost or workload.cost_table
        num_devices = devices or workload.num_devices
    else:
        if not Path(place).exists():
            with user_errors(UnknownWorkload):
                family(place)
        if not changes.is_empty():
            raise UserError(
                f"{place} is a file, whose requests are fixed; leave out the options that change a workload"
            )
        requests = read_trace(place, *(("",) if cost is None else read_table(cost).pipelines))
        title = Path(place).name
        num_devices = devices or 1
    if not requests:
        raise UserError(f"{place} holds no requests; write one per line")
    device_s = None if cost is None else device_seconds(requests, TableCosts(read_table(cost)))
    return Shown(title=title, requests=requests, device_s=device_s, cost=cost, num_devices=num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Requests and their devices: `device_s` is the least device time of each request, None without a cost table."""

    title: str
    requests: tuple[WorkloadRequest, ...]
    device_s: list[float] | None
    cost: str | None
    num_devices: int

    @property
    def span_s(self) -> float:
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def rate_per_s(self) -> float | None:
        return (len(self.requests) - 1) / self.span_s if self.span_s > 0 else None

    @property
    def load(self) -> float | None:
        """Load of the devices; None without a cost table, and if all requests arrive at once."""
        return sum(self.device_s) / self.span_s / self.num_devices if self.device_s and self.span_s > 0 else None


def described(workload: type[WorkloadFamily]) -> dict[str, Any]:
    return {
        "name": workload.name,
        "about": workload.about,
        "source": workload.source,
        "cost": workload.table,
        "devices": workload.num_devices,
        "parameters": {
            name: {"default": one.default, "about": one.metadata["about"]}
            | ({"choices": list(one.metadata["choices"])} if one.metadata["choices"] else {})
            for name, one in parameters_of(workload).items()
        },
    }


def overview(workloads: Sequence[type[WorkloadFamily]]) -> Table:
    """Return one row per workload; fits 80 columns. `print_one` shows costs, devices and rates."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("name", "about", "source"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for each in workloads:
        table.add_row(each.name, each.about, each.source)
    return table


def print_one(workload: type[WorkloadFamily]) -> None:
    out.print(f"{workload.name}: {workload.about} ({workload.source})", markup=False, highlight=False)
    for paragraph in _paragraphs(workload):
        out.print(paragraph, markup=False, highlight=False, style="dim")
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("parameter", "default", "about"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "parameter")
    for name, one in parameters_of(workload).items():
        choices = one.metadata["choices"]
        about = f"{one.metadata['about']} One of {', '.join(choices)}." if choices else one.metadata["about"]
        table.add_row(name, "-" if one.default is None else str(plain(one.default)), about)
    out.print(table)
    out.print(f"for --cost {workload.table} --devices {workload.num_devices}")


def _paragraphs(workload: type[WorkloadFamily]) -> list[str]:
    """Return the paragraphs that describe a workload: its own, then those of the workload that it derives from."""
    bases = {WorkloadFamily, RatedFamily}
    families = [each for each in workload.__mro__ if issubclass(each, WorkloadFamily) and each not in bases]
    texts = [inspect.cleandoc(each.__doc__ or "") for each in families]
    return [" ".join(paragraph.split()) for text in texts for paragraph in text.split("\n\n")]


def _sizes(shown: Shown) -> list[dict[str, Any]]:
    """Return one row per pipeline, size and number of steps, smallest first."""
    places: dict[tuple[str, int, Any, int], list[int]] = {}
    for place, one in enumerate(shown.requests):
        places.setdefault((one.pipeline, one.shape.pixels, one.shape, one.steps), []).append(place)
    rows = []
    for (pipeline, _, shape, steps), members in sorted(places.items()):
        slos_s = [slo_s for member in members if (slo_s := shown.requests[member].slo_s) is not None]
        row = {"pipeline": pipeline, "size": str(shape), "steps": steps, "num_requests": len(members)}
        row |= {"share": len(members) / len(shown.requests), "num_deadlines": len(slos_s)}
        row |= {"shortest_slo_s": min(slos_s, default=None), "longest_slo_s": max(slos_s, default=None)}
        if shown.device_s is not None:
            total_s = sum(shown.device_s[member] for member in members)
            row |= {"device_s": total_s / len(members), "share_of_load": total_s / sum(shown.device_s)}
        rows.append(row)
    return rows


def summary(shown: Shown) -> dict[str, Any]:
    return {
        "title": shown.title,
        "num_requests": len(shown.requests),
        "span_s": shown.span_s,
        "rate_per_s": shown.rate_per_s,
        "cost": shown.cost,
        "devices": shown.num_devices,
        "load": shown.load,
        "sizes": _sizes(shown),
    }


def sizes_table(shown: Shown) -> Table:
    table = Table(title=shown.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    headings = ["pipeline", "size", "steps", "requests", "share", "deadline s"]
    headings += ["device s", "of load"] if shown.device_s is not None else []
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "pipeline" else "right", overflow="fold")
    for row in _sizes(shown):
        cells = [row["pipeline"], row["size"], str(row["steps"]), str(row["num_requests"]), f"{row['share']:.0%}"]
        cells.append(_deadlines(row))
        if shown.device_s is not None:
            cells += [f"{row['device_s']:.3g}", f"{row['share_of_load']:.0%}"]
        table.add_row(*cells)
    return table


def _deadlines(row: dict[str, Any]) -> str:
    if not row["num_deadlines"]:
        return "none"
    shortest, longest = f"{row['shortest_slo_s']:.4g}", f"{row['longest_slo_s']:.4g}"
    span = shortest if shortest == longest else f"{shortest} to {longest}"
    missing = row["num_requests"] - row["num_deadlines"]
    return f"{span}; {missing} none" if missing else span


def sentence(shown: Shown) -> str:
    text = f"{len(shown.requests)} requests in {shown.span_s:.4g} s"
    text += "" if shown.rate_per_s is None else f", {shown.rate_per_s:.3g} per second"
    if shown.device_s is None:
        return f"{text}; give --cost and --devices for the load"
    if shown.load is None:
        return f"{text}: {sum(shown.device_s):.4g} device seconds ({shown.cost})"
    return f"{text}: a load of {shown.load:.0%} on {counted_devices(shown.num_devices)} ({shown.cost})"


def plain(value: Any) -> Any:
    """Return the value with paths as text."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return str(value) if isinstance(value, Path) else value
