"""Rows of cost tables: their keys, merging the rows of several devices, and finding the batches without a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeVar

from tilework.core.cache import CacheChoice
from tilework.core.cost_row import Batch, CostRow
from tilework.core.graph.graph import Graph
from tilework.core.request import Shape

RowKey = tuple[str, str, Shape, int, int | Batch, str, CacheChoice | None]
ShapeKey = tuple[int, int, int]
"""Height, width and frames of one output of a batch. A plain tuple, because it is hashed and sorted often."""

_Known = TypeVar("_Known", int, float)


def row_key(row: CostRow) -> RowKey:
    """Return the key of a row: pipeline, stage, shape, degree, batch, link and cache."""
    return row.pipeline, row.stage, row.shape, row.degree, row.batch, row.link, row.cache


def batch_key(shapes: Iterable[Shape]) -> tuple[ShapeKey, ...]:
    """Return the key of a batch: equal for any order of its shapes, and when all of them are turned on their side.

    A batch in which only some are turned has another key, since its patches are smaller.
    """
    given = sorted([(one.height, one.width, one.frames) for one in shapes])
    turned = sorted([(width, height, frames) for height, width, frames in given])
    return tuple(min(given, turned))


def merge_rows(rows: Iterable[CostRow]) -> tuple[CostRow, ...]:
    """Return one row per key, in the order in which the keys first appear, from the rows of several groups.

    Medians are averaged, since a work may run on any of the groups. Of p99 and of bytes the largest is kept, of the
    numbers of runs the smallest.
    """
    gathered: dict[RowKey, list[CostRow]] = {}
    for row in rows:
        gathered.setdefault(row_key(row), []).append(row)
    return tuple(_merge(alike) for alike in gathered.values())


def missing_batches(rows: Iterable[CostRow], graph: Graph, batches: Sequence[Batch], degree: int) -> tuple[Batch, ...]:
    """Return the batches without a measured row of some stage at this degree, of the stages that can be run so."""
    place = graph.pipeline, degree, None
    known = {
        (row.stage, *sorted(row.shapes))
        for row in rows
        if (row.pipeline, row.degree, row.cache) == place and not row.is_predicted
    }
    return tuple(
        batch
        for batch in batches
        if any(
            (stage.name, *sorted(batch)) not in known
            for stage in graph.stages
            if stage.spec.takes(batch) and (degree == 1 or stage.is_parallel)
        )
    )


def _merge(rows: list[CostRow]) -> CostRow:
    seconds = fmean(row.seconds for row in rows)
    p99s = _known(row.p99_seconds for row in rows)
    return replace(
        rows[0],
        seconds=seconds,
        p99_seconds=max(*p99s, seconds) if p99s else None,  # The mean may be rounded up beyond p99.
        peak_bytes=max(_known(row.peak_bytes for row in rows), default=None),
        activation_bytes=max(_known(row.activation_bytes for row in rows), default=None),
        state_bytes=max(_known(row.state_bytes for row in rows), default=None),
        num_runs=min(_known(row.num_runs for row in rows), default=None),
        skipped=fmean(row.skipped for row in rows),
        skipped_std=fmean(row.skipped_std for row in rows),
    )


def _known(values: Iterable[_Known | None]) -> list[_Known]:
    return [value for value in values if value is not None]
