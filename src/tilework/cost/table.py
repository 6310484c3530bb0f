"""Cost tables: measured durations by shape, interpolated between shapes and corrected by what is observed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tilework.core.preview import preview_shape
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_S
from tilework.core.wire import CostRow
from tilework.core.work import DECODE, DIFFUSE, Group, StageId, Work
from tilework.cost.batch_latency import BatchLatencyModel
from tilework.cost.corrections import Corrections, Place
from tilework.cost.memory import MemoryLimits
from tilework.cost.prices import Prices
from tilework.cost.shipped import shipped_path


class BadCostTable(ValueError):
    """A cost table that cannot be used; the message names the file, the row, the field and the remedy."""


class UnknownCost(LookupError):
    """No row says what this pipeline costs, not even for another shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """What was measured on one kind of hardware; the file format of design section 10.

    `source` says where the figures come from. Tables made for a published evaluation also carry its `steps` per request
    and its base SLOs, seconds by `str(Shape)`. `batch_models`, by pipeline, foretell batches of steps at degree 1.
    """

    hardware: str
    rows: tuple[CostRow, ...]
    devices_per_node: int = 8
    source: str = ""
    steps: int | None = None
    slo_s: Mapping[str, float] = field(default_factory=dict)
    batch_models: Mapping[str, BatchLatencyModel] = field(default_factory=dict)

    @property
    def has_batches(self) -> bool:
        """Whether works of several requests were measured, which may take less than their members one by one."""
        return any(row.batch != 1 for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Without what is not known, but always with `peak_bytes`."""
        return {
            "hardware": self.hardware,
            **({"source": self.source} if self.source else {}),
            "devices_per_node": self.devices_per_node,
            **({"steps": self.steps} if self.steps is not None else {}),
            **({"slo_s": dict(self.slo_s)} if self.slo_s else {}),
            "rows": [_row_json(row) for row in self.rows],
            **(
                {"batch_models": {name: one.to_json() for name, one in self.batch_models.items()}}
                if self.batch_models
                else {}
            ),
        }


def _row_json(row: CostRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in _ROW_FIELDS}
    if not isinstance(row.batch, int):
        values["batch"] = [str(shape) for shape in row.batch]
    return {name: value for name, value in values.items() if value is not None or name == "peak_bytes"}


_ROW_FIELDS = tuple(column.name for column in fields(CostRow))
_TEXTS = ("pipeline", "stage", "link")
_COUNTS = ("height", "width", "frames", "degree")
_OPTIONAL_COUNTS = (("peak_bytes", 0, "a whole number of bytes"), ("num_runs", 1, "a whole number of at least 1"))
_DEFAULTED = ("frames", "degree", "batch", "link")
_UNGUIDED = 0.5
_MOST_PRICES = 10_000  # Kept at hand.


def read_table(place: Path | str) -> CostTable:
    """Read a cost table: a file, or one of `shipped_names()` (then a file of that name is reached as ./NAME).

    Several of them, joined by "+", are one table (see `merged`), unless there is a file of that very name.

    Raises:
        BadCostTable: what is wrong, where, and what would be right.
    """
    parts = str(place).split("+")
    if len(parts) > 1 and not Path(place).exists():
        try:
            return merged([_read_one(part) for part in parts])
        except BadCostTable as error:
            raise BadCostTable(f"{place}: {error}") from error
    return _read_one(place)


def merged(tables: Sequence[CostTable]) -> CostTable:
    """One table of the pipelines of all of these, which share hardware: for serving them side by side.

    `steps` stays if all agree on it. Sizes keep their SLOs.

    Raises:
        BadCostTable: they are of different hardware, or two have the same pipeline or an SLO for the same size.
    """
    first = tables[0]
    for index, table in enumerate(tables[1:], 1):
        for name in ("hardware", "devices_per_node"):
            ours, other = getattr(first, name), getattr(table, name)
            if ours != other:
                raise BadCostTable(f"{name} is {ours!r} in one and {other!r} in another; join tables of one hardware")
        for earlier in tables[:index]:
            twice = {row.pipeline for row in earlier.rows} & {row.pipeline for row in table.rows}
            if twice:
                raise BadCostTable(f"pipeline {min(twice)!r} is in two of them; leave one out")
            sizes = earlier.slo_s.keys() & table.slo_s.keys()
            if sizes:
                raise BadCostTable(f"slo_s of {min(sizes)} is in two of them; take it out of both")
    steps = {table.steps for table in tables}
    return CostTable(
        hardware=first.hardware,
        devices_per_node=first.devices_per_node,
        source=" + ".join(table.source for table in tables if table.source),
        steps=first.steps if len(steps) == 1 else None,
        slo_s={size: seconds for table in tables for size, seconds in table.slo_s.items()},
        rows=tuple(row for table in tables for row in table.rows),
        batch_models={pipeline: one for table in tables for pipeline, one in table.batch_models.items()},
    )


def _read_one(place: Path | str) -> CostTable:
    path = shipped_path(str(place)) or Path(place)
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadCostTable(f"{path}: {error}; expected a JSON cost table with hardware and rows") from error
    try:
        return parse_table(document)
    except BadCostTable as error:
        raise BadCostTable(f"{path}: {error}") from error


def parse_table(document: object) -> CostTable:
    """Check and convert the decoded JSON of a cost table.

    Other keys (notes, a standard deviation) are allowed and ignored, since the files of other tools have them; in a
    row, one that looks like a misspelt field is an error if that field would then silently take its default.
    """
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list) or not document["rows"]:
        raise BadCostTable('expected an object with a non-empty list "rows"')
    for name in ("devices_per_node", "steps"):
        if name in document and (type(document[name]) is not int or document[name] < 1):
            raise BadCostTable(f"{name} is {document[name]!r}; expected a whole number of at least 1")
    return CostTable(
        hardware=str(document.get("hardware", "unknown")),
        source=str(document.get("source", "")),
        devices_per_node=document.get("devices_per_node", 8),
        steps=document.get("steps"),
        slo_s=_parse_slos(document.get("slo_s", {})),
        rows=tuple(_parse_row(f"rows[{index}]", row) for index, row in enumerate(document["rows"])),
        batch_models=_parse_batch_models(document.get("batch_models", {})),
    )


def _parse_batch_models(batch_models: object) -> dict[str, BatchLatencyModel]:
    if not isinstance(batch_models, dict):
        raise BadCostTable(f"batch_models is {batch_models!r}; expected an object by pipeline")
    try:
        return {pipeline: BatchLatencyModel.parse(document) for pipeline, document in batch_models.items()}
    except ValueError as error:
        raise BadCostTable(f"batch_models: {error}; take it out, or write it with tilework profile --mixed") from error


def _parse_slos(slo_s: object) -> dict[str, float]:
    if not isinstance(slo_s, dict) or not all(_is_seconds(value) for value in slo_s.values()):
        raise BadCostTable(f"slo_s is {slo_s!r}; expected an object of seconds above 0 by size, as 1024x1024")
    return slo_s


def _parse_row(place: str, row: object) -> CostRow:
    """`place` names the row in messages."""
    if not isinstance(row, dict):
        raise BadCostTable(f"{place} is {row!r}; expected an object")
    missing = {"pipeline", "stage", "height", "width", "seconds"} - row.keys()
    if missing:
        raise BadCostTable(f"{place} lacks {', '.join(sorted(missing))}")
    _check_strays(place, row)
    for name in _TEXTS:
        if not isinstance(row.get(name, "none"), str) or not row.get(name, "none"):
            raise BadCostTable(f"{place}.{name} is {row[name]!r}; expected text that is not empty")
    for name in _COUNTS:
        if type(row.get(name, 1)) is not int or row.get(name, 1) < 1:
            raise BadCostTable(f"{place}.{name} is {row[name]!r}; expected a whole number of at least 1")
    _check_measured(place, row)
    values = {key: value for key, value in row.items() if key in _ROW_FIELDS}
    return CostRow(**(values | _parse_batch(place, row)))


def _parse_batch(place: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The field, and with a mixed batch those of its largest member."""
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


def _mixed(batch: object) -> CostRow | None:
    if not isinstance(batch, list) or len(set(map(str, batch))) < 2:
        return None
    try:
        shapes = [Shape.parse(str(text)) for text in batch]
    except ValueError:
        return None
    return CostRow.of(shapes, pipeline="", stage="", seconds=0.0)


def _check_strays(place: str, row: Mapping[str, Any]) -> None:
    """A misspelt `degree` would be a row of degree 1."""
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


class TableCosts:
    """The CostModel of a table: what `Prices` says of its rows, corrected online.

    A group of an unprofiled degree is as fast as the next narrower profiled one. A stage that no row mentions costs
    nothing (design section 10); a pipeline that no row mentions, or a stage at a degree below all profiled ones, raises
    UnknownCost.

    What single requests take is corrected per stage, shape, degree and guidance (`Corrections`), each measurement
    weighing `weight`. Tables describe guided steps; unguided ones are taken to cost half as much until some have been
    measured. A batch is corrected as its members are one by one; what it saves of their time has a correction of its
    own beside that.
    """

    def __init__(self, table: CostTable, *, move_ns: int = 2_000_000, weight: float = 0.1, max_batch: int = 12) -> None:
        self.table = table
        self.version = 0
        self._memory = MemoryLimits()
        self._move_ns = move_ns
        self._max_batch = max_batch
        self._tabled = _tabled(table)
        self._degrees = _degrees(self._tabled)
        self._pipelines = {row.pipeline for row in table.rows}
        self._corrections = Corrections(weight)
        self._prices: dict[_Key, _Price] = {}

    def run_ns(
        self, stage: StageId, shapes: Sequence[Shape], degree: int, num_steps: int = 1, guided: bool = True
    ) -> int:
        """Predicted device time of works on outputs of these shapes, without previews. Raises UnknownCost."""
        return self._price(stage, shapes, degree, (guided,) * len(shapes)).unit_ns * num_steps

    def work_ns(self, stage: StageId, requests: Sequence[Request], degree: int, num_steps: int = 1) -> int:
        """Predicted device time of one work; previews are spread evenly over the steps. Raises UnknownCost."""
        if len(requests) == 1:  # As nearly always, and thousands of times a second: spare the lists.
            (one,) = requests
            run_ns = self._price(stage, (one.shape,), degree, (one.guided,)).unit_ns * num_steps
            return run_ns + self._previews_ns(stage, requests, num_steps) if one.preview_every else run_ns
        return self._price_of(stage, requests, degree).unit_ns * num_steps + self._previews_ns(
            stage, requests, num_steps
        )

    def _price_of(self, stage: StageId, requests: Sequence[Request], degree: int) -> _Price:
        return self._price(stage, [one.shape for one in requests], degree, [one.guided for one in requests])

    def _price(self, stage: StageId, shapes: Sequence[Shape], degree: int, guided: Sequence[bool]) -> _Price:
        # Numbers and texts have a hash at hand, which dataclasses compute every time.
        first = shapes[0]
        key: _Key = (stage.name, degree, first.height, first.width, first.frames, guided[0], stage.pipeline)
        if len(shapes) > 1:
            key += tuple((shape.height, shape.width, shape.frames) for shape in shapes[1:]) + tuple(guided[1:])
        price = self._prices.get(key)
        if price is None:
            if len(self._prices) >= _MOST_PRICES:  # Clients choose the shapes.
                self._prices.clear()
            price = self._prices[key] = self._new_price(stage, shapes, degree, guided)
        if price.version != self.version:
            price.unit_ns = round(price.base_ns * self._factor(price))
            price.version = self.version
        return price

    def _new_price(self, stage: StageId, shapes: Sequence[Shape], degree: int, guided: Sequence[bool]) -> _Price:
        is_step = stage.name == DIFFUSE
        num_guided = sum(guided) if is_step else len(shapes)
        place = stage, degree, len(shapes), sum(shape.pixels for shape in shapes), num_guided
        unknown = 1.0 if num_guided else _UNGUIDED
        alone: tuple[_Price, ...] = ()
        if len(shapes) > 1 and degree in self.degrees(stage):
            pairs = zip(shapes, guided, strict=True)
            alone = tuple(self._price(stage, (shape,), degree, (is_guided,)) for shape, is_guided in pairs)
        return _Price(self._base_ns(stage, tuple(shapes), degree), place, unknown, alone)

    def _factor(self, price: _Price) -> float:
        """By what a price is corrected."""
        if not price.alone:
            learnt = self._corrections.single(price.place)
            return price.unknown if learnt is None else learnt
        learnt = self._corrections.batch(price.place)
        return self._factor_alone(price) * (1.0 if learnt is None else learnt)

    def _factor_alone(self, price: _Price) -> float:
        """By what the members of a batch are corrected, one by one."""
        table_ns = sum(one.base_ns for one in price.alone)
        return sum(one.base_ns * self._factor(one) for one in price.alone) / table_ns if table_ns else 1.0

    def _previews_ns(self, stage: StageId, requests: Sequence[Request], num_steps: int) -> int:
        preview_ns = 0
        for one in requests if stage.name == DIFFUSE else ():
            if one.preview_every:
                decode = StageId(stage.pipeline, DECODE)
                preview_ns += self.run_ns(decode, (preview_shape(one.shape),), 1) * num_steps // one.preview_every
        return preview_ns

    def degrees(self, stage: StageId) -> tuple[int, ...]:
        """The degrees at which single requests were profiled, ascending. Raises UnknownCost for an unknown pipeline.

        (1,) for a stage that costs nothing. A degree that was profiled in batches only is left out.
        """
        known = self._degrees.get((stage.pipeline, stage.name))
        if known is None:
            self._check_pipeline(stage)
            return (1,)
        return known

    def fits(self, stage: StageId, shape: Shape, degree: int) -> bool:
        """Whether such a work, in slices if need be, has not been seen to need more memory than a device has."""
        return not self._memory or self._memory.fits(stage, (shape,), degree, sliced=stage.name == DECODE)

    def fits_together(self, stage: StageId, shapes: Sequence[Shape]) -> bool:
        """Whether neither a work of all these on one device, nor of one of them alone, has been seen not to fit.

        More than `max_batch` never do.
        """
        if len(shapes) > self._max_batch or not self._memory:
            return len(shapes) <= self._max_batch
        return self._memory.fits(stage, shapes, 1) and all(self.fits(stage, shape, 1) for shape in shapes)

    def needs_slices(self, stage: StageId, shape: Shape) -> bool:
        """Whether a work on one device would not fit as a whole, but might in slices; only decodes can be sliced."""
        return bool(self._memory) and stage.name == DECODE and not self._memory.fits(stage, (shape,), 1)

    def observe_memory(self, work: Work, shapes: Sequence[Shape], *, fitted: bool, now_ns: int) -> bool:
        """Learn from a work on outputs of these shapes that it fitted, or did not; returns whether that is news."""
        if fitted:
            news = bool(self._memory) and self._memory.fitted(work.stage, shapes, len(work.devices), work.sliced)
        else:
            news = self._memory.starved(work.stage, shapes, len(work.devices), work.sliced, now_ns)
        self.version += news
        return news

    @property
    def forgets_ns(self) -> int | None:
        """When something about what does not fit is forgotten; None if there is nothing."""
        return self._memory.forgets_ns

    def forget_memory(self, now_ns: int) -> bool:
        """Let go what was learnt too long ago about what does not fit; returns whether there was something."""
        is_news = bool(self._memory) and self._memory.forget(now_ns)
        self.version += is_news
        return is_news

    def move_ns(self, source: Group, target: Group) -> int:
        return 0 if not source or set(target) <= set(source) else self._move_ns

    def observe(self, stage: StageId, requests: Sequence[Request], degree: int, num_steps: int, run_ns: int) -> None:
        """Learn from a work; one with previews tells nothing of its steps."""
        for one in requests:
            if one.preview_every:
                return
        price = self._price_of(stage, requests, degree)
        expected_ns = price.base_ns * num_steps * (self._factor_alone(price) if price.alone else 1.0)
        if expected_ns <= 0 or run_ns <= 0:
            return
        learn = self._corrections.observe_batch if price.alone else self._corrections.observe_single
        self.version += learn(price.place, run_ns / expected_ns)

    def knows(self, stage: StageId, request: Request) -> bool:
        """Whether what such a work takes alone on one device has been measured, for the table or since then.

        Raises UnknownCost.
        """
        tabled = self._tabled.get((stage, 1))
        if tabled is not None and tabled.knows(request.shape) and (request.guided or stage.name != DIFFUSE):
            return True
        return self._price(stage, (request.shape,), 1, (request.guided,)).place in self._corrections

    def prediction_error(self, stage: StageId) -> float:
        """How far the times of batches on one device were from predictions lately, over these; 0 if there were none."""
        return self._corrections.prediction_error(stage, 1)

    def correction(self, stage: StageId, requests: Sequence[Request], degree: int) -> float:
        """Measured over tabled time of such works; 1 as long as nothing has been measured."""
        price = self._price_of(stage, requests, degree)
        return self._factor(price) if price.place in self._corrections else 1.0

    def is_profiled(self, stage: StageId, shape: Shape, degree: int = 1) -> bool:
        """Whether a row was measured for this very number of pixels, so that nothing is interpolated."""
        tabled = self._tabled.get((stage, degree))
        return tabled is not None and tabled.is_profiled(shape)

    def _base_ns(self, stage: StageId, shapes: tuple[Shape, ...], degree: int) -> float:
        self._check_pipeline(stage)
        tabled = self._tabled.get((stage, degree))
        seconds = None if tabled is None else tabled.seconds(shapes)
        if seconds is not None:
            return seconds * NS_PER_S
        profiled = self._degrees.get((stage.pipeline, stage.name))
        narrower = max((known for known in profiled or () if known < degree), default=None)
        if narrower is not None:
            return self._base_ns(stage, shapes, narrower)
        if profiled is not None:
            raise UnknownCost(f"{stage} was not profiled at degree {degree}, nor below it, at batch {len(shapes)} or 1")
        return 0.0

    def _check_pipeline(self, stage: StageId) -> None:
        if stage.pipeline not in self._pipelines:
            known = ", ".join(sorted(self._pipelines))
            raise UnknownCost(f"pipeline {stage.pipeline!r} is not in the cost table; it knows {known}")


_Key = tuple[object, ...]


@dataclass(slots=True)
class _Price:
    """What a work costs by the table, what has a correction with it, and what it costs corrected, as of `version`.

    `unknown` is the correction of what has not been measured; a batch has the prices of its members `alone` instead,
    if these have any.
    """

    base_ns: float
    place: Place
    unknown: float
    alone: tuple[_Price, ...]
    unit_ns: int = 0
    version: int = -1


def _tabled(table: CostTable) -> dict[tuple[StageId, int], Prices]:
    gathered: dict[tuple[StageId, int], list[CostRow]] = {}
    for row in table.rows:
        gathered.setdefault((StageId(row.pipeline, row.stage), row.degree), []).append(row)
    batch_models = {
        (StageId(pipeline, DIFFUSE), 1): batch_model for pipeline, batch_model in table.batch_models.items()
    }
    return {place: Prices(rows, batch_models.get(place)) for place, rows in gathered.items()}


def _degrees(tabled: Mapping[tuple[StageId, int], Prices]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Degrees with a price for single requests, ascending, by pipeline and stage; also of a stage that has none."""
    found: dict[tuple[str, str], set[int]] = {}
    for (stage, degree), prices in tabled.items():
        found.setdefault((stage.pipeline, stage.name), set()).update({degree} if prices.has_singles else ())
    return {stage: tuple(sorted(degrees)) for stage, degrees in found.items()}
