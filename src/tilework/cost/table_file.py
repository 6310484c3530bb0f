"""The file format of cost tables: JSON, as docs/formats.md describes it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from tilework.core.cache import CacheChoice
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import BadGraph, Graph
from tilework.core.pools import is_devices
from tilework.core.request import Shape
from tilework.cost.batch_latency import BatchLatencyModel
from tilework.cost.mixes import BadMixes, Mixes
from tilework.cost.shipped import shipped_path
from tilework.cost.table import (
    BadCostTable,
    CostTable,
    in_cells,
    in_smallest_cells,
    merged,
    sped_up,
    with_last_stage,
)
from tilework.cost.table_memory import memory_json, parse_memory

T = TypeVar("T")
U = TypeVar("U")

_ROW_FIELDS = tuple(column.name for column in fields(CostRow))
_TEXTS = ("pipeline", "stage", "link")
_COUNTS = ("height", "width", "frames", "degree")
_OPTIONAL_COUNTS = (
    ("peak_bytes", 0, "a whole number of bytes"),
    ("activation_bytes", 0, "a whole number of bytes"),
    ("state_bytes", 0, "a whole number of bytes"),
    ("num_runs", 0, "a whole number of at least 0"),
)
_DEFAULTED = ("frames", "degree", "batch", "link", "cache")
_OF_CACHES = ("cache", "skipped", "skipped_std")
_SCALED: Mapping[str, Callable[[CostTable, float], CostTable]] = {"speed": sped_up, "last": with_last_stage}


def read_table(place: Path | str) -> CostTable:
    """Read a cost table: a file, or one of `shipped_names()` (a file of the same name is reached as ./NAME).

    Several of them, joined by "+", are one table (see `merged`), unless there is a file of exactly that name. Options
    follow a name: "NAME,cell=2" is NAME for cells of two devices (see `in_cells`), "NAME,cell=auto" for the smallest
    cells in which it fits, "NAME,speed=1.5" has the times of NAME divided by 1.5, and "NAME,last=2" a last stage that
    takes as long as two steps (see `with_last_stage`).

    Raises:
        BadCostTable: names the file, the field, its value and the remedy.
    """
    parts = str(place).split("+")
    if len(parts) > 1 and not Path(place).exists():
        try:
            return merged([_read_one(part) for part in parts])
        except BadCostTable as error:
            raise BadCostTable(f"{place}: {error}") from error
    return _read_one(place)


def _read_one(place: Path | str) -> CostTable:
    name, comma, option = str(place).rpartition(",")
    if comma and not Path(place).exists():
        return _with_option(name, option)
    path = shipped_path(str(place)) or Path(place)
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise BadCostTable(f"{path}: no such file or table; `tilework cost list` names those that ship") from None
    except (OSError, ValueError) as error:
        raise BadCostTable(f"{path}: {error}; expected a JSON cost table with hardware and rows") from error
    try:
        return parse_table(document)
    except BadCostTable as error:
        raise BadCostTable(f"{path}: {error}") from error


def _with_option(name: str, option: str) -> CostTable:
    """Return the table of a name with an option: for cells, with other speeds, or with a last stage."""
    key, _, value = option.partition("=")
    if key == "cell" and (value.isdecimal() or value == "auto"):
        return in_smallest_cells(_read_one(name)) if value == "auto" else in_cells(_read_one(name), int(value))
    if key in _SCALED and _is_positive(value):
        return _SCALED[key](_read_one(name), float(value))
    raise BadCostTable(
        f"{name},{option}: {option!r} is no option of a cost table; give cell=N or cell=auto, speed=FACTOR, or "
        f"last=STEPS, such as {name},cell=2"
    )


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def refuse(error: BadCostTable) -> None:
    """Raise the error, so that nothing is left out of a table."""
    raise error


def parse_table(document: object, leave_out: Callable[[BadCostTable], None] = refuse) -> CostTable:
    """Parse a decoded JSON document. Raises BadCostTable.

    Other keys (notes, a standard deviation) are ignored, since the files of other tools have them. In a row, a key that
    looks like a misspelt field is an error if that field would silently take its default.

    `leave_out` gets an error for each part that cannot be used: rows, and other fields. If it returns, the table is
    without that part. A table without any usable row is refused.
    """
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list) or not document["rows"]:
        raise BadCostTable('expected an object with a non-empty list "rows"')
    devices_per_node = _part(_parse_count, document, "devices_per_node", 8, leave_out)
    steps = _part(_parse_count, document, "steps", None, leave_out)
    slo_s: dict[str, float] = _part(_parse_slos, document, "slo_s", {}, leave_out)
    rows = _usable(enumerate(document["rows"]), lambda one: _parse_row(f"rows[{one[0]}]", one[1]), leave_out)
    places = [index for index, _ in rows]
    table = CostTable(
        hardware=str(document.get("hardware", "unknown")),
        sources=_parse_sources(document.get("source", ""), [row for _, row in rows]),
        devices_per_node=devices_per_node,
        steps=steps,
        slo_s=slo_s,
        rows=tuple(row for _, row in rows),
        batch_models=_part(_parse_batch_models, document, "batch_models", {}, leave_out),
        graphs=_part(_parse_graphs, document, "graphs", {}, leave_out),
        mixes=_usable_or(lambda: _parse_mixes(document), Mixes(), leave_out),
        devices=_part(_parse_devices, document, "devices", {}, leave_out),
        **_usable_or(lambda: parse_memory(document), dict[str, Any](), leave_out),
    )
    return _checked_served(_checked_stages(table, places, leave_out), leave_out)


def table_json(table: CostTable) -> dict[str, Any]:
    """Return the document that `parse_table` reads, without unknown values, except for `peak_bytes`."""
    document: dict[str, Any] = {"hardware": table.hardware}
    if table.sources:
        alike = len(set(table.sources.values())) == 1 and table.sources.keys() >= set(table.pipelines)
        document["source"] = table.source if alike else dict(table.sources)
    document["devices_per_node"] = table.devices_per_node
    if table.steps is not None:
        document["steps"] = table.steps
    if table.slo_s:
        document["slo_s"] = dict(table.slo_s)
    document["rows"] = [_row_json(row) for row in table.rows]
    if table.batch_models:
        document["batch_models"] = {pipeline: model.to_json() for pipeline, model in table.batch_models.items()}
    if table.graphs:
        document["graphs"] = {pipeline: graph.to_json() for pipeline, graph in table.graphs.items()}
    if table.devices:
        document["devices"] = {pipeline: list(ids) for pipeline, ids in table.devices.items()}
    return document | memory_json(table) | table.mixes.to_json()


def _usable(
    given: Iterable[U], parse: Callable[[U], T], leave_out: Callable[[BadCostTable], None]
) -> list[tuple[int, T]]:
    """Return what can be parsed, each with its index among the given. Raises BadCostTable if nothing can."""
    found: list[tuple[int, T]] = []
    errors: list[BadCostTable] = []
    for index, one in enumerate(given):
        try:
            found.append((index, parse(one)))
        except BadCostTable as error:
            leave_out(error)
            errors.append(error)
    if not found and errors:
        raise errors[0]
    return found


def _part(
    parse: Callable[[str, Any], T],
    document: Mapping[str, Any],
    name: str,
    default: T,
    leave_out: Callable[[BadCostTable], None],
) -> T:
    """Return the field `name`, or its default if it is missing or left out."""
    return _usable_or(lambda: parse(name, document[name]), default, leave_out) if name in document else default


def _usable_or(parse: Callable[[], T], default: T, leave_out: Callable[[BadCostTable], None]) -> T:
    try:
        return parse()
    except BadCostTable as error:
        leave_out(error)
        return default


def _parse_count(name: str, count: object) -> int:
    if type(count) is not int or count < 1:
        raise BadCostTable(f"{name} is {count!r}; expected a whole number of at least 1")
    return count


def _row_json(row: CostRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in _ROW_FIELDS}
    if not isinstance(row.batch, int):
        values["batch"] = [str(shape) for shape in row.batch]
    if row.cache is None:
        return {
            name: value
            for name, value in values.items()
            if name not in _OF_CACHES and (value is not None or name == "peak_bytes")
        }
    values["cache"] = str(row.cache)
    return {name: value for name, value in values.items() if value is not None or name == "peak_bytes"}


def _parse_sources(source: object, rows: Sequence[CostRow]) -> dict[str, str]:
    """Return the source of each pipeline, from one text for all, or one for each."""
    if isinstance(source, dict):
        return {str(pipeline): str(text) for pipeline, text in source.items()}
    return {row.pipeline: str(source) for row in rows} if source else {}


def _parse_batch_models(_name: str, batch_models: object) -> dict[str, BatchLatencyModel]:
    if not isinstance(batch_models, dict):
        raise BadCostTable(f"batch_models is {batch_models!r}; expected an object by pipeline")
    try:
        return {pipeline: BatchLatencyModel.parse(document) for pipeline, document in batch_models.items()}
    except ValueError as error:
        raise BadCostTable(f"batch_models: {error}; take it out, or write it with tilework profile --mixed") from error


def _parse_graphs(_name: str, graphs: object) -> dict[str, Graph]:
    if not isinstance(graphs, dict):
        raise BadCostTable(f"graphs is {graphs!r}; expected an object by pipeline")
    try:
        return {pipeline: Graph.parse(pipeline, document) for pipeline, document in graphs.items()}
    except BadGraph as error:
        raise BadCostTable(f"graphs: {error}") from error


def _parse_devices(_name: str, devices: object) -> dict[str, tuple[int, ...]]:
    devices = devices or {}
    if not isinstance(devices, dict):
        raise BadCostTable(f"devices is {devices!r}; expected an object by pipeline")
    for pipeline, ids in devices.items():
        if ids is not None and not is_devices(ids):
            raise BadCostTable(
                f"devices.{pipeline} is {ids!r}; expected a list of devices from 0, each once, or null for all"
            )
    return {pipeline: tuple(sorted(ids)) for pipeline, ids in devices.items() if ids is not None}


def _checked_served(table: CostTable, leave_out: Callable[[BadCostTable], None]) -> CostTable:
    """Leave out devices of a pipeline without rows: a misspelt name would let all devices serve the one meant."""
    known = sorted(table.pipelines)
    unknown = [pipeline for pipeline in table.devices if pipeline not in known]
    for pipeline in unknown:
        leave_out(BadCostTable(f"devices has {pipeline!r}, and the rows are of {', '.join(known)}; rename it"))
    return replace(table, devices={one: ids for one, ids in table.devices.items() if one not in unknown})


def _parse_mixes(document: Mapping[str, Any]) -> Mixes:
    try:
        return Mixes.parse(document)
    except BadMixes as error:
        raise BadCostTable(str(error)) from error


def _checked_stages(table: CostTable, places: Sequence[int], leave_out: Callable[[BadCostTable], None]) -> CostTable:
    """Leave out rows of stages that their pipeline does not have: nothing would use them."""
    known = {pipeline: [stage.name for stage in table.graph(pipeline).stages] for pipeline in table.pipelines}
    without = {(row.pipeline, row.stage, row.degree) for row in table.rows if row.cache is None and row.batch == 1}

    def checked(placed: tuple[int, CostRow]) -> CostRow:
        index, row = placed
        if row.stage not in known[row.pipeline]:
            names = ", ".join(known[row.pipeline])
            raise BadCostTable(
                f"rows[{index}].stage is {row.stage!r}, and {row.pipeline!r} has {names}; rename it, leave the row "
                "out, or describe the pipeline under graphs"
            )
        if row.cache is not None:
            _check_cached(f"rows[{index}].cache is {str(row.cache)!r}", row, table, without)
        return row

    placed = zip(places, table.rows, strict=True)
    return replace(table, rows=tuple(row for _, row in _usable(placed, checked, leave_out)))


def _check_cached(what: str, row: CostRow, table: CostTable, without: Collection[tuple[str, str, int]]) -> None:
    if not table.graph(row.pipeline).stage(row.stage).has_steps:
        raise BadCostTable(f"{what}, and {row.stage} of {row.pipeline!r} has no steps; leave it out")
    if (row.pipeline, row.stage, row.degree) not in without:
        raise BadCostTable(
            f"{what}, and no row has {row.stage} of {row.pipeline!r} at degree {row.degree} without a cache; add one"
        )


def _parse_slos(_name: str, slo_s: object) -> dict[str, float]:
    if not isinstance(slo_s, dict) or not all(_is_seconds(value) for value in slo_s.values()):
        raise BadCostTable(f"slo_s is {slo_s!r}; expected an object of seconds above 0 by size, as 1024x1024")
    return slo_s


def _parse_row(place: str, row: object) -> CostRow:
    """Return the row of a JSON object; `place` names it in messages."""
    if not isinstance(row, dict):
        raise BadCostTable(f"{place} is {row!r}; expected an object")
    missing = {"pipeline", "stage", "height", "width", "seconds"} - row.keys()
    if missing:
        raise BadCostTable(f"{place} lacks {', '.join(sorted(missing))}")
    _check_misspelt(place, row)
    for name in _TEXTS:
        if not isinstance(row.get(name, "none"), str) or not row.get(name, "none"):
            raise BadCostTable(f"{place}.{name} is {row[name]!r}; expected text that is not empty")
    for name in _COUNTS:
        if type(row.get(name, 1)) is not int or row.get(name, 1) < 1:
            raise BadCostTable(f"{place}.{name} is {row[name]!r}; expected a whole number of at least 1")
    _check_measured(place, row)
    values = {key: value for key, value in row.items() if key in _ROW_FIELDS}
    return CostRow(**(values | _parse_batch(place, row) | _parse_cache(place, row)))


def _parse_batch(place: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `batch`, and for a mixed batch also the sides and frames of its largest shape."""
    batch = row.get("batch", 1)
    if type(batch) is int and batch >= 1:
        return {"batch": batch}
    mixed = _mixed(batch)
    if mixed is None:
        raise BadCostTable(
            f"{place}.batch is {batch!r}; expected a whole number of at least 1, or a list of shapes that differ, such "
            'as ["512x512", "1024x768"]'
        )
    given = Shape(row["height"], row["width"], row.get("frames", 1))
    if given not in mixed.shapes or given.pixels < mixed.shape.pixels:
        raise BadCostTable(
            f"{place} is of {given} and its batch {batch!r}; expected height, width and frames of the largest, "
            f"{mixed.shape}"
        )
    return {"batch": mixed.batch, "height": mixed.height, "width": mixed.width, "frames": mixed.frames}


