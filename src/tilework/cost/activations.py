"""The bytes that a work needs on a device beyond the weights of its stage, from the rows of a cost table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilework.core.cost_row import CostRow
from tilework.core.graph.stage import Stage
from tilework.core.request import Bounded, Shape, latent_pixels
from tilework.cost.prices import Points, between, extended, means
from tilework.cost.rows import ShapeKey, batch_key
from tilework.cost.table import CostTable


class Activations:
    """The activations of all stages, on each of the devices that share a work; 0 where no row says.

    A stage has at least those that its author has declared (`StageSpec.memory_bytes`).

    Sizes between rows are interpolated in latent pixels as seconds are (see `Prices`). A degree without rows of single
    requests takes those of the next lower degree; below all of them nothing is known.

    A measured batch takes what was measured, in any order or turned. In any other batch of n requests, each counts with
    an n-th of a batch of its own size. The ratio of such a batch to one request is linear in n between measured
    batches, in proportion to n beyond them, and constant in pixels beyond measured sizes. Without rows of batches,
    requests take the sum of what they take alone.
    """

    def __init__(self, table: CostTable) -> None:
        rows = table.rows
        gathered: dict[tuple[str, str, int], list[tuple[CostRow, int]]] = {}
        for row in rows:
            if row.activation_bytes is not None:
                key = row.pipeline, row.stage, row.degree
                gathered.setdefault(key, []).append((row, row.activation_bytes))
        self._known = {
            key: _AtDegree(found, table.graph(key[0]).frames_per_latent)
            for key, found in gathered.items()
            if any(r.batch == 1 for r, _ in found)
        }
        self._degrees: dict[tuple[str, str], list[int]] = {}
        for pipeline, stage, degree in sorted(self._known):
            self._degrees.setdefault((pipeline, stage), []).append(degree)
        self._declared = max((one.memory_bytes for each in table.graphs.values() for one in each.specs), default=0)
        self.largest = max((row.activation_bytes or 0 for row in rows), default=0)
        self.largest = max(self.largest, self._declared)
        self._cached = Bounded[tuple[object, ...], int]()

    def __bool__(self) -> bool:
        """Return whether any bytes are known."""
        return bool(self._known) or self._declared > 0

    def num_bytes(self, stage: Stage, shapes: Sequence[Shape], degree: int) -> int:
        """Return the bytes that a work on outputs of these shapes needs on each of `degree` devices."""
        degrees = self._degrees.get((stage.pipeline, stage.name))
        if degrees is None:
            return stage.spec.memory_bytes
        sizes = [(one.height, one.width, one.frames) for one in shapes]
        key = stage.name, degree, stage.pipeline, *sizes
        found = self._cached.get(key)
        if found is None:
            profiled = max((one for one in degrees if one <= degree), default=None)
            known = None if profiled is None else self._known[stage.pipeline, stage.name, profiled]
            measured = 0 if known is None else known.num_bytes(batch_key(shapes))
            found = max(measured, stage.spec.memory_bytes)
            self._cached[key] = found
        return found


class _AtDegree:
    """The activations of a stage at one degree, of which at least one row is of a single request."""

    def __init__(self, rows: Sequence[tuple[CostRow, int]], frames_per_latent: int) -> None:
        self._frames_per_latent = frames_per_latent
        self._alone = means((self._pixels(row.shape), float(size)) for row, size in rows if row.batch == 1)
        self._together = dict(means((batch_key(row.shapes), float(size)) for row, size in rows if row.batch != 1))
        self._growth = self._measured_growth(rows)

    def _pixels(self, shape: Shape) -> float:
        return shape.latent_pixels(self._frames_per_latent)

    def num_bytes(self, batch: tuple[ShapeKey, ...]) -> int:
        if len(batch) > 1 and batch in self._together:
            return round(self._together[batch])
        return round(sum(self._part(latent_pixels(size, self._frames_per_latent), len(batch)) for size in batch))

    def _part(self, pixels: float, number: int) -> float:
        """Return the bytes of one of `number` requests of this size."""
        alone = extended(self._alone, pixels)
        if number == 1:
            return alone
        points = [(1, 1.0), *((size, between(ratios, pixels)) for size, ratios in self._growth.items())]
        most, ratio = points[-1]
        ratio = ratio * number / most if number > most else between(points, number)
        return alone * ratio / number

    def _measured_growth(self, rows: Sequence[tuple[CostRow, int]]) -> Mapping[int, Points]:
        """Return the ratio of a batch's bytes to one request's, by number of requests of one size and by pixels."""
        found: dict[int, list[tuple[float, float]]] = {}
        for row, size in rows:
            pixels = self._pixels(row.shape)
            alone = extended(self._alone, pixels)
            if isinstance(row.batch, int) and row.batch > 1 and alone:
                found.setdefault(row.batch, []).append((pixels, size / alone))
        return {number: means(found[number]) for number in sorted(found)}
