"""Two results of `tilework bench` side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

# Figures to compare, by their paths in a result; and those that each size shows.
FIGURES = (
    ("attainment", "attained"),
    ("latency_s.mean", "mean s"),
    ("latency_s.p50", "p50 s"),
    ("latency_s.p95", "p95 s"),
    ("latency_s.p99", "p99 s"),
    ("throughput_per_s", "images/s"),
    ("goodput_per_s", "good/s"),
    ("megapixels_per_s", "megapixels/s"),
)
BY_SIZE = FIGURES[:4]
IGNORED = ("url",)


class BadResult(ValueError):
    """A file is no result of `tilework bench`; the message names it and the remedy."""


def read_result(path: Path | str) -> dict[str, Any]:
    """Return the document of a `result.json`.

    Raises:
        BadResult: it is not one.
        OSError: the file cannot be read.
    """
    try:
        document = json.loads(Path(path).read_text("utf-8"))
        if isinstance(document["config"], dict) and isinstance(document["result"]["by_size"], dict):
            return dict(document)
    except (ValueError, LookupError, TypeError):
        pass
    raise BadResult(f"{path} is no result of tilework bench; give the result.json of a --out directory")


def comparison(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one entry per figure, all sizes first: {"size", "figure", "a", "b", "ratio"}, ratio = b / a.

    A figure that either side lacks is None, and so is a ratio to 0. Sizes of one side only are shown too.
    """
    a, b = first["result"], second["result"]
    entries = [_entry("all", name, path, a, b) for path, name in FIGURES]
    for size in dict.fromkeys([*a["by_size"], *b["by_size"]]):
        members = (a["by_size"].get(size, {}), b["by_size"].get(size, {}))
        entries += [_entry(size, name, path, *members) for path, name in BY_SIZE]
    return entries


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the options in which the two runs differ, but for the address: what the ratios may be due to."""
    a, b = first["config"], second["config"]
    names = [name for name in dict.fromkeys([*a, *b]) if name not in IGNORED]
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def comparison_table(entries: list[dict[str, Any]], names: tuple[str, str]) -> Table:
    """Return one row per figure; A and B are `names`."""
    table = Table(
        box=box.SIMPLE_HEAD, caption=f"A: {names[0]}\nB: {names[1]}", caption_justify="left", title_justify="left"
    )
    for heading in ("size", "figure"):
        table.add_column(heading)
    for heading in ("A", "B", "B / A"):
        table.add_column(heading, justify="right")
    size = "all"
    for entry in entries:
        if entry["size"] != size:
            table.add_section()
        shown = "" if entry["size"] == size and entry is not entries[0] else entry["size"]
        size = entry["size"]
        table.add_row(shown, entry["figure"], *(_cell(entry, key) for key in ("a", "b")), _ratio(entry["ratio"]))
    return table


def _entry(size: str, name: str, path: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    left, right = _at(path, a), _at(path, b)
    ratio = right / left if left and right is not None else None
    return {"size": size, "figure": name, "a": left, "b": right, "ratio": ratio}


def _at(path: str, values: Mapping[str, Any]) -> float | None:
    found: Any = values
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return float(found) if isinstance(found, int | float) else None


def _cell(entry: Mapping[str, Any], key: str) -> str:
    value = entry[key]
    if value is None:
        return "-"
    return f"{value:.1%}" if entry["figure"] == "attained" else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