def _parse_cache(place: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `cache`, if the row has one, and check `skipped` and `skipped_std`."""
    cache = row.get("cache")
    if cache is None:
        for name in ("skipped", "skipped_std"):
            if row.get(name):
                raise BadCostTable(f"{place}.{name} is {row[name]!r}, and the row has no cache; give cache, too")
        return {}
    for name in ("skipped", "skipped_std"):
        value = row.get(name, 0.0)
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise BadCostTable(f"{place}.{name} is {value!r}; expected a share from 0 to 1")
    try:
        return {"cache": CacheChoice.parse(str(cache))}
    except ValueError:
        raise BadCostTable(
            f'{place}.cache is {cache!r}; expected a kind and its threshold, as in "patch=0.003", or null'
        ) from None


def _mixed(batch: object) -> CostRow | None:
    if not isinstance(batch, list) or len(set(map(str, batch))) < 2:
        return None
    try:
        shapes = [Shape.parse(str(text)) for text in batch]
    except ValueError:
        return None
    return CostRow.of(shapes, pipeline="", stage="", seconds=0.0)


def _check_misspelt(place: str, row: Mapping[str, Any]) -> None:
    """Refuse misspelt fields that have a default: a misspelt `degree` would make a row of degree 1."""
    absent = [name for name in _DEFAULTED if name not in row]
    for key in row.keys() - set(_ROW_FIELDS):
        for near in get_close_matches(str(key).lower(), absent, n=1, cutoff=0.65):
            raise BadCostTable(f"{place}.{key} is not a field; rename it to {near}, or leave it out")


def _check_measured(place: str, row: Mapping[str, Any]) -> None:
    seconds, p99_seconds = row["seconds"], row.get("p99_seconds")
    if not _is_seconds(seconds):
        raise BadCostTable(f"{place}.seconds is {seconds!r}; expected seconds above 0")
    if p99_seconds is not None and (not _is_seconds(p99_seconds) or p99_seconds < seconds):
        raise BadCostTable(
            f"{place}.p99_seconds is {p99_seconds!r}; expected seconds, at least the median {seconds!r}, or null"
        )
    for name, least, wanted in _OPTIONAL_COUNTS:
        value = row.get(name)
        if value is not None and (type(value) is not int or value < least):
            raise BadCostTable(f"{place}.{name} is {value!r}; expected {wanted}, or null")


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < 1e6  # type: ignore[operator]
