"""Predicts how long a batch takes, relative to its requests one by one; learned from measured batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import mul
from typing import Any

from tilework.core.packing import choose_patch
from tilework.core.request import Shape
from tilework.cost.rows import ShapeKey


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a network: `weights` has a row for each output, with one weight for each input."""

    weights: tuple[tuple[float, ...], ...]
    biases: tuple[float, ...]

    def apply(self, inputs: Sequence[float]) -> list[float]:
        return [sum(map(mul, row, inputs), bias) for row, bias in zip(self.weights, self.biases, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLatencyModel:
    """A small neural network as plain numbers: it needs no library, and predicts the same wherever a log is replayed.

    Its inputs are those of `inputs_of`. Its output is the logarithm of the time of a batch over the sum of the times of
    its requests alone. Between two `layers` negative values become 0. It can predict batches of up to `max_batch`
    requests and `max_patches` patches whose sizes are among `shapes`, upright or on their side, and of which a cache
    skips at most `max_skipped`. It was learned from `num_rows` measured batches; `error` is the mean of
    |predicted / measured - 1| over the fifth of them that was held out.

    Source: PatchedServe section 6.1. Unlike there, the target is relative to what the requests cost alone without a
    cache, so that the model stays valid when that changes; and patches that a cache skips do not count.
    """

    shapes: tuple[Shape, ...]
    max_batch: int
    max_patches: int
    layers: tuple[Layer, ...]
    error: float
    num_rows: int
    max_skipped: float = 0.0
    _indices: Mapping[ShapeKey, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_indices", input_indices(self.shapes))

    def ratio(self, batch: Sequence[ShapeKey], skipped: float = 0.0) -> float | None:
        """Return the time together, with this share of the patches skipped by a cache, over the sum of the times alone.

        The times alone are without a cache. None for a batch that the model cannot predict.
        """
        if len(batch) > self.max_batch or skipped > self.max_skipped:
            return None
        values = inputs_of(batch, self._indices, skipped)
        if values is None or values[-1] > self.max_patches:
            return None
        *hidden, last = self.layers
        for layer in hidden:
            values = [value if value > 0.0 else 0.0 for value in layer.apply(values)]
        return math.exp(last.apply(values)[0])

    def to_json(self) -> dict[str, Any]:
        return {
            "shapes": [str(shape) for shape in self.shapes],
            "max_batch": self.max_batch,
            "max_patches": self.max_patches,
            "layers": [{"weights": layer.weights, "biases": layer.biases} for layer in self.layers],
            "error": self.error,
            "num_rows": self.num_rows,
            "max_skipped": self.max_skipped,
        }

    @classmethod
    def parse(cls, document: Any) -> BatchLatencyModel:
        """Read what `to_json` returns. Raises ValueError for anything else."""
        try:
            batch_model = cls(
                shapes=tuple(map(Shape.parse, document["shapes"])),
                max_batch=int(document["max_batch"]),
                max_patches=int(document["max_patches"]),
                layers=tuple(
                    Layer(tuple(tuple(map(float, row)) for row in layer["weights"]), tuple(map(float, layer["biases"])))
                    for layer in document["layers"]
                ),
                error=float(document["error"]),
                num_rows=int(document["num_rows"]),
                max_skipped=float(document.get("max_skipped", 0.0)),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a batch model: {error!r}") from error
        width = len(batch_model.shapes) + 2
        for layer in batch_model.layers:
            if any(len(row) != width for row in layer.weights) or len(layer.weights) != len(layer.biases):
                raise ValueError("not a batch model: its layers do not fit each other")
            if not all(map(math.isfinite, (*layer.biases, *chain(*layer.weights)))):
                raise ValueError("not a batch model: a weight is not finite")
            width = len(layer.biases)
        if width != 1 or not batch_model.layers:
            raise ValueError("not a batch model: its last layer must have one output")
        return batch_model


def input_indices(shapes: Sequence[Shape]) -> dict[ShapeKey, int]:
    """Return the index of the input that counts each shape."""
    return {(shape.height, shape.width, shape.frames): index for index, shape in enumerate(shapes)}


def inputs_of(batch: Sequence[ShapeKey], indices: Mapping[ShapeKey, int], skipped: float = 0.0) -> list[float] | None:
    """Return the number of requests of each shape, upright or on its side; of sizes; and of computed patches.

    Patches are those of a packed batch, as large as its sizes allow. None if a shape has no index.
    """
    counts = [0.0] * len(indices)
    for height, width, frames in batch:
        index = indices.get((height, width, frames) if height <= width else (width, height, frames))
        if index is None:
            return None
        counts[index] += 1.0
    sizes = list({(height, width) for height, width, _ in batch})
    rows, columns = choose_patch(sizes, 1)
    pixels = sum([height * width * frames for height, width, frames in batch])
    return [*counts, float(len(sizes)), (1.0 - skipped) * pixels / (rows * columns)]
