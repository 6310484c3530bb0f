"""`tilework bound`: computes how many requests of a workload could be on time at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from tilework.cli.console import UserError, out, print_json, user_errors
from tilework.cli.options.common import AsJson, examples
from tilework.core.request import Request, Shape
from tilework.cost.table import BadCostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.cost.tabled import UnknownCost
from tilework.formats.json_lines import BadLine
from tilework.formats.trace import read_requests
from tilework.report.tables import counted_devices
from tilework.sim.workloads.requests import to_requests
from tilework_lab.optimum.bound import Bound, on_time_bound

EXAMPLE = examples(
    "tilework bound --requests requests.jsonl \\\n  --cost flux1dev_h100_eager --devices 8",
)
BATCHES = "This table has batches: a policy that forms them may have more requests on time than the bound says."


@dataclass(frozen=True, slots=True, kw_only=True)
class _SizeLine:
    """The bound for one size: requests with a deadline, those that cannot meet it even alone, and those on time."""

    size: Shape
    due: int
    unreachable: int
    on_time: float


def command(
    requests: Annotated[Path, typer.Option(help="Requests as JSON lines or CSV (docs/formats.md).")],
    cost: Annotated[str, typer.Option(help="Cost table: a JSON file (docs/formats.md), or a name of `cost list`.")],
    devices: Annotated[int, typer.Option(min=1, help="Number of devices.")] = 1,
    json: AsJson = False,
) -> None:
    """Compute how many requests could be on time at most, for a scheduler that knows the whole workload beforehand.

    No policy can do better on these devices at these costs, unless it forms batches; it may be that none can do as
    well. See lab/docs/yardsticks.md.
    """
    with user_errors(BadLine, BadCostTable, UnknownCost, OSError):
        table = read_table(cost)
        asked = to_requests(read_requests(requests, *table.pipelines))
        due = [one for one in asked if one.deadline_ns is not None]
        if not due:
            raise UserError(f"{requests} holds no request with a deadline; add slo_s to its lines (docs/formats.md)")
        if len({one.uid for one in due}) < len(due):
            raise UserError(f"{requests}: an id occurs once as text and once as a number; use other names")
        bound = on_time_bound(due, TableCosts(table), num_devices=devices, devices_per_node=table.devices_per_node)
    lines = _by_size(due, bound)
    if json:
        print_json(_document(due, bound, lines, devices))
        return
    most = int(bound.value)
    share = bound.value / len(due)
    out.print(f"{len(due)} requests with a deadline on {counted_devices(devices)}: at most {most} on time, {share:.1%}")
    out.print(_table(lines))
    if table.has_batches:
        out.print(BATCHES)


def _by_size(due: Sequence[Request], bound: Bound) -> list[_SizeLine]:
    found = []
    for size in sorted({one.shape for one in due}, key=lambda shape: (shape.pixels, shape)):
        uids = [one.uid for one in due if one.shape == size]
        unreachable = sum(uid in bound.unreachable for uid in uids)
        on_time = sum(bound.shares[uid] for uid in uids)
        found.append(_SizeLine(size=size, due=len(uids), unreachable=unreachable, on_time=on_time))
    return found


def _table(lines: Sequence[_SizeLine]) -> Table:
    title = "by size, in one way to reach the bound"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("size")
    for heading in ("due", "impossible alone", "on time", "lost"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        counts = (f"{line.due}", f"{line.unreachable}", f"{line.on_time:.1f}", f"{line.due - line.on_time:.1f}")
        table.add_row(str(line.size), *counts)
    return table


def _document(due: Sequence[Request], bound: Bound, lines: Sequence[_SizeLine], devices: int) -> dict[str, Any]:
    return {
        "devices": devices,
        "num_due": len(due),
        "most_on_time": int(bound.value),
        "share": bound.value / len(due),
        "num_unreachable": len(bound.unreachable),
        "by_size": [
            {"size": str(line.size), "due": line.due, "unreachable": line.unreachable, "on_time": line.on_time}
            for line in lines
        ],
    }
