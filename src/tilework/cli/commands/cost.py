"""`tilework cost`: the cost tables that come with the package, those measured here, and those in files."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from tilework.cli.commands import cost_memory
from tilework.cli.console import UserError, out, print_json, user_errors
from tilework.cli.measured import (
    Scaling,
    cost_table,
    in_order,
    open_profiles,
    parse_size,
    print_costs,
    row_json,
)
from tilework.cli.options.common import AsJson, ProfilesFile, examples
from tilework.core.cost_row import CostRow
from tilework.core.request import Shape
from tilework.core.time import NS_PER_S, s_from_ns
from tilework.cost.profile import Profile
from tilework.cost.profiles import Profiles, ProfilesUnavailable
from tilework.cost.shipped import shipped_names
from tilework.cost.table import BadCostTable, CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table, table_json

SHOW_EXAMPLE = examples("tilework cost show flux1dev_h100_eager", "tilework cost show --model shapes --size 160")
LIST_EXAMPLE = examples("tilework cost list")
app = typer.Typer(help="Show, export and list cost tables, and plan memory.", epilog=LIST_EXAMPLE, no_args_is_help=True)
app.command("memory", epilog=cost_memory.EXAMPLE)(cost_memory.command)
EXPORT_EXAMPLE = examples("tilework cost export shapes.json --model shapes")

_MOST_NAMES = 6

TableName = Annotated[str | None, typer.Argument(help="A name of `cost list`, or a file; default: measured here.")]
ModelName = Annotated[str | None, typer.Option(help="Model among those measured here; default: the latest.")]


@app.command("show", epilog=SHOW_EXAMPLE)
def show(
    table: TableName = None,
    model: ModelName = None,
    size: Annotated[str | None, typer.Option(help="Show the costs of this size, such as 1024x768.")] = None,
    profiles: ProfilesFile = None,
    json: AsJson = False,
) -> None:
    """Show what each stage costs by size and degree: seconds per step, or per request for a stage without steps.

    The efficiency at degree k is T(1) / (k T(k)). With --size, what was not measured is interpolated in pixels.
    """
    found = _find(table, model, profiles)
    title = f"{', '.join(sorted(found.pipelines))} on {found.hardware}"
    rows, origins = (in_order(found.rows), []) if size is None else _predict(found, parse_size(size))
    if json:
        scaling = Scaling(rows)
        known = [{"known": origin} for origin in origins] or [{}] * len(rows)
        lines = [row_json(row, scaling) | more for row, more in zip(rows, known, strict=True)]
        print_json({"hardware": found.hardware, "source": found.source, "rows": lines})
        return
    if size is None:
        print_costs(found, title)
    else:
        out.print(cost_table(rows, title, origins))
    if found.source:
        out.print(found.source, style="dim", markup=False, highlight=False)


@app.command("export", epilog=EXPORT_EXAMPLE)
def export(
    output: Annotated[Path, typer.Argument(help="JSON file to write.")],
    table: TableName = None,
    model: ModelName = None,
    profiles: ProfilesFile = None,
) -> None:
    """Write a cost table to a file, for `simulate --cost` here or elsewhere."""
    found = _find(table, model, profiles)
    text = jsonlib.dumps(table_json(replace(found, rows=tuple(in_order(found.rows)))), ensure_ascii=False, indent=1)
    with user_errors(OSError):
        output.write_text(text + "\n", encoding="utf-8")
    out.print(f"{output}: {len(found.rows)} rows", soft_wrap=True)


@app.command("list", epilog=LIST_EXAMPLE)
def list_(profiles: ProfilesFile = None, json: AsJson = False) -> None:
    """List the tables that come with the package, and what was measured on this machine."""
    shipped = {name: read_table(name) for name in shipped_names()}
    store = open_profiles(profiles)
    with user_errors(ProfilesUnavailable):
        measured = store.entries()
    if json:
        tables = [{"name": name, "hardware": table.hardware, "source": table.source} for name, table in shipped.items()]
        print_json({"shipped": tables, "file": str(store.path), "measured": [_entry(entry) for entry in measured]})
        return
    out.print(_shipped_table(shipped))
    out.print(_measured_table(measured, store) if measured else f"nothing measured yet in {store.path}", soft_wrap=True)


def _find(place: str | None, model: str | None, profiles: Path | None) -> CostTable:
    """Return the table of this name or file, else the best that was measured of a model, under its latest
    circumstances.
    """
    if place is not None:
        if model is not None:
            raise UserError("give a table or --model, not both")
        with user_errors(BadCostTable):
            return read_table(place)
    store = open_profiles(profiles)
    with user_errors(ProfilesUnavailable):
        entries = [entry for entry in store.entries() if model in (None, *_names(entry))]
        table = store.latest(entries[-1].key, entries[-1].key.name) if entries else None
    if table is None:
        what = "nothing" if model is None else f"nothing of {model!r}"
        shipped = ", ".join(shipped_names())
        raise UserError(f"{what} was measured in {store.path}; run tilework profile, or name a table: {shipped}")
    return table


def _names(entry: Profile) -> tuple[str, ...]:
    """Return the names of a profile's model: its identity with and without the digest."""
    return entry.key.model, entry.key.name


