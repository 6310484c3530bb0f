"""What a stage costs at one degree, by the rows of a table: single outputs by their pixels, and batches."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from math import fsum
from statistics import fmean
from typing import TypeVar

from tilework.core.request import Shape
from tilework.core.wire import CostRow
from tilework.cost.batch_latency import BatchLatencyModel
from tilework.cost.rows import Member, members_of

_Points = Sequence[tuple[int, float]]
"""Sorted by the first, which is pixels, or a number of members."""

_ENOUGH = 3
_MOST_TERMS = 10_000  # Clients choose the shapes.
_Key = TypeVar("_Key", int, tuple[Member, ...])


class Prices:
    """Seconds of a stage at one degree; rows that agree in what is told apart are averaged.

    Single outputs are exact at profiled numbers of pixels, and linear between them. Beyond, the nearest two points are
    extended, never below half the nearest value; a single point is scaled in proportion to pixels.

    A batch that was measured, turned or in another order, is as dear as that was, and one that the batch_model knows as
    dear as that says. Of any other is known what each member saves beyond the first: n of one shape that take T_n
    together save (n T_1 - T_n) / (n - 1) each, which is linear between measured shapes and numbers, and constant beyond
    them. Of a mix all save it but the one that would save most. What mixing takes beyond this is fitted to the measured
    mixes: a fixed time, and a share of the members' time one by one. Where no batch was measured, nothing is saved.
    Only a measured batch can be cheaper than its dearest member.
    """

    def __init__(self, rows: Sequence[CostRow], batch_model: BatchLatencyModel | None = None) -> None:
        self._batch_model = batch_model
        self._alone = _means((row.shape.pixels, row.seconds) for row in rows if row.batch == 1)
        self._known = {row.shape.pixels for row in rows if row.batch == 1 and (row.num_runs or _ENOUGH) >= _ENOUGH}
        self._together = dict(_means((members_of(row.shapes), row.seconds) for row in rows if row.batch != 1))
        self._savings = self._measured_savings(rows) if self._alone else []
        self._terms: dict[tuple[Member, int], tuple[float, float]] = {}
        self._mixing = self._measured_mixing() if self._alone else (0.0, 0.0)

    @property
    def has_singles(self) -> bool:
        """Whether single outputs have a price."""
        return bool(self._alone)

    def is_profiled(self, shape: Shape) -> bool:
        """Whether one of this very number of pixels was measured alone."""
        return any(pixels == shape.pixels for pixels, _ in self._alone)

    def knows(self, shape: Shape) -> bool:
        """Whether one of this very number of pixels was measured alone at least thrice: once may be chance."""
        return shape.pixels in self._known

    def seconds(self, shapes: Sequence[Shape]) -> float | None:
        """Of a single output, or of a batch; None where neither that nor single ones were measured."""
        if len(shapes) == 1:
            return _extended(self._alone, shapes[0].pixels) if self._alone else None
        members = members_of(shapes)
        measured = self._together.get(members)
        if measured is not None or not self._alone:
            return measured
        one_by_one, together, dearest = self._unmeasured(members)
        learned = None if self._batch_model is None else self._batch_model.ratio(members)
        if learned is not None:
            return max(dearest, learned * one_by_one)
        if members[0] != members[-1]:
            fixed, share = self._mixing
            together += fixed + share * one_by_one
        return max(dearest, together)

    def _unmeasured(self, members: tuple[Member, ...]) -> tuple[float, float, float]:
        """One by one; together, but for what mixing costs; and the dearest one alone."""
        counts, size = Counter(members), len(members)
        one_by_one = dearest = saved = 0.0
        most = -math.inf
        for member, count in counts.items():
            terms = self._terms.get((member, size))
            alone, saving = self._member_terms(member, size) if terms is None else terms
            one_by_one += count * alone
            saved += count * saving
            dearest, most = max(dearest, alone), max(most, saving)
        return one_by_one, one_by_one - saved + most, dearest

    def _member_terms(self, member: Member, size: int) -> tuple[float, float]:
        """What one costs alone, and what it saves in a batch of `size`."""
        if len(self._terms) >= _MOST_TERMS:
            self._terms.clear()
        height, width, frames = member
        pixels = height * width * frames
        savings = [(number, _between(points, pixels)) for number, points in self._savings]
        terms = _extended(self._alone, pixels), _between(savings, size) if savings else 0.0
        self._terms[member, size] = terms
        return terms

    def _measured_mixing(self) -> tuple[float, float]:
        """What mixes take beyond what is foretold of them: a fixed time, and a share of their members one by one."""
        beyond = []
        for members, seconds in self._together.items():
            if members[0] != members[-1]:
                one_by_one, together, _ = self._unmeasured(members)
                beyond.append((1 / seconds, one_by_one / seconds, 1 - together / seconds))
        return _fitted(beyond)

    def _measured_savings(self, rows: Sequence[CostRow]) -> list[tuple[int, _Points]]:
        """By the size of the batch, for each number of pixels."""
        found: dict[int, list[tuple[int, float]]] = {}
        for row in rows:
            if isinstance(row.batch, int) and row.batch > 1:
                pixels = row.shape.pixels
                saved = row.batch * _extended(self._alone, pixels) - row.seconds
                found.setdefault(row.batch, []).append((pixels, saved / (row.batch - 1)))
        return [(size, _means(points)) for size, points in sorted(found.items())]


def _means(pairs: Iterable[tuple[_Key, float]]) -> list[tuple[_Key, float]]:
    gathered: dict[_Key, list[float]] = {}
    for key, value in pairs:
        gathered.setdefault(key, []).append(value)
    return [(key, fmean(gathered[key])) for key in sorted(gathered)]


def _fitted(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The a and b with which a x + b y comes closest to z, by least squares; 0 and 0 of no (x, y, z).

    Where the points do not tell both, or one would be negative, it is left out. Then b alone may be negative.
    """
    xx, xy, yy, xz, yz = (
        fsum(point[first] * point[second] for point in points)
        for first, second in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    )
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a, b = (yy * xz - xy * yz) / determinant, (xx * yz - xy * xz) / determinant
        if a >= 0:
            return (a, b) if b >= 0 else (max(xz / xx, 0.0), 0.0)
    return 0.0, yz / yy if points else 0.0


def _between(points: _Points, at: float) -> float:
    """Linear between two points, constant beyond them."""
    index = bisect_left(points, (at, 0.0))
    if index == 0 or index == len(points):
        return points[0 if index == 0 else -1][1]
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _extended(points: _Points, pixels: float) -> float:
    if len(points) == 1:
        return points[0][1] * pixels / points[0][0]
    index = min(max(bisect_left(points, (pixels, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    value = y0 + (y1 - y0) * (pixels - x0) / (x1 - x0)
    if x0 <= pixels <= x1:
        return value
    return max(value, (y0 if pixels < x0 else y1) / 2)
