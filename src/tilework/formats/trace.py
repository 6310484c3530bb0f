"""Requests read from a workload file or a CSV file, and stretched to another rate."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilework.formats.json_lines import BadLine
from tilework.formats.workload import WorkloadRequest, read_workload

# Names that columns may have; the second names are those of the public Hetu-DiT traces.
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
    "pipeline": "pipeline",
}
REQUIRED = ("arrival_s", "height", "width", "steps")


def read_requests(path: Path | str, *pipelines: str) -> tuple[WorkloadRequest, ...]:
    """Read a JSON-lines workload, or a CSV file (by its name) with the columns COLUMNS; requests in order of lines.

    A row of a CSV file that names no pipeline is for the only one of `pipelines`; `id` is filled in.

    Raises:
        BadLine: a line does not follow the format.
        OSError: the file cannot be read.
    """
    if not is_csv(path):
        return read_workload(path)
    try:
        return tuple(_read_csv(Path(path), pipelines))
    except UnicodeDecodeError:
        raise BadLine(str(path), 1, "", "the file", "it is not UTF-8; save it as UTF-8") from None


def read_trace(path: Path | str, *pipelines: str) -> tuple[WorkloadRequest, ...]:
    """Read requests as `read_requests` does, but in order of arrival."""
    return tuple(sorted(read_requests(path, *pipelines), key=lambda request: request.arrival_s))


def is_csv(path: Path | str) -> bool:
    """Return whether this is a CSV file, by its name."""
    return str(path).lower().endswith(".csv")


def paced(requests: Sequence[WorkloadRequest], rate_per_s: float) -> tuple[WorkloadRequest, ...]:
    """Return the requests from 0 on, their gaps scaled alike so that the mean rate is `rate_per_s`.

    Raises:
        ValueError: fewer than two requests, or all at the same time: no rate to change.
    """
    first, last = requests[0].arrival_s, requests[-1].arrival_s
    if last <= first:
        raise ValueError(f"the trace's {len(requests)} requests all arrive at {first:g} s; leave out the rate")
    scale = (len(requests) - 1) / (last - first) / rate_per_s
    return tuple(replace(request, arrival_s=(request.arrival_s - first) * scale) for request in requests)


def _read_csv(path: Path, pipelines: Sequence[str]) -> Iterator[WorkloadRequest]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        try:
            _check_columns(path, rows.fieldnames or ())
            for index, row in enumerate(rows):
                yield _row(str(path), rows.line_num, index, row, pipelines)
        except csv.Error as error:
            raise BadLine(str(path), rows.line_num + 1, "", "the line", f"it is no CSV ({error})") from None


def _check_columns(path: Path, names: Sequence[str]) -> None:
    for name in names:
        if name not in COLUMNS:
            raise BadLine(str(path), 1, name, "a column", f"use columns of {', '.join(COLUMNS)}")
    missing = [name for name in REQUIRED if name not in {COLUMNS[given] for given in names}]
    if missing:
        raise BadLine(str(path), 1, missing[0], "missing", f"the first line must name {', '.join(REQUIRED)}")


def _row(
    source: str, line: int, index: int, row: Mapping[str | None, Any], pipelines: Sequence[str]
) -> WorkloadRequest:
    if more := row.get(None):
        raise BadLine(source, line, more[0], "beyond the last column", 'put a text with commas in quotes: "a cat, red"')
    values: dict[str, str] = {COLUMNS[name]: text for name, text in row.items() if name is not None and text}

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

    pipeline = values.get("pipeline", pipelines[0] if len(pipelines) == 1 else None)
    if pipeline is None:
        remedy = f"add the column pipeline, with one of {', '.join(pipelines)}"
        raise BadLine(source, line, "pipeline", "missing", remedy)
    return WorkloadRequest(
        arrival_s=number("arrival_s"),
        pipeline=pipeline,
        id=index,
        height=int(number("height")),
        width=int(number("width")),
        frames=int(number("frames", "1")),
        steps=int(number("steps")),
        slo_s=number("slo_s") if "slo_s" in values else None,
        prompt=values.get("prompt"),
    )
