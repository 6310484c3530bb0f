"""Time of steps with a cache, relative to the same steps without: from the rows that were measured with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum

from tilework.core.cache import CacheChoice
from tilework.core.cost_row import CostRow
from tilework.core.request import Shape
from tilework.cost.prices import Prices, between, means
from tilework.cost.rows import ShapeKey, batch_key


@dataclass(frozen=True, slots=True)
class Saving:
    """Saving of a cache: steps with it take the share `time` of what they take without.

    `skipped` is the share of patches of blocks that is not computed: the mean of many requests, whose standard
    deviation is `skipped_std`. The share of time may be above 1 where little is skipped.
    """

    time: float
    skipped: float
    skipped_std: float

    def with_skipped(self, skipped: float) -> float:
        """Return the share of time of a request of which `skipped` is skipped; savings are in proportion to that.

        At least a twentieth, since what lies outside of blocks is always computed.
        """
        saved = (1.0 - self.time) * skipped / self.skipped if self.skipped else 1.0 - self.time
        return max(1.0 - saved, 0.05)


class CacheSavings:
    """The savings of steps of a stage at one degree, from those of its `rows` that have a cache.

    A cache without rows gets the savings of its kind's rows with the largest threshold below its own, since it skips no
    less; without such rows nothing is known. Single requests: linear in pixels between rows, constant beyond them.

    A measured batch takes the measured time. Any other batch takes what the batch model of `prices` predicts for the
    patches that remain to compute, if that model has learned from batches with caches. Otherwise a batch saves the
    share of time that its requests save one by one.
    """

    def __init__(self, rows: Iterable[CostRow], prices: Prices, frames_per_latent: int) -> None:
        self._prices = prices
        self._frames_per_latent = frames_per_latent
        alone: dict[CacheChoice, list[tuple[float, CostRow]]] = {}
        self._together: dict[tuple[CacheChoice, tuple[ShapeKey, ...]], CostRow] = {}
        for row in rows:
            if row.cache is None:
                continue
            if row.batch == 1:
                alone.setdefault(row.cache, []).append((self._pixels(row.shape), row))
            else:
                self._together[row.cache, batch_key(row.shapes)] = row
        self._points = {choice: self._points_of(rows) for choice, rows in alone.items()}

    def of(self, choice: CacheChoice, shapes: Sequence[Shape]) -> Saving | None:
        """Return what a cache saves of steps of these outputs together; None if it is not known."""
        known = self._nearest(choice)
        if known is None:
            return None
        return self._at(known, shapes[0]) if len(shapes) == 1 else self._of_batch(known, shapes)

    def _of_batch(self, known: CacheChoice, shapes: Sequence[Shape]) -> Saving:
        whole = self._prices.seconds(shapes)
        assert whole is not None, "rows with a cache are of stages that have some without"
        if (row := self._together.get((known, batch_key(shapes)))) is not None:
            return Saving(row.seconds / whole, row.skipped, row.skipped_std)
        each = [(self._alone_seconds(shape), self._pixels(shape), self._at(known, shape)) for shape in shapes]
        pixels = fsum(weight for _, weight, _ in each)
        skipped = fsum(weight * one.skipped for _, weight, one in each) / pixels
        std = fsum(weight * one.skipped_std for _, weight, one in each) / pixels
        learned = self._prices.learned(shapes, skipped)
        if learned is not None:
            return Saving(learned / whole, skipped, std)
        one_by_one = fsum(seconds for seconds, _, _ in each)
        return Saving(fsum(seconds * one.time for seconds, _, one in each) / one_by_one, skipped, std)

    def _nearest(self, choice: CacheChoice) -> CacheChoice | None:
        return max((one for one in self._points if one.kind is choice.kind and one <= choice), default=None)

    def _at(self, choice: CacheChoice, shape: Shape) -> Saving:
        return Saving(*(between(points, self._pixels(shape)) for points in self._points[choice]))

    def _points_of(self, rows: Sequence[tuple[float, CostRow]]) -> tuple[list[tuple[float, float]], ...]:
        """Return points by pixels: of shares of time, shares skipped, and the standard deviations of these."""
        return (
            means((pixels, row.seconds / self._alone_seconds(row.shape)) for pixels, row in rows),
            means((pixels, row.skipped) for pixels, row in rows),
            means((pixels, row.skipped_std) for pixels, row in rows),
        )

    def _alone_seconds(self, shape: Shape) -> float:
        seconds = self._prices.seconds((shape,))
        assert seconds is not None, "rows with a cache are of stages that have some without"
        return seconds

    def _pixels(self, shape: Shape) -> float:
        return shape.latent_pixels(self._frames_per_latent)