def _predict(table: CostTable, shape: Shape) -> tuple[list[CostRow], list[str]]:
    """Return what single requests of this shape cost by the table, and how each figure is known."""
    costs = TableCosts(table)
    rows = []
    origins = {}
    known = {table.graph(row.pipeline).stage(row.stage) for row in table.rows}
    pipelines = sorted(table.pipelines)
    for stage in [stage for one in pipelines for stage in table.graph(one).stages if stage in known]:
        for degree in costs.degrees(stage):
            seconds = s_from_ns(costs.run_ns(stage, (shape,), degree))
            row = CostRow(
                pipeline=stage.pipeline,
                stage=stage.name,
                height=shape.height,
                width=shape.width,
                frames=shape.frames,
                degree=degree,
                seconds=seconds,
            )
            rows.append(row)
            origins[row] = "measured" if costs.is_profiled(stage, shape, degree) else "interpolated"
    rows = in_order(rows)
    return rows, [origins[row] for row in rows]


def _entry(entry: Profile) -> dict[str, Any]:
    key = entry.key
    return {
        "model": key.model,
        "origin": entry.origin.value,
        "hardware": key.hardware,
        "dtype": key.dtype,
        "workers": key.workers,
        "threads": key.threads,
        "libraries": key.libraries,
        "tilework": entry.tilework,
        "created": f"{datetime.fromtimestamp(entry.created_unix_ns / NS_PER_S, UTC):%Y-%m-%d %H:%M}",
        "sizes": [
            str(shape)
            for shape in sorted(
                {row.shape for row in entry.rows},
                key=lambda shape: (shape.pixels, shape),
            )
        ],
        "degrees": sorted({row.degree for row in entry.rows}),
    }


def _shipped_table(tables: dict[str, CostTable]) -> Table:
    table = Table(title="come with tilework", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("name", "pipeline", "hardware"):
        table.add_column(heading, overflow="fold")
    for name, one in tables.items():
        table.add_row(name, _few(sorted({row.pipeline for row in one.rows})), one.hardware)
    return table


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def _measured_table(entries: tuple[Profile, ...], store: Profiles) -> Table:
    table = Table(title=f"measured here, in {store.path}", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("model", "sizes", "at (UTC)"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "model")
    for entry in map(_entry, entries):
        sizes = entry["sizes"]
        degrees = ", ".join(map(str, entry["degrees"]))
        span = sizes[0] if len(sizes) == 1 else f"{len(sizes)}: {sizes[0]} to {sizes[-1]}"
        place = f"{entry['workers']} x {entry['hardware']}, {entry['dtype']}, {entry['origin']}"
        table.add_row(f"{entry['model']}\n{place}", f"{span}\ndegrees {degrees}", entry["created"][:10])
    return table
