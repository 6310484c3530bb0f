"""The measured time of a stage at one degree: single outputs by their pixels, and batches."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from math import fsum
from statistics import fmean
from typing import TypeVar

from tilework.core.cost_row import CostRow
from tilework.core.request import Bounded, Shape, latent_pixels
from tilework.cost.batch_latency import BatchLatencyModel
from tilework.cost.rows import ShapeKey, batch_key

Points = Sequence[tuple[float, float]]
"""Pairs sorted by the first number, which is pixels or a number of requests."""

_MIN_RUNS = 3
_Key = TypeVar("_Key", float, tuple[ShapeKey, ...])


class Prices:
    """Seconds of a stage at one degree. Rows of equal pixels, or of the same batch, are averaged.

    Pixels of clips are counted in latent space (`Shape.latent_pixels`), where `frames_per_latent` frames are one.

    Single outputs: measured values at profiled numbers of pixels, and linear between them. Beyond them the nearest two
    points are extended, but not below half the nearest value; a single point is scaled in proportion to pixels.

    Batches: a measured batch, in any order or turned, takes the measured time, and a batch that the batch model knows
    takes the predicted time. For any other batch each request beyond the first saves time: n of one shape that take T_n
    together save (n T_1 - T_n) / (n - 1) each. This saving is linear between measured shapes and numbers, and constant
    beyond them. In a mix all requests save it, except the one that would save most. The further cost of mixing is
    fitted to the measured mixes: a fixed time, and a share of the sum of the times alone. Without a measured batch
    nothing is saved. Only a measured batch can take less than its longest request alone.
    """

    def __init__(
        self, rows: Sequence[CostRow], batch_model: BatchLatencyModel | None = None, frames_per_latent: int = 1
    ) -> None:
        self._batch_model = batch_model
        self._frames_per_latent = frames_per_latent
        self._alone = means((self._pixels(row.shape), row.seconds) for row in rows if row.batch == 1)
        measured = [row for row in rows if row.batch == 1 and (row.num_runs is None or row.num_runs >= _MIN_RUNS)]
        self._known = {self._pixels(row.shape) for row in measured}
        self._together = dict(means((batch_key(row.shapes), row.seconds) for row in rows if row.batch != 1))
        self._savings = self._measured_savings(rows) if self._alone else []
        self._terms = Bounded[tuple[ShapeKey, int], tuple[float, float]]()
        self._mixing = self._measured_mixing() if self._alone else (0.0, 0.0)

    def _pixels(self, shape: Shape) -> float:
        return shape.latent_pixels(self._frames_per_latent)

    @property
    def has_singles(self) -> bool:
        """True if single outputs have a price."""
        return bool(self._alone)

    def is_profiled(self, shape: Shape) -> bool:
        """Return whether an output of exactly this number of pixels was measured alone."""
        return any(pixels == self._pixels(shape) for pixels, _ in self._alone)

    def knows(self, shape: Shape) -> bool:
        """Return whether an output of exactly this number of pixels was measured alone at least three times."""
        return self._pixels(shape) in self._known

    def seconds(self, shapes: Sequence[Shape]) -> float | None:
        """Return the time of a single output or of a batch; None if neither it nor single outputs were measured."""
        if len(shapes) == 1:
            return extended(self._alone, self._pixels(shapes[0])) if self._alone else None
        batch = batch_key(shapes)
        measured = self._together.get(batch)
        if measured is not None or not self._alone:
            return measured
        one_by_one, together, longest = self._unmeasured(batch)
        learned = None if self._batch_model is None else self._batch_model.ratio(batch)
        if learned is not None:
            return max(longest, learned * one_by_one)
        if batch[0] != batch[-1]:
            fixed, share = self._mixing
            together += fixed + share * one_by_one
        return max(longest, together)

    def learned(self, shapes: Sequence[Shape], skipped: float) -> float | None:
        """Return the time of a batch with this share of patches skipped by a cache; None if no batch model knows it."""
        batch = batch_key(shapes)
        ratio = None if self._batch_model is None or not self._alone else self._batch_model.ratio(batch, skipped)
        return None if ratio is None else ratio * self._unmeasured(batch)[0]

    def _unmeasured(self, batch: tuple[ShapeKey, ...]) -> tuple[float, float, float]:
        """Return the sum of the times alone; the time together, without the cost of mixing; the longest time alone."""
        counts = Counter(batch)
        size = len(batch)
        one_by_one = longest = saved = 0.0
        most = -math.inf
        for shape, count in counts.items():
            terms = self._terms.get((shape, size))
            alone, saving = self._new_terms(shape, size) if terms is None else terms
            one_by_one += count * alone
            saved += count * saving
            longest, most = max(longest, alone), max(most, saving)
        return one_by_one, one_by_one - saved + most, longest

    def _new_terms(self, shape: ShapeKey, size: int) -> tuple[float, float]:
        """Return the time of an output alone, and the time that it saves in a batch of `size`."""
        pixels = latent_pixels(shape, self._frames_per_latent)
        savings = [(number, between(points, pixels)) for number, points in self._savings]
        terms = extended(self._alone, pixels), between(savings, size) if savings else 0.0
        self._terms[shape, size] = terms
        return terms

    def _measured_mixing(self) -> tuple[float, float]:
        """Return the extra time of mixes beyond what savings predict: a fixed time, and a share of the times alone."""
        beyond = []
        for batch, seconds in self._together.items():
            if batch[0] != batch[-1]:
                one_by_one, together, _ = self._unmeasured(batch)
                beyond.append((1 / seconds, one_by_one / seconds, 1 - together / seconds))
        return _fitted(beyond)

    def _measured_savings(self, rows: Sequence[CostRow]) -> list[tuple[int, Points]]:
        """Return the time that each request beyond the first saves, by batch size and number of pixels."""
        found: dict[int, list[tuple[float, float]]] = {}
        for row in rows:
            if isinstance(row.batch, int) and row.batch > 1:
                pixels = self._pixels(row.shape)
                saved = row.batch * extended(self._alone, pixels) - row.seconds
                found.setdefault(row.batch, []).append((pixels, saved / (row.batch - 1)))
        return [(size, means(points)) for size, points in sorted(found.items())]


def means(pairs: Iterable[tuple[_Key, float]]) -> list[tuple[_Key, float]]:
    """Return the mean value of each key, ascending by key."""
    gathered: dict[_Key, list[float]] = {}
    for key, value in pairs:
        gathered.setdefault(key, []).append(value)
    return [(key, fmean(gathered[key])) for key in sorted(gathered)]


def _fitted(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the a and b for which a x + b y is closest to z over points (x, y, z), by least squares.

    Where the points do not determine both, or one would be negative, it is left out. b may be negative if it is alone.
    Both are 0 without points.
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


def between(points: Points, at: float) -> float:
    """Return the value at `at`: linear between two points, constant beyond them."""
    index = bisect_left(points, (at, 0.0))
    if index == 0 or index == len(points):
        return points[0 if index == 0 else -1][1]
    return _on_line(points[index - 1], points[index], at)


def extended(points: Points, pixels: float) -> float:
    """Return the value for `pixels`: linear between two points and beyond, but at least half the nearest value."""
    if len(points) == 1:
        return points[0][1] * pixels / points[0][0]
    index = min(max(bisect_left(points, (pixels, 0.0)), 1), len(points) - 1)
    x0, y0 = points[index - 1]
    x1, y1 = points[index]
    value = _on_line((x0, y0), (x1, y1), pixels)
    if x0 <= pixels <= x1:
        return value
    return max(value, (y0 if pixels < x0 else y1) / 2)


def _on_line(first: tuple[float, float], second: tuple[float, float], at: float) -> float:
    """Return the value at `at` on the line through two points; exact at the points themselves."""
    x0, y0 = first
    x1, y1 = second
    return y1 if at == x1 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
