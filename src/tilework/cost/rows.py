"""Rows of cost tables: what tells two of them apart, what several devices measured as one, what is not yet measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeVar

from tilework.core.request import Shape
from tilework.core.wire import Batch, CostRow
from tilework.core.work import DIFFUSE, STAGES

Place = tuple[str, str, Shape, int, int | Batch, str]
Member = tuple[int, int, int]
"""Height, width and frames of one output of a batch."""

_Known = TypeVar("_Known", int, float)


def place_of(row: CostRow) -> Place:
    """What was measured: pipeline, stage, shape, degree, batch and link."""
    return row.pipeline, row.stage, row.shape, row.degree, row.batch, row.link


def members_of(shapes: Iterable[Shape]) -> tuple[Member, ...]:
    """The same for batches that cost the same: of another order, or with every member turned on its side.

    A batch of which some are turned is another one, since its patches are smaller.
    """
    members = sorted([(one.height, one.width, one.frames) for one in shapes])
    turned = sorted([(width, height, frames) for height, width, frames in members])
    return tuple(min(members, turned))


def merge_rows(rows: Iterable[CostRow]) -> tuple[CostRow, ...]:
    """One row per place, in the order in which the places first appear, from what several groups measured there.

    Their medians are averaged, since nobody knows which of them a work will run on. Of p99 and peak bytes the largest
    is kept, of the numbers of runs the smallest.
    """
    gathered: dict[Place, list[CostRow]] = {}
    for row in rows:
        gathered.setdefault(place_of(row), []).append(row)
    return tuple(_merge(members) for members in gathered.values())


def missing_batches(rows: Iterable[CostRow], pipeline: str, batches: Sequence[Batch], degree: int) -> tuple[Batch, ...]:
    """Those of which a stage has no row at this degree; encode and decode are wanted of single outputs at degree 1."""
    known = {(row.stage, *sorted(row.shapes)) for row in rows if (row.pipeline, row.degree) == (pipeline, degree)}
    return tuple(
        batch
        for batch in batches
        for stages in [STAGES if len(batch) == degree == 1 else (DIFFUSE,)]
        if any((stage, *sorted(batch)) not in known for stage in stages)
    )


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
