"""Costs of a model: the known ones, those that must still be measured, and predictions until then."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tilework.core.cost_row import Batch, CostRow
from tilework.core.graph.stage import Stage
from tilework.core.model import ModelInfo
from tilework.core.request import Shape
from tilework.cost.profile import ProfileKey
from tilework.cost.rows import missing_batches, row_key
from tilework.cost.table import CostTable, graphs_of
from tilework.runtime.models.costs import (
    CostCache,
    Measurer,
    calibration_batches,
    calibration_shapes,
    earlier_costs,
    implausible_batches,
    measure,
    save,
)

Part = tuple[Batch, int]
"""A batch and a degree, which are measured at once."""

MARGIN = 2.0
"""Factor on predicted times. Attention grows with the square of the pixels, but is only a part of a stage."""
_TIMED_S, _MOST_TIMED = 1.0, 5  # See `worker.calibrate`.


@dataclass(slots=True, kw_only=True)
class ModelCosts:
    """Costs of a model that has run.
    They are those of every stage at the calibration shapes and each of `degrees`, and of a step of the calibration
    batches (unless `with_batches` is false), except where one cannot run.

    `earlier` is what earlier starts have measured; `shared` rows are those of stages that were measured for another
    model, and `tried` rows those of its first run (`warm_up`). Measured rows are saved in the `cache` for the next
    start, except for implausible rows, which that start measures again. `num_all` parts were missing at first.
    """

    info: ModelInfo
    key: ProfileKey
    degrees: Sequence[int]
    cache: CostCache | None
    with_batches: bool
    earlier: CostTable
    tried: Sequence[CostRow] = ()
    shared: Sequence[CostRow] = ()
    num_all: int = field(init=False)
    _fresh: list[CostRow] = field(default_factory=list, init=False)
    _done: set[Part] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.num_all = len(self.missing)

    @staticmethod
    def of(
        measurer: Measurer,
        info: ModelInfo,
        degrees: Sequence[int],
        cache: CostCache | None,
        *,
        with_batches: bool,
        tried: Sequence[CostRow] = (),
    ) -> ModelCosts:
        """Return the costs known before any measurement; none, with a warning in the log, if the cache is unusable."""
        key = measurer.profile_key
        return ModelCosts(
            info=info,
            key=key,
            degrees=degrees,
            cache=cache,
            with_batches=with_batches,
            earlier=earlier_costs(cache, key, info.graph) or key.table(()),
            tried=tried,
        )

    @property
    def missing(self) -> list[Part]:
        """Parts that must still be measured: sizes from the smallest on, each at all its degrees, and then batches."""
        known = (*self.earlier.rows, *self.shared)
        graph = self.info.graph
        singles = tuple((shape,) for shape in calibration_shapes(self.info))
        lacking = {degree: missing_batches(known, graph, singles, degree) for degree in self.degrees}
        missing: list[Part] = [(one, degree) for one in singles for degree in self.degrees if one in lacking[degree]]
        batches = calibration_batches(self.info) if self.with_batches else ()
        missing += [(batch, 1) for batch in missing_batches(known, graph, batches, 1)]
        return [part for part in missing if part not in self._done]

    async def measure(
        self, measurer: Measurer, parts: Iterable[Part], on_measured: Callable[[], object] = lambda: None
    ) -> None:
        """Measure these of the missing parts, and save their costs; `on_measured` is called after each."""
        fresh: list[CostRow] = []
        begun: deque[Part] = deque()

        def each() -> Iterator[Part]:
            for part in parts:
                begun.append(part)
                yield part

        try:
            async for measured in measure(measurer, self.info.name, each(), shared=self.shared):
                self._done.add(begun.popleft())
                fresh += measured
                on_measured()
        finally:
            self._fresh += fresh
            implausible = implausible_batches(fresh)
            save(self.cache, self.key, tuple(row for row in fresh if row.shapes not in implausible))

    @property
    def measured(self) -> tuple[CostRow, ...]:
        """Rows that were measured, now or earlier, also of shared stages."""
        return (*self._fresh, *self.earlier.rows, *self.shared)

    def table(self) -> CostTable | None:
        """Return the known rows, and predictions for missing ones; None if nothing is known, and nothing runs."""
        rows = {row_key(row): row for row in self.measured}
        predicted = [self._predicted(stage, part) for part in self.missing for stage in self._stages(part)]
        rows = {row_key(row): row for row in predicted if row is not None} | rows
        rows = rows or {row_key(row): row for row in self.tried}
        if not rows:
            return None
        table = self.key.table(tuple(rows.values()), self.earlier.batch_models)
        return replace(table, graphs=graphs_of(self.info.graph))

    def _pixels(self, shape: Shape) -> float:
        """Return the pixels of its latents, to which times are in proportion."""
        return shape.latent_pixels(self.info.graph.frames_per_latent)

    def _stages(self, part: Part) -> list[Stage]:
        batch, degree = part
        return [one for one in self.info.graph.stages if one.spec.takes(batch) and (degree == 1 or one.is_parallel)]

    def _predicted(self, stage: Stage, part: Part) -> CostRow | None:
        """Return the row of the next smaller size, with its time in proportion to pixels, times `MARGIN`.

        None for a batch, which its requests alone predict well enough, and at a degree at which nothing was measured.
        """
        (shape, *others), degree = part
        base = None if others else self._base(stage, shape, degree)
        if base is None:
            return None
        ratio = self._pixels(shape) / self._pixels(base.shape)
        seconds = base.seconds * (ratio * MARGIN if ratio > 1 else 1.0)
        return replace(
            base,
            height=shape.height,
            width=shape.width,
            frames=shape.frames,
            seconds=seconds,
            p99_seconds=seconds,
            peak_bytes=None,
            activation_bytes=None,
            state_bytes=None if base.state_bytes is None else round(base.state_bytes * ratio),
            num_runs=0,
        )

    def _base(self, stage: Stage, shape: Shape, degree: int) -> CostRow | None:
        """Return the row of the largest size, up to this one, that was measured, or else was tried."""
        place = stage.name, degree, 1, None
        for rows in (self.measured, self.tried):
            known = [
                row
                for row in rows
                if (row.stage, row.degree, row.batch, row.cache) == place and row.shape.pixels <= shape.pixels
            ]
            if known:
                return max(known, key=lambda row: row.shape.pixels)
        return None

    def measuring_s(self, part: Part) -> float:
        """Return about how long a part takes to measure: each stage runs to warm up, and a few times to be timed."""
        batch = part[0]
        pixels = sum(map(self._pixels, part[0]))
        found = 0.0
        for stage in self._stages(part):
            base = self._base(stage, batch[-1], 1) or self._base(stage, batch[0], 1)
            if base is not None:
                run_s = base.seconds * pixels / self._pixels(base.shape)
                found += 2 * run_s + max(run_s, min(_MOST_TIMED * run_s, _TIMED_S))
        return found
