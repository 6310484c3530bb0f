"""Cost tables: measured durations by shape, interpolated between shapes and corrected by what is observed."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tilework.core.request import Shape
from tilework.core.time import NS_PER_S
from tilework.core.wire import CostRow
from tilework.core.work import Group, StageId


class BadCostTable(ValueError):
    """A cost table that cannot be used; the message names the file, the row, the field and the remedy."""


class UnknownCost(LookupError):
    """No row says what this pipeline costs, not even for another shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """What was measured on one kind of hardware; the file format of design section 10."""

    hardware: str
    rows: tuple[CostRow, ...]
    gpus_per_node: int = 8

    def to_json(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware,
            "gpus_per_node": self.gpus_per_node,
            "rows": [asdict(row) for row in self.rows],
        }


_ROW_FIELDS = {field.name for field in fields(CostRow)}
_TEXTS = ("pipeline", "stage", "link")
_COUNTS = ("height", "width", "frames", "degree", "batch")


def read_table(path: Path) -> CostTable:
    """Read a cost table file.

    Raises:
        BadCostTable: what is wrong, where, and what would be right.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadCostTable(f"{path}: {error}; expected a JSON cost table with hardware and rows") from error
    try:
        return parse_table(document)
    except BadCostTable as error:
        raise BadCostTable(f"{path}: {error}") from error


def parse_table(document: object) -> CostTable:
    """Check and convert the decoded JSON of a cost table. Other keys (source, notes) are allowed and ignored."""
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list) or not document["rows"]:
        raise BadCostTable('expected an object with a non-empty list "rows"')
    gpus_per_node = document.get("gpus_per_node", 8)
    if type(gpus_per_node) is not int or gpus_per_node < 1:
        raise BadCostTable(f"gpus_per_node is {gpus_per_node!r}; expected a whole number of at least 1")
    return CostTable(
        hardware=str(document.get("hardware", "unknown")),
        gpus_per_node=gpus_per_node,
        rows=tuple(_parse_row(index, row) for index, row in enumerate(document["rows"])),
    )


def _parse_row(index: int, row: object) -> CostRow:
    if not isinstance(row, dict):
        raise BadCostTable(f"rows[{index}] is {row!r}; expected an object")
    missing = {"pipeline", "stage", "height", "width", "seconds"} - row.keys()
    if missing:
        raise BadCostTable(f"rows[{index}] lacks {', '.join(sorted(missing))}")
    for name in _TEXTS:
        if not isinstance(row.get(name, "none"), str) or not row.get(name, "none"):
            raise BadCostTable(f"rows[{index}].{name} is {row[name]!r}; expected text that is not empty")
    for name in _COUNTS:
        if type(row.get(name, 1)) is not int or row.get(name, 1) < 1:
            raise BadCostTable(f"rows[{index}].{name} is {row[name]!r}; expected a whole number of at least 1")
    seconds = row["seconds"]
    if type(seconds) not in (int, float) or not 0 < seconds < 1e6:
        raise BadCostTable(f"rows[{index}].seconds is {seconds!r}; expected seconds above 0")
    peak_bytes = row.get("peak_bytes")
    if peak_bytes is not None and (type(peak_bytes) is not int or peak_bytes < 0):
        raise BadCostTable(f"rows[{index}].peak_bytes is {peak_bytes!r}; expected a whole number of bytes, or null")
    return CostRow(**{key: value for key, value in row.items() if key in _ROW_FIELDS})


class TableCosts:
    """The CostModel of a table: exact at profiled shapes, linear in pixels between them, corrected online.

    Beyond the profiled range the nearest two points are extended, never below half the nearest value; a single point
    is scaled in proportion to pixels. A stage that no row mentions costs nothing (design section 10); a pipeline that
    no row mentions, or a stage at a degree at which it was not profiled, raises UnknownCost.

    The correction is an exponentially weighted mean of measured over predicted time, per stage, shape, degree and
    batch, each measurement weighing `weight`. It stays within [1/4, 4], so that one outlier cannot close the door.
    """

    def __init__(self, table: CostTable, *, move_ns: int = 2_000_000, weight: float = 0.1) -> None:
        self.table = table
        self.version = 0
        self._move_ns = move_ns
        self._weight = weight
        self._points = _points(table.rows)
        self._pipelines = {row.pipeline for row in table.rows}
        self._corrections: dict[tuple[StageId, int, int, int], float] = {}
        self._cache: dict[tuple[StageId, tuple[Shape, ...], int], int] = {}

    def run_ns(self, stage: StageId, shapes: Sequence[Shape], degree: int, num_steps: int = 1) -> int:
        """Predicted device time of one work. Raises UnknownCost."""
        key = (stage, tuple(shapes), degree)
        unit_ns = self._cache.get(key)
        if unit_ns is None:
            unit_ns = self._cache[key] = self._unit_ns(stage, tuple(shapes), degree)
        return unit_ns * num_steps

    def move_ns(self, source: Group, target: Group) -> int:
        return 0 if not source or set(target) <= set(source) else self._move_ns

    def observe(self, stage: StageId, shapes: Sequence[Shape], degree: int, num_steps: int, run_ns: int) -> None:
        base_ns = self._base_ns(stage, tuple(shapes), degree) * num_steps
        if base_ns <= 0 or run_ns <= 0:
            return
        key = _correction_key(stage, tuple(shapes), degree)
        ratio = min(4.0, max(0.25, run_ns / base_ns))
        old = self._corrections.get(key)
        self._corrections[key] = ratio if old is None else old + self._weight * (ratio - old)
        self._cache.clear()  # Not this shape alone: one that is turned on its side has the same correction.
        self.version += 1

    def is_profiled(self, stage: StageId, shape: Shape, degree: int = 1) -> bool:
        """Whether a row was measured for this very number of pixels, so that nothing is interpolated."""
        return any(pixels == shape.pixels for pixels, _ in self._points.get((stage, degree, 1), ()))

    def _unit_ns(self, stage: StageId, shapes: tuple[Shape, ...], degree: int) -> int:
        correction = self._corrections.get(_correction_key(stage, shapes, degree), 1.0)
        return round(self._base_ns(stage, shapes, degree) * correction)

    def _base_ns(self, stage: StageId, shapes: tuple[Shape, ...], degree: int) -> float:
        if stage.pipeline not in self._pipelines:
            known = ", ".join(sorted(self._pipelines))
            raise UnknownCost(f"pipeline {stage.pipeline!r} is not in the cost table; it knows {known}")
        points = self._points.get((stage, degree, len(shapes)))
        if points is not None:
            return _interpolate(points, sum(shape.pixels for shape in shapes) / len(shapes)) * NS_PER_S
        single = self._points.get((stage, degree, 1))
        if single is not None:  # An unprofiled batch is priced as its members one after another.
            return sum(_interpolate(single, shape.pixels) for shape in shapes) * NS_PER_S
        if any(profiled == stage for profiled, _, _ in self._points):
            raise UnknownCost(f"{stage} was not profiled at degree {degree} and batch {len(shapes)} or 1")
        return 0.0


def _correction_key(stage: StageId, shapes: tuple[Shape, ...], degree: int) -> tuple[StageId, int, int, int]:
    return stage, sum(shape.pixels for shape in shapes), degree, len(shapes)


_Points = list[tuple[int, float]]


def _points(rows: Iterable[CostRow]) -> dict[tuple[StageId, int, int], _Points]:
    """(pixels, seconds) by stage, degree and batch, sorted; rows of equal pixels are averaged."""
    gathered: dict[tuple[StageId, int, int], dict[int, list[float]]] = {}
    for row in rows:
        by_pixels = gathered.setdefault((StageId(row.pipeline, row.stage), row.degree, row.batch), {})
        by_pixels.setdefault(Shape(row.height, row.width, row.frames).pixels, []).append(row.seconds)
    return {
        key: sorted((pixels, sum(values) / len(values)) for pixels, values in by_pixels.items())
        for key, by_pixels in gathered.items()
    }


def _interpolate(points: _Points, pixels: float) -> float:
    if len(points) == 1:
        return points[0][1] * pixels / points[0][0]
    index = min(max(bisect_left(points, (pixels, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    value = y0 + (y1 - y0) * (pixels - x0) / (x1 - x0)
    if x0 <= pixels <= x1:
        return value
    return max(value, (y0 if pixels < x0 else y1) / 2)
