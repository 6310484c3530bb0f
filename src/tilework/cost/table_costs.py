"""Predicted durations: a cost table, corrected by the measured times of works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilework.core.component import num_bytes
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import Stage
from tilework.core.lora import slowdown
from tilework.core.pools import Pools
from tilework.core.preview import preview_shape
from tilework.core.request import MOST_KNOWN, Bounded, Request, RequestClass, Shape, cost_key
from tilework.core.work import Work
from tilework.cost.caching.savings import Saving
from tilework.cost.corrections import CorrectionKey, Corrections, Deviations
from tilework.cost.loading import MeasuredLink, MoveTimes
from tilework.cost.memory import MemoryLimits
from tilework.cost.table import CostTable, merged, without
from tilework.cost.tabled import TabledTimes, UnknownCost
from tilework.cost.weights import TableWeights

_UNGUIDED = 0.5


class TableCosts:
    """The CostModel of a table: the times of `TabledTimes`, corrected online.

    The time of single requests is corrected per stage, shape, degree and guidance (`Corrections`); each measurement has
    the weight `weight`. Tables describe guided steps; unguided ones are assumed to cost half as much until some have
    been measured. The requests of a batch are corrected like single ones. Separate corrections apply to the saving of a
    batch, to requests with LoRAs, by number of LoRAs, and to the saving of a cache, by cache.

    `version` counts the changes of predictions of works.
    """

    def __init__(self, table: CostTable, *, move_ns: int = 2_000_000, weight: float = 0.1, max_batch: int = 12) -> None:
        self.version = 0
        self._memory = MemoryLimits()
        self._move_ns = move_ns
        self._max_batch = max_batch
        self.memory_bytes = table.memory_bytes
        self.weights = TableWeights(table, weight)
        self._measured: dict[tuple[int, int], MeasuredLink] = {}
        self._corrections = Corrections(weight)
        self._prices = Bounded[_Key, _Price]()
        self._changed: dict[int, int] = {}  # The version at which the times of single requests changed, by pixels.
        self._all_changed = 0
        self._take(table)

    def _take(self, table: CostTable) -> None:
        self.table = table
        self._moves = MoveTimes(table.rows, table.links, self._move_ns)
        self._tabled = TabledTimes(table)
        self._rooms = Bounded[_Key, bool]()
        self._starts = Bounded[RequestClass, Cursor]()

    def served(self, part: CostTable) -> CostTable:
        """Return the table with the pipelines of another one, in place of its own entries for them.

        Known speeds of loads are kept. Raises BadCostTable if the tables are of different hardware.
        """
        speeds = {**part.load_bytes_per_s, **self.table.load_bytes_per_s}
        known, part = (replace(table, load_bytes_per_s=speeds) for table in (self.table, part))
        return merged([without(known, part.pipelines), part])

    def serve(self, part: CostTable) -> None:
        """Use the table that `served` returns from now on."""
        self._replace(self.served(part))

    def remove(self, pipeline: str) -> None:
        """Stop serving a pipeline. At least one must remain."""
        self._replace(without(self.table, {pipeline}))

    def forget(self, pipeline: str) -> None:
        """Drop all that was learned about a pipeline: the next one of its name is another one."""
        self._corrections.forget(pipeline)
        self._memory.forget_pipeline(pipeline)
        self._has_changed()

    def _replace(self, table: CostTable) -> None:
        self.weights.use(table)
        self._take(table)
        self._prices.clear()
        self._has_changed()

    def version_of(self, request: Request) -> int:
        """Return the version at which a prediction for such requests, alone or together, may last have changed."""
        version = max(self._all_changed, self._changed.get(request.shape.pixels, 0))
        if request.preview_every:
            version = max(version, self._changed.get(preview_shape(request.shape).pixels, 0))
        return version

    def _has_changed(self, pixels: int | None = None) -> None:
        """Count a change of the times of requests with this many pixels; None: of any requests, or of batches."""
        self.version += 1
        if pixels is None or len(self._changed) >= MOST_KNOWN:
            self._all_changed = self.version
            self._changed.clear()
        else:
            self._changed[pixels] = self.version

    def run_ns(
        self, stage: Stage, shapes: Sequence[Shape], degree: int, num_steps: int = 1, guided: bool = True
    ) -> int:
        """Return the predicted time of works on outputs of these shapes, without previews. Raises UnknownCost."""
        return self._price(stage, shapes, degree, (guided,) * len(shapes)).unit_ns * num_steps

    def work_ns(self, stage: Stage, requests: Sequence[Request], degree: int, num_steps: int = 1) -> int:
        """Return the predicted device time of one work, with its previews spread evenly. Raises UnknownCost."""
        if len(requests) == 1:  # The usual case, thousands of times a second: it builds no lists.
            (one,) = requests
            run_ns = self._price_alone(stage, one.shape, degree, one.guided).unit_ns * num_steps
            if one.passes != 1 and stage.has_steps:
                run_ns = round(run_ns * one.passes)
            return run_ns + self._previews_ns(stage, requests, num_steps) if one.preview_every else run_ns
        return self._price_of(stage, requests, degree).unit_ns * num_steps + self._previews_ns(
            stage, requests, num_steps
        )

    def _price_of(self, stage: Stage, requests: Sequence[Request], degree: int) -> _Price:
        if len(requests) == 1:
            return self._price_alone(stage, requests[0].shape, degree, requests[0].guided)
        return self._price(stage, [one.shape for one in requests], degree, [one.guided for one in requests])

    def _price_alone(self, stage: Stage, shape: Shape, degree: int, guided: bool) -> _Price:
        # Numbers and strings hash fast; dataclasses compute their hash every time.
        size = shape.height, shape.width, shape.frames
        key = stage.name, degree, *size, guided, stage.pipeline, stage.loras, stage.caches
        price = self._prices.get(key) or self._add_price(key, stage, (shape,), degree, (guided,))
        return price if price.version == self.version else self._updated(price)

    def _price(self, stage: Stage, shapes: Sequence[Shape], degree: int, guided: Sequence[bool]) -> _Price:
        if len(shapes) == 1:
            return self._price_alone(stage, shapes[0], degree, guided[0])
        sizes = [(shape.height, shape.width, shape.frames) for shape in shapes]
        key = stage.name, degree, *sizes, *guided, stage.pipeline, stage.loras, stage.caches
        price = self._prices.get(key) or self._add_price(key, stage, shapes, degree, guided)
        return price if price.version == self.version else self._updated(price)

    def _add_price(
        self, key: _Key, stage: Stage, shapes: Sequence[Shape], degree: int, guided: Sequence[bool]
    ) -> _Price:
        price = self._new_price(stage, shapes, degree, guided)
        self._prices[key] = price
        return price

    def _updated(self, price: _Price) -> _Price:
        price.unit_ns = round(price.base_ns * self._factor(price))
        price.version = self.version
        return price

    def _new_price(self, stage: Stage, shapes: Sequence[Shape], degree: int, guided: Sequence[bool]) -> _Price:
        is_step = stage.has_steps
        num_guided = sum(guided) if is_step else len(shapes)
        pixels = sum(shape.pixels for shape in shapes)
        name = f"{stage.name}+{len(stage.loras)}" if stage.loras else stage.name
        name = f"{name}{{{stage.caches[0]}}}" if stage.caches else name
        key = stage.pipeline, name, degree, len(shapes), pixels, num_guided
        unknown = 1.0 if num_guided else _UNGUIDED
        alone: tuple[_Price, ...] = ()
        if len(shapes) > 1 and degree in self.degrees(stage):
            pairs = zip(shapes, guided, strict=True)
            alone = tuple(self._price(stage, (shape,), degree, (is_guided,)) for shape, is_guided in pairs)
        elif len(shapes) == 1 and (stage.loras or stage.caches):
            alone = (self._price_alone(replace(stage, loras=(), caches=()), shapes[0], degree, guided[0]),)
        return _Price(self._tabled.base_ns(stage, tuple(shapes), degree) * self._slowdown(stage), key, unknown, alone)

    def _slowdown(self, stage: Stage) -> float:
        """Return the factor by which a step takes longer with the LoRAs of a stage, as the table says."""
        if not stage.loras or not stage.has_steps:
            return 1.0
        return slowdown(self.table.loras[stage.pipeline][one.name] for one in stage.loras)

    def _factor(self, price: _Price) -> float:
        """Return the correction of a price."""
        if not price.alone:
            learned = self._corrections.single(price.key)
            return price.unknown * self._corrections.usual(*price.key[:2]) if learned is None else learned
        learned = self._corrections.batch(price.key)
        return self._factor_alone(price) * (1.0 if learned is None else learned)

    def _factor_alone(self, price: _Price) -> float:
        """Return the correction of the requests of a batch, one by one."""
        table_ns = sum(one.base_ns for one in price.alone)
        return sum(one.base_ns * self._factor(one) for one in price.alone) / table_ns if table_ns else 1.0

    def _previews_ns(self, stage: Stage, requests: Sequence[Request], num_steps: int) -> int:
        preview_ns = 0
        for one in requests if stage.spec.previews else ():
            if one.preview_every:
                drawing = self._tabled.graph(stage.pipeline).stage(stage.spec.previews)
                preview_ns += self.run_ns(drawing, (preview_shape(one.shape),), 1) * num_steps // one.preview_every
        return preview_ns

    def graph(self, pipeline: str) -> Graph:
        """Return the graph of a pipeline. Raises UnknownCost."""
        return self._tabled.graph(pipeline)

    def start(self, request: Request) -> Cursor:
        """Return the progress of a request of which nothing is done. Raises UnknownCost."""
        key = cost_key(request)
        start = self._starts.get(key)
        if start is None:
            start = self._starts[key] = self._new_start(request)
        return start

    def _new_start(self, request: Request) -> Cursor:
        graph = self._tabled.graph(request.pipeline)
        if not request.loras:
            return graph.itinerary(request.steps, result=request.result, cache=request.cache).at[0]
        known = self.table.loras.get(request.pipeline, {})
        unknown = [one.name for one in request.loras if one.name not in known]
        if unknown:
            raise UnknownCost(f"{request.pipeline!r} has no LoRA {unknown[0]!r}")
        changes = {one: known[one.name].changes for one in request.loras}
        return graph.itinerary(request.steps, changes, request.result, request.cache).at[0]

    @property
    def pools(self) -> Pools:
        """See `CostModel.pools`."""
        return self._tabled.pools

    def saving(self, stage: Stage, shapes: Sequence[Shape], degree: int) -> Saving | None:
        """Return what the cache of a stage saves by the table: see `TabledTimes.saving`."""
        return self._tabled.saving(stage, shapes, degree)

    def degrees(self, stage: Stage) -> tuple[int, ...]:
        """See `TabledTimes.degrees`."""
        return self._tabled.degrees(stage)

    def common_degrees(self, pipeline: str) -> tuple[int, ...]:
        """See `CostModel.common_degrees`."""
        return self._tabled.common_degrees(pipeline)

    def fits(self, stage: Stage, shape: Shape, degree: int) -> bool:
        """Return whether such a work, in slices if possible, fits into the memory of a device.
        Weights and activations count as in the table; works that ran out of memory count, too.
        """
        if not stage.spec.sliceable and not self._has_room(stage, (shape,), degree):
            return False
        return not self._memory or self._memory.fits(stage, (shape,), degree, sliced=stage.spec.sliceable)

    def fits_together(self, stage: Stage, shapes: Sequence[Shape]) -> bool:
        """Return whether a work of all these on one device may fit, and so may one of each of them alone.

        More than `max_batch` never fit, nor different shapes where all must have one.
        """
        if stage.spec.one_shape and len(set(shapes)) > 1:
            return False
        if len(shapes) > self._max_batch or not self._has_room(stage, shapes, 1):
            return False
        if not self._memory:
            return True
        return self._memory.fits(stage, shapes, 1) and all(self.fits(stage, shape, 1) for shape in shapes)

    def needs_slices(self, stage: Stage, shape: Shape) -> bool:
        """Return whether a work of a sliceable stage on one device fits at most in slices."""
        if not stage.spec.sliceable:
            return False
        return not self._has_room(stage, (shape,), 1) or (
            bool(self._memory) and not self._memory.fits(stage, (shape,), 1)
        )

    def _has_room(self, stage: Stage, shapes: Sequence[Shape], degree: int) -> bool:
        """Return whether the weights and activations of a stage fit into a device, as far as the table knows them."""
        if self.memory_bytes is None or not self.weights.activations:
            return True
        key = stage.name, degree, stage.pipeline, stage.loras, *[(one.height, one.width, one.frames) for one in shapes]
        has_room = self._rooms.get(key)
        if has_room is None:
            activation_bytes = self.weights.activations.num_bytes(stage, shapes, degree)
            needed = activation_bytes + num_bytes(self.weights.components(stage))
            has_room = self._rooms[key] = needed <= self.memory_bytes
        return has_room

    def observe_memory(self, work: Work, shapes: Sequence[Shape], *, fitted: bool, now_ns: int) -> bool:
        """Learn that a work on outputs of these shapes fitted, or did not; returns whether a prediction changes."""
        if fitted:
            is_new = bool(self._memory) and self._memory.fitted(work.stage, shapes, len(work.devices), work.sliced)
        else:
            is_new = self._memory.starved(work.stage, shapes, len(work.devices), work.sliced, now_ns)
        if is_new:
            self._has_changed()
        return is_new

    @property
    def forgets_ns(self) -> int | None:
        """Time at which the oldest memory limit is forgotten; None if there is none."""
        return self._memory.forgets_ns

    def forget_memory(self, now_ns: int) -> bool:
        """Forget the memory limits that are too old; returns whether there were any."""
        is_forgotten = bool(self._memory) and self._memory.forget(now_ns)
        if is_forgotten:
            self._has_changed()
        return is_forgotten

    def move_ns(self, request: Request, progress: Cursor, nodes: tuple[int, int]) -> int:
        """Return how long the state of a request takes from one of these nodes to the other, or within one."""
        return self._moves.ns(request, progress, nodes, self._measured.get(nodes))

    def observe_move(self, nodes: tuple[int, int], num_bytes: int, run_ns: int) -> None:
        """Learn how long states take from one of these nodes to the other; used if the table does not say it."""
        self._measured.setdefault(nodes, MeasuredLink()).observe(num_bytes, run_ns)

    def observe(self, stage: Stage, requests: Sequence[Request], degree: int, num_steps: int, run_ns: int) -> None:
        """Learn from the time of a work.
        A work with previews or additional passes is ignored: its time is not that of its steps alone.
        """
        for one in requests:
            if one.preview_every or one.passes != 1:
                return
        price = self._price_of(stage, requests, degree)
        expected_ns = price.base_ns * num_steps * (self._factor_alone(price) if price.alone else 1.0)
        if expected_ns <= 0 or run_ns <= 0:
            return
        ratio = run_ns / expected_ns
        place = price.key[:2]
        if price.alone:
            if self._corrections.observe_batch(price.key, ratio):
                self._has_changed()
            return
        before = self._corrections.usual(*place)
        has_changed = self._corrections.observe_single(price.key, ratio, price.unknown)
        if self._corrections.usual(*place) != before:
            self._has_changed()
        elif has_changed:
            self._has_changed(requests[0].shape.pixels)

    def has_measured(self, stage: Stage, requests: Sequence[Request], degree: int) -> bool:
        """Return whether such works are predicted by the times of earlier ones, not by a table alone."""
        price = self._price_of(stage, requests, degree)
        return (self._corrections.batch if price.alone else self._corrections.single)(price.key) is not None

    def knows(self, stage: Stage, request: Request) -> bool:
        """Return whether the time of such a work alone on one device was measured, for the table or since then.

        Raises UnknownCost.
        """
        if (request.guided or not stage.has_steps) and self._tabled.knows(stage, request.shape):
            return True
        return self._price(stage, (request.shape,), 1, (request.guided,)).key in self._corrections

    def prediction_error(self, stage: Stage) -> float:
        """Return the recent mean of |measured / predicted - 1| of batches on one device; 0 if none were measured."""
        return self._corrections.prediction_error((stage.pipeline, stage.name, 1))

    @property
    def deviations(self) -> Deviations:
        """Deviations of the latest works of one request from the table."""
        return self._corrections.deviations

    def correction(self, stage: Stage, requests: Sequence[Request], degree: int) -> float:
        """Return the measured over the tabled time of such works; 1 until one has been measured."""
        price = self._price_of(stage, requests, degree)
        return self._factor(price) if price.key in self._corrections else 1.0

    def corrected_table(self) -> CostTable:
        """Return the table with the times of single guided requests, medians and p99, as they are predicted now."""
        return replace(self.table, rows=tuple(self._corrected(row) for row in self.table.rows))

    def _corrected(self, row: CostRow) -> CostRow:
        factor = self._row_correction(row)
        p99_seconds = None if row.p99_seconds is None else row.p99_seconds * factor
        return replace(row, seconds=row.seconds * factor, p99_seconds=p99_seconds)

    def _row_correction(self, row: CostRow) -> float:
        """Return the measured over the tabled time of a row's works; 1 for a batch."""
        if row.batch != 1:
            return 1.0
        stage = self._tabled.graph(row.pipeline).stage(row.stage)
        learned = self._corrections.single(self._price_alone(stage, row.shape, row.degree, True).key)
        return 1.0 if learned is None else learned

    def is_profiled(self, stage: Stage, shape: Shape, degree: int = 1) -> bool:
        """See `TabledTimes.is_profiled`."""
        return self._tabled.is_profiled(stage, shape, degree)


_Key = tuple[object, ...]


@dataclass(slots=True)
class _Price:
    """The time of a work by the table, the key of its correction, and the corrected time as of `version`.

    `unknown` is the correction until one is measured. The price of a batch has the prices of its requests in `alone`
    instead, and that of a request with LoRAs or a cache the price of the request without them.
    """

    base_ns: float
    key: CorrectionKey
    unknown: float
    alone: tuple[_Price, ...]
    unit_ns: int = 0
    version: int = -1
