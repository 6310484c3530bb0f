"""Predicted durations by a cost table, corrected by what works take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilework.core.preview import preview_shape
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_S
from tilework.core.wire import CostRow
from tilework.core.work import DECODE, DIFFUSE, Group, StageId, Work
from tilework.cost.corrections import Corrections, Place
from tilework.cost.memory import MemoryLimits
from tilework.cost.prices import Prices
from tilework.cost.table import CostTable

_UNGUIDED = 0.5
_MOST_PRICES = 10_000  # Kept at hand.


class UnknownCost(LookupError):
    """No row says what this pipeline costs, not even for another shape."""


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
