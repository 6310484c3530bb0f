"""Rows of cost tables: what tells two of them apart, what several devices measured as one, what is not yet measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeVar

from tilework.core.request import Shape
from tilework.core.wire import CostRow
from tilework.core.work import DECODE, DIFFUSE, ENCODE

Place = tuple[str, str, Shape, int, int | tuple[Shape, ...], str]
_Known = TypeVar("_Known", int, float)


def place_of(row: CostRow) -> Place:
    """What was measured: pipeline, stage, shape, degree, batch and link."""
    return row.pipeline, row.stage, row.shape, row.degree, row.batch, row.link


def merge_rows(rows: Iterable[CostRow]) -> tuple[CostRow, ...]:
    """One row per place, in the order in which the places first appear, from what several groups measured there.

    Their medians are averaged, since nobody knows which of them a work will run on. Of p99 and peak bytes the largest
    is kept, of the numbers of runs the smallest.
    """
    gathered: dict[Place, list[CostRow]] = {}
    for row in rows:
        gathered.setdefault(place_of(row), []).append(row)
    return tuple(_merge(members) for members in gathered.values())


def missing_shapes(rows: Iterable[CostRow], pipeline: str, shapes: Sequence[Shape], degree: int) -> tuple[Shape, ...]:
    """Those of `shapes` for which a stage has no row at this degree; encode and decode are wanted at degree 1 only."""
    stages = (ENCODE, DIFFUSE, DECODE) if degree == 1 else (DIFFUSE,)
    known = {(row.stage, row.shape) for row in _single(rows, pipeline, degree)}
    return tuple(shape for shape in shapes if any((stage, shape) not in known for stage in stages))


def _single(rows: Iterable[CostRow], pipeline: str, degree: int) -> Iterable[CostRow]:
    return (row for row in rows if (row.pipeline, row.degree, row.batch) == (pipeline, degree, 1))


def _merge(members: list[CostRow]) -> CostRow:
    seconds = fmean(row.seconds for row in members)
    p99s = _known(row.p99_seconds for row in members)
    return replace(
        members[0],
        seconds=seconds,
        p99_seconds=max(*p99s, seconds) if p99s else None,  # The mean may be rounded up beyond it.
        peak_bytes=max(_known(row.peak_bytes for row in members), default=None),
        num_runs=min(_known(row.num_runs for row in members), default=None),
    )


def _known(values: Iterable[_Known | None]) -> list[_Known]:
    return [value for value in values if value is not None]
