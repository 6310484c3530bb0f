"""Arrival traces: requests read from a workload file or a CSV file, and stretched to another rate."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tilework.formats.json_lines import BadLine
from tilework.formats.workload import WorkloadRequest, read_workload

# What each column may be called; the second names are those of the public Hetu-DiT traces.
COLUMNS = {
    "arrival_s": "arrival_s",
    "height": "height",
    "width": "width",
    "frames": "frames",
    "num_frames": "frames",
    "steps": "steps",
    "num_inference_steps": "steps",
    "slo_s": "slo_s",
    "prompt": "prompt",
}
REQUIRED = ("arrival_s", "height", "width", "steps")


def read_trace(path: Path | str, pipeline: str) -> tuple[WorkloadRequest, ...]:
    """Requests of a JSON-lines workload, or of a CSV file (by its name) with the columns COLUMNS, in order of arrival.

    CSV knows no pipelines, so these requests get `pipeline`.

    Raises:
        BadLine: a line is not as the format asks.
        OSError: the file cannot be read.
    """
    requests = _read_csv(Path(path), pipeline) if str(path).lower().endswith(".csv") else read_workload(path)
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


def paced(requests: Sequence[WorkloadRequest], rate_per_s: float) -> tuple[WorkloadRequest, ...]:
    """The same requests from 0 on, their gaps stretched alike so that they come at `rate_per_s` on average.

    Raises:
        ValueError: fewer than two requests, or all at once: no rate to change.
    """
    first, last = requests[0].arrival_s, requests[-1].arrival_s
    if last <= first:
        raise ValueError(f"the trace's {len(requests)} requests all arrive at {first:g} s; leave out the rate")
    scale = (len(requests) - 1) / (last - first) / rate_per_s
    return tuple(replace(request, arrival_s=(request.arrival_s - first) * scale) for request in requests)


def _read_csv(path: Path, pipeline: str) -> list[WorkloadRequest]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        _check_columns(path, rows.fieldnames or ())
        return [_row(str(path), rows.line_num, row, pipeline) for row in rows]


def _check_columns(path: Path, names: Sequence[str]) -> None:
    for name in names:
        if name not in COLUMNS:
            raise BadLine(str(path), 1, name, "a column", f"use columns of {', '.join(COLUMNS)}")
    missing = [name for name in REQUIRED if name not in {COLUMNS[given] for given in names}]
    if missing:
        raise BadLine(str(path), 1, missing[0], "missing", f"the first line must name {', '.join(REQUIRED)}")


def _row(source: str, line: int, row: Mapping[str, str], pipeline: str) -> WorkloadRequest:
    values = {COLUMNS[name]: text for name, text in row.items() if name in COLUMNS and text}

    def number(name: str, default: str = "") -> float:
        text = values.get(name, default)
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        least = 0.0 if name == "arrival_s" else 1e-9 if name == "slo_s" else 1.0
        if not least <= value <= 1e300 or (least == 1.0 and value != int(value)):
            raise BadLine(
                source, line, name, text, "use a number; sizes, frames and steps are whole ones of at least 1"
            )
        return value

    return WorkloadRequest(
        arrival_s=number("arrival_s"),
        pipeline=pipeline,
        height=int(number("height")),
        width=int(number("width")),
        frames=int(number("frames", "1")),
        steps=int(number("steps")),
        slo_s=number("slo_s") if "slo_s" in values else None,
        prompt=values.get("prompt"),
    )
