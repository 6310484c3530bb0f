"""What `tilework workload` prints: workloads with their parameters, and what requests ask for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from tilework.cli.console import out
from tilework.formats.workload import WorkloadRequest
from tilework.report.words import counted_devices
from tilework.sim.workloads.family import Family, RatedFamily
from tilework.sim.workloads.registry import parameters_of


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
        """None without a cost table, and if all arrive at once."""
        return sum(self.device_s) / self.span_s / self.num_devices if self.device_s and self.span_s > 0 else None


def described(workload: type[Family]) -> dict[str, Any]:
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


def overview(workloads: Sequence[type[Family]]) -> Table:
    """One row per workload; fits 80 columns. `print_one` shows costs, devices and rates."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("name", "what it is", "source"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for each in workloads:
        table.add_row(each.name, each.about, each.source)
    return table


def print_one(workload: type[Family]) -> None:
    out.print(f"{workload.name}: {workload.about} ({workload.source})", markup=False, highlight=False)
    for paragraph in _paragraphs(workload):
        out.print(paragraph, markup=False, highlight=False, style="dim")
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("parameter", "default", "what it is"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "parameter")
    for name, one in parameters_of(workload).items():
        choices = one.metadata["choices"]
        about = f"{one.metadata['about']} One of {', '.join(choices)}." if choices else one.metadata["about"]
        table.add_row(name, "-" if one.default is None else str(plain(one.default)), about)
    out.print(table)
    out.print(f"for --cost {workload.table} --devices {workload.num_devices}")


def _paragraphs(workload: type[Family]) -> list[str]:
    """The paragraphs that describe a workload: its own, then those of the workload that it derives from."""
    families = [each for each in workload.__mro__ if issubclass(each, Family) and each not in (Family, RatedFamily)]
    texts = [inspect.cleandoc(each.__doc__ or "") for each in families]
    return [" ".join(paragraph.split()) for text in texts for paragraph in text.split("\n\n")]


def _sizes(shown: Shown) -> list[dict[str, Any]]:
    """One row per pipeline, size and number of steps, smallest first."""
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
    """Paths as text."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return str(value) if isinstance(value, Path) else value
