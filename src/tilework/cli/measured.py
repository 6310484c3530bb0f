"""Shapes, the profile database and the table of costs, for the commands about costs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from tilework.cli.console import UserError, out
from tilework.client import mix
from tilework.core.cost_row import CostRow
from tilework.core.request import Shape
from tilework.cost.profiles import Profiles
from tilework.cost.table import CostTable
from tilework.ownership.cache import cache_directory
from tilework.ownership.own import NotOwn, make_own_folder
from tilework.report.tables import percentile


def open_profiles(path: Path | None) -> Profiles:
    """Return the database at `path`, else at tilework/costs.sqlite in $XDG_CACHE_HOME, which is ~/.cache if not set."""
    if path is not None:
        return Profiles(path)
    return Profiles(cache_directory() / "costs.sqlite")


def keep_compiled() -> None:
    """Let torch keep what it compiles in the user's cache, for this process and those that it starts from now on.

    Raises UserError if other users could put something there.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        try:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(make_own_folder(cache_directory() / "compiled"))
        except (NotOwn, OSError) as error:
            raise UserError(f"what torch compiles is run again from its cache: {error}") from error


def parse_size(text: str) -> Shape:
    """Parse WIDTHxHEIGHT, WIDTHxHEIGHTxFRAMES, or SIDE for a square. Raises UserError."""
    try:
        return mix.parse_size(text)
    except ValueError as error:
        raise UserError(str(error)) from None


_UNKNOWN = "-"


class Scaling:
    """Speed-up of groups and batches over one device that makes outputs one by one, by rows of one table."""

    def __init__(self, rows: Sequence[CostRow]) -> None:
        self._alone_s = {
            (*_stage(row), row.shape): row.seconds for row in rows if row.degree == row.batch == 1 and not row.cache
        }

    def speedup(self, row: CostRow) -> float | None:
        """Return T(1) / T(k), for a batch the sum of its members' T(1); None if one was not measured alone."""
        alone_s = [self._alone_s.get((*_stage(row), shape)) for shape in row.shapes]
        known_s = [seconds for seconds in alone_s if seconds is not None]
        return sum(known_s) / row.seconds if len(known_s) == len(alone_s) else None

    def efficiency(self, row: CostRow) -> float | None:
        """Return T(1) / (k T(k)): the share of the group's time that one device would have needed."""
        speedup = self.speedup(row)
        return None if speedup is None else speedup / row.degree


def in_order(rows: Sequence[CostRow]) -> list[CostRow]:
    """Sort rows by pipeline, stage (in the order in which they first come), size, batch and degree."""
    places = {stage: place for place, stage in enumerate(dict.fromkeys(map(_stage, rows)))}

    def order(row: CostRow) -> tuple[object, ...]:
        size = (row.shape.pixels, row.shape)
        cache = str(row.cache or "")
        return row.pipeline, places[_stage(row)], size, len(row.shapes), row.shapes, row.degree, cache

    return sorted(rows, key=order)


def batch_json(row: CostRow) -> int | list[str]:
    """Return the batch of a row as a cost table's file has it."""
    return row.batch if isinstance(row.batch, int) else [str(shape) for shape in row.batch]


def cost_table(rows: Sequence[CostRow], title: str, origins: Sequence[str] = ()) -> Table:
    """Return one line per row, in order; `origins`, one word per row, says how each is known. Fits 80 columns.

    Stages are named with their pipeline if there are several; an empty column is left out.
    """
    scaling = Scaling(rows)
    several = len({row.pipeline for row in rows}) > 1
    lines = [_cells(row, scaling, several) for row in rows]
    if origins:
        lines = [line | {"known": origin} for line, origin in zip(lines, origins, strict=True)]
    shown = [heading for heading in lines[0] if {line[heading] for line in lines} != {_UNKNOWN}]
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in shown:
        table.add_column(heading, justify="left" if heading in ("stage", "size", "known") else "right", no_wrap=True)
    for index, (row, line) in enumerate(zip(rows, lines, strict=True)):
        is_last = all(_stage(after) != _stage(row) for after in rows[index + 1 : index + 2])
        table.add_row(*(line[heading] for heading in shown), end_section=is_last)
    return table


def print_costs(table: CostTable, title: str) -> None:
    """Print all rows, a summary of the mixed batches, which are many, and the errors of the batch models."""
    rows = in_order(table.rows)
    shown = [row for row in rows if isinstance(row.batch, int)]
    if shown:
        out.print(cost_table(shown, title))
    if len(shown) < len(rows):
        scaling = Scaling(rows)
        mixed = [scaling.speedup(row) for row in rows if not isinstance(row.batch, int)]
        gains = [gain for gain in mixed if gain is not None]
        summary = ""
        if gains:
            low, high = percentile(gains, 10), percentile(gains, 90)
            summary = f": one by one / together is {median(gains):.2f}, and {low:.2f} to {high:.2f} in 80%"
        out.print(f"{len(mixed)} mixed batches{summary} (--json lists them)", soft_wrap=True)
    for batch_model in table.batch_models.values():
        error = f"a mean error of {batch_model.error:.1%} on batches that it has not seen"
        out.print(f"the batch model learned from {batch_model.num_rows} batches has {error}", soft_wrap=True)


def row_json(row: CostRow, scaling: Scaling) -> dict[str, Any]:
    """Return a row with its speed-up and efficiency, for --json."""
    return {
        "pipeline": row.pipeline,
        "stage": row.stage,
        "size": str(row.shape),
        "degree": row.degree,
        "batch": batch_json(row),
        "link": row.link,
        "seconds": row.seconds,
        "p99_seconds": row.p99_seconds,
        "num_runs": row.num_runs,
        "peak_bytes": row.peak_bytes,
        "activation_bytes": row.activation_bytes,
        "state_bytes": row.state_bytes,
        "cache": None if row.cache is None else str(row.cache),
        "skipped": row.skipped,
        "skipped_std": row.skipped_std,
        "speedup": scaling.speedup(row),
        "efficiency": scaling.efficiency(row),
    }


def _cells(row: CostRow, scaling: Scaling, with_pipeline: bool) -> dict[str, str]:
    speedup, efficiency = scaling.speedup(row), scaling.efficiency(row)
    return {
        "stage": f"{row.pipeline}/{row.stage}" if with_pipeline else row.stage,
        "size": _sizes(row),
        "degree": str(row.degree),
        "cache": _UNKNOWN if row.cache is None else str(row.cache),
        "skipped": _UNKNOWN if row.cache is None else f"{row.skipped:.0%}",
        "median ms": _ms(row.seconds),
        "p99 ms": _UNKNOWN if row.p99_seconds is None else _ms(row.p99_seconds),
        "speed-up": _UNKNOWN if speedup is None else f"{speedup:.2f}",
        "efficiency": _UNKNOWN if efficiency is None else f"{efficiency:.2f}",
        "peak GiB": _UNKNOWN if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}",
    }


def _sizes(row: CostRow) -> str:
    counts = Counter(row.shapes)
    return " + ".join(str(shape) if count == 1 else f"{count} of {shape}" for shape, count in counts.items())


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _stage(row: CostRow) -> tuple[str, str]:
    return row.pipeline, row.stage
