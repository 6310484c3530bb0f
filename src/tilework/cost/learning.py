"""Learns a `BatchLatencyModel` from measured batches. The only module that needs scikit-learn (the extra `learn`)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from operator import mul
from statistics import fmean, pstdev

from tilework.core.cost_row import CostRow
from tilework.core.graph.stage import Stage
from tilework.core.request import Shape
from tilework.cost.batch_latency import BatchLatencyModel, Layer, input_indices, inputs_of
from tilework.cost.prices import Prices
from tilework.cost.rows import batch_key

MIN_MIXED = 100
_NUM_HIDDEN = 16
_WEIGHT_DECAY = 0.1  # Good for runs that differ by a tenth; for runs that differ by 2%, 0.01 is as good.
_HELD_OUT = 0.2


def can_learn() -> bool:
    return find_spec("sklearn") is not None


def learn(rows: Iterable[CostRow], stage: Stage, seed: int = 0) -> BatchLatencyModel | None:
    """Learn a model from four fifths, chosen by `seed`, of all measured batches of a stage, with and without caches.

    No outlier is dropped. None if fewer than MIN_MIXED batches are mixed, or nothing was measured alone. The result
    does not depend on the order of `rows`.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    steps = [row for row in rows if (row.pipeline, row.stage, row.degree) == (stage.pipeline, stage.name, 1)]
    batches = sorted((row for row in steps if row.batch != 1), key=lambda row: (row.shapes, row.seconds))
    alone = Prices([row for row in steps if row.batch == 1 and row.cache is None])
    mixed = [row for row in batches if row.cache is None and not isinstance(row.batch, int)]
    if len(mixed) < MIN_MIXED or not alone.has_singles:
        return None
    shapes = tuple(sorted({_upright(shape) for row in batches for shape in row.shapes}))
    indices = input_indices(shapes)
    inputs = [inputs_of(batch_key(row.shapes), indices, row.skipped) or [] for row in batches]
    ratios = [row.seconds / sum(alone.seconds((shape,)) or 0.0 for shape in row.shapes) for row in batches]
    learned, held_out = _split(len(batches), seed)
    layers = _layers([inputs[index] for index in learned], [math.log(ratios[index]) for index in learned], seed)
    batch_model = BatchLatencyModel(
        shapes=shapes,
        max_batch=max(len(row.shapes) for row in batches),
        max_patches=int(max(values[-1] for values in inputs)),
        layers=layers,
        error=0.0,
        num_rows=len(batches),
        max_skipped=max(row.skipped for row in batches),
    )
    predicted = {
        index: batch_model.ratio(batch_key(batches[index].shapes), batches[index].skipped) for index in held_out
    }
    errors = [abs((ratio or 0.0) / ratios[index] - 1) for index, ratio in predicted.items()]
    return replace(batch_model, error=fmean(errors))


def _split(number: int, seed: int) -> tuple[list[int], list[int]]:
    from sklearn.model_selection import train_test_split

    learned, held_out = train_test_split(range(number), test_size=_HELD_OUT, random_state=seed)
    return learned, held_out


def _layers(inputs: Sequence[Sequence[float]], targets: Sequence[float], seed: int) -> tuple[Layer, ...]:
    """Return the layers of a network for unscaled inputs; training scales them to mean 0 and deviation 1."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPRegressor

    columns = list(zip(*inputs, strict=True))
    means, deviations = [fmean(column) for column in columns], [pstdev(column) or 1.0 for column in columns]
    scaled = [[(x - mean) / by for x, mean, by in zip(row, means, deviations, strict=True)] for row in inputs]
    network = MLPRegressor(
        hidden_layer_sizes=(_NUM_HIDDEN,), solver="lbfgs", alpha=_WEIGHT_DECAY, max_iter=2000, random_state=seed
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # Two thousand iterations are good enough.
        network.fit(scaled, targets)
    first, *others = [
        Layer(tuple(map(tuple, weights.T.tolist())), tuple(biases.tolist()))
        for weights, biases in zip(network.coefs_, network.intercepts_, strict=True)
    ]
    weights = tuple(tuple(weight / by for weight, by in zip(row, deviations, strict=True)) for row in first.weights)
    biases = tuple(bias - sum(map(mul, row, means)) for row, bias in zip(weights, first.biases, strict=True))
    return Layer(weights, biases), *others


def _upright(shape: Shape) -> Shape:
    return Shape(min(shape.height, shape.width), max(shape.height, shape.width), shape.frames)
