"""How long a batch takes against its members one by one, as it was learned from measured batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import mul
from typing import Any

from tilework.core.packing import choose_patch
from tilework.core.request import Shape
from tilework.cost.rows import Member


@dataclass(frozen=True, slots=True)
class Layer:
    """Of a network: `weights` has a row for each output, with one for each input."""

    weights: tuple[tuple[float, ...], ...]
    biases: tuple[float, ...]

    def apply(self, inputs: Sequence[float]) -> list[float]:
        return [sum(map(mul, row, inputs), bias) for row, bias in zip(self.weights, self.biases, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLatencyModel:
    """A small neural network as plain numbers: it needs no library, and foretells the same wherever a log is replayed.

    It takes what `inputs_of` says and gives the logarithm of the time that a batch takes over that of its members one
    by one; between two of its `layers` what is negative becomes 0. It knows batches of its `shapes`, which lie as they
    do there or on their side, of up to `most_members` and `most_patches`. It was made from `num_rows` measured batches;
    `error` is the mean of |foretold / measured - 1| over the fifth of them that it has not seen.

    Source: PatchedServe section 6.1. Unlike there, the target is relative to what the members cost alone, so that it
    still holds when these change.
    """

    shapes: tuple[Shape, ...]
    most_members: int
    most_patches: int
    layers: tuple[Layer, ...]
    error: float
    num_rows: int
    _places: Mapping[Member, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_places", places_of(self.shapes))

    def ratio(self, members: Sequence[Member]) -> float | None:
        """Together over one by one; None for a batch that it does not know."""
        values = inputs_of(members, self._places) if len(members) <= self.most_members else None
        if values is None or values[-1] > self.most_patches:
            return None
        *hidden, last = self.layers
        for layer in hidden:
            values = [value if value > 0.0 else 0.0 for value in layer.apply(values)]
        return math.exp(last.apply(values)[0])

    def to_json(self) -> dict[str, Any]:
        return {
            "shapes": [str(shape) for shape in self.shapes],
            "most_members": self.most_members,
            "most_patches": self.most_patches,
            "layers": [{"weights": layer.weights, "biases": layer.biases} for layer in self.layers],
            "error": self.error,
            "num_rows": self.num_rows,
        }

    @classmethod
    def parse(cls, document: Any) -> BatchLatencyModel:
        """Undo `to_json`. Raises ValueError for anything else."""
        try:
            batch_model = cls(
                shapes=tuple(map(Shape.parse, document["shapes"])),
                most_members=int(document["most_members"]),
                most_patches=int(document["most_patches"]),
                layers=tuple(
                    Layer(tuple(tuple(map(float, row)) for row in layer["weights"]), tuple(map(float, layer["biases"])))
                    for layer in document["layers"]
                ),
                error=float(document["error"]),
                num_rows=int(document["num_rows"]),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no batch_model: {error!r}") from error
        width = len(batch_model.shapes) + 2
        for layer in batch_model.layers:
            if any(len(row) != width for row in layer.weights) or len(layer.weights) != len(layer.biases):
                raise ValueError("no batch_model: its layers do not fit each other")
            if not all(map(math.isfinite, (*layer.biases, *chain(*layer.weights)))):
                raise ValueError("no batch_model: a weight is not finite")
            width = len(layer.biases)
        if width != 1 or not batch_model.layers:
            raise ValueError("no batch_model: its last layer must have one output")
        return batch_model


def places_of(shapes: Sequence[Shape]) -> dict[Member, int]:
    return {(shape.height, shape.width, shape.frames): place for place, shape in enumerate(shapes)}


def inputs_of(members: Sequence[Member], places: Mapping[Member, int]) -> list[float] | None:
    """How many there are of each shape, whatever side it lies on; how many sizes there are; how many patches.

    Patches are those of a packed batch, as large as its sizes allow. None if a shape has no place.
    """
    counts = [0.0] * len(places)
    for height, width, frames in members:
        place = places.get((height, width, frames) if height <= width else (width, height, frames))
        if place is None:
            return None
        counts[place] += 1.0
    sizes = list({(height, width) for height, width, _ in members})
    rows, columns = choose_patch(sizes, 1)
    pixels = sum([height * width * frames for height, width, frames in members])
    return [*counts, float(len(sizes)), pixels / (rows * columns)]
