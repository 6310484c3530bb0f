"""The times of a cost table for each stage and degree, without corrections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import Stage
from tilework.core.pools import Pools
from tilework.core.request import Shape
from tilework.core.time import NS_PER_S
from tilework.cost.caching.savings import CacheSavings, Saving
from tilework.cost.prices import Prices
from tilework.cost.table import CostTable


class UnknownCost(LookupError):
    """The table has no row for this pipeline, or for this stage at such a low degree."""


class TabledTimes:
    """The times of a table: `Prices` for each stage and degree.

    A group of an unprofiled degree is as fast as the next lower profiled one. A stage without rows costs nothing; a
    pipeline without rows, or a stage at a degree below all profiled ones, raises UnknownCost.

    Steps with a cache take what `CacheSavings` says at their degree; where it knows nothing, as long as without.
    """

    def __init__(self, table: CostTable) -> None:
        self._prices = _prices(table)
        self._savings = _savings(table, self._prices)
        self._degrees = _degrees(self._prices)
        self._pipelines = {row.pipeline for row in table.rows}
        self._graphs = {pipeline: table.graph(pipeline) for pipeline in self._pipelines}
        self.pools = Pools(table.devices)
        self._common_degrees = {pipeline: self._common(graph) for pipeline, graph in self._graphs.items()}

    def graph(self, pipeline: str) -> Graph:
        """Return the graph of a pipeline. Raises UnknownCost."""
        graph = self._graphs.get(pipeline)
        if graph is None:
            known = ", ".join(sorted(self._pipelines))
            raise UnknownCost(f"pipeline {pipeline!r} is not in the cost table; it knows {known}")
        return graph

    def degrees(self, stage: Stage) -> tuple[int, ...]:
        """Return the degrees at which single requests were profiled, ascending. Raises UnknownCost.

        It is raised for an unknown pipeline. (1,) for a stage that costs nothing, or that has a cache of whole steps. A
        degree that was profiled in batches only is left out.
        """
        known = self._degrees.get((stage.pipeline, stage.name))
        if known is None:
            self._check_pipeline(stage)
            return (1,)
        return (1,) if stage.caches and not stage.is_parallel else known

    def common_degrees(self, pipeline: str) -> tuple[int, ...]:
        """See `CostModel.common_degrees`."""
        common = self._common_degrees.get(pipeline)
        return self._common(self.graph(pipeline)) if common is None else common

    def _common(self, graph: Graph) -> tuple[int, ...]:
        known = self._profiled(graph)
        widest = self.pools.widest(graph.pipeline)
        return known if widest is None else tuple(degree for degree in known if degree <= widest) or (1,)

    def _profiled(self, graph: Graph) -> tuple[int, ...]:
        if len(graph.stepped) == 1:
            return self.degrees(graph.stepped[0])
        common = [set(self.degrees(stage)) for stage in graph.stepped]
        return tuple(sorted(set.intersection(*common))) or (1,) if common else (1,)

    def base_ns(self, stage: Stage, shapes: Sequence[Shape], degree: int) -> float:
        """Return the time of one step or request of these shapes together. Raises UnknownCost."""
        saving = self.saving(stage, shapes, degree)
        return self._whole_ns(stage, shapes, degree) * (1.0 if saving is None else saving.time)

    def saving(self, stage: Stage, shapes: Sequence[Shape], degree: int) -> Saving | None:
        """Return what the cache of a stage saves of such steps; None if it has none, or if it is not known."""
        if not stage.caches:
            return None
        savings = self._savings.get((stage.pipeline, stage.name, degree))
        return None if savings is None else savings.of(stage.caches[0], shapes)

    def _whole_ns(self, stage: Stage, shapes: Sequence[Shape], degree: int) -> float:
        """Return the same without a cache."""
        self._check_pipeline(stage)
        prices = self._prices.get((stage.pipeline, stage.name, degree))
        seconds = None if prices is None else prices.seconds(shapes)
        if seconds is not None:
            return seconds * NS_PER_S
        profiled = self._degrees.get((stage.pipeline, stage.name))
        narrower = max((known for known in profiled or () if known < degree), default=None)
        if narrower is not None:
            return self._whole_ns(stage, shapes, narrower)
        if profiled is not None:
            raise UnknownCost(f"{stage} was not profiled at degree {degree}, nor below it, at batch {len(shapes)} or 1")
        return 0.0

    def is_profiled(self, stage: Stage, shape: Shape, degree: int) -> bool:
        """Return whether a row has exactly this number of pixels, so that nothing is interpolated."""
        prices = self._prices.get((stage.pipeline, stage.name, degree))
        return prices is not None and prices.is_profiled(shape)

    def knows(self, stage: Stage, shape: Shape) -> bool:
        """Return whether an output of exactly this number of pixels was measured alone on one device often enough."""
        prices = self._prices.get((stage.pipeline, stage.name, 1))
        return prices is not None and prices.knows(shape)

    def _check_pipeline(self, stage: Stage) -> None:
        if stage.pipeline not in self._pipelines:
            self.graph(stage.pipeline)


_Key = tuple[str, str, int]
"""Pipeline, name of the stage, degree."""


def _prices(table: CostTable) -> dict[_Key, Prices]:
    gathered: dict[_Key, list[CostRow]] = {}
    for row in table.rows:
        if row.cache is None:
            gathered.setdefault((row.pipeline, row.stage, row.degree), []).append(row)
    batch_models = {
        (pipeline, table.graph(pipeline).stepped[0].name, 1): model for pipeline, model in table.batch_models.items()
    }
    return {
        key: Prices(rows, batch_models.get(key), table.graph(key[0]).frames_per_latent)
        for key, rows in gathered.items()
    }


def _savings(table: CostTable, prices: Mapping[_Key, Prices]) -> dict[_Key, CacheSavings]:
    gathered: dict[_Key, list[CostRow]] = {}
    for row in table.rows:
        if row.cache is not None:
            gathered.setdefault((row.pipeline, row.stage, row.degree), []).append(row)
    return {
        key: CacheSavings(rows, prices[key], table.graph(key[0]).frames_per_latent) for key, rows in gathered.items()
    }


def _degrees(prices: Mapping[_Key, Prices]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the degrees with a price for single requests, ascending, by pipeline and stage; empty if there is none."""
    found: dict[tuple[str, str], set[int]] = {}
    for (pipeline, stage, degree), one in prices.items():
        found.setdefault((pipeline, stage), set()).update({degree} if one.has_singles else ())
    return {key: tuple(sorted(degrees)) for key, degrees in found.items()}
