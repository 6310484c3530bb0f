"""Training of the predictor of a model's patch cache, from changes of its blocks' inputs and outputs between steps.

Source: PatchedServe section 7. Needs scikit-learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tilework.core.cache import CacheChoice, CacheKind
from tilework.core.wire.commands import CACHE_BYTES
from tilework.core.wire.spec import Spec
from tilework.patches.cache import PatchCache
from tilework.pipelines.caching.forest import FORMAT, CacheForest, features_of
from tilework.pipelines.draw import draw
from tilework.pipelines.family import Family, StepState

_TREES = 12
_DEPTH = 5
_LEAST_LEAF = 50
_LEAST = 1e-12


@dataclass(slots=True)
class Changes:
    """Changes of inputs and outputs of blocks: features (n, 2), and logarithms (10) of the changes of outputs (n)."""

    features: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def observe(self, index: int, change: Tensor, of_outputs: Tensor) -> None:
        self.features.append(features_of(index, change))
        self.outputs.append(of_outputs.float().clamp_min(_LEAST).log10())


def observe_changes(family: Family, spec: Spec, changes: Changes) -> None:
    """Draw a request with everything computed, and note all changes."""
    cache = PatchCache(CACHE_BYTES, changes.observe)

    def step(state: StepState) -> None:
        family.step([state], cache)

    draw(family, replace(spec, cache=CacheChoice(CacheKind.PATCH, 0.0)), step=step)


def can_train() -> bool:
    return find_spec("sklearn") is not None


def train(changes: Changes, held_out: Changes, thresholds: Sequence[float]) -> dict[str, Any]:
    """Return a forest as a document (`caching.forest`), and how well it predicts changes below thresholds.

    Its `accuracy`, by threshold, is the share of the changes of `held_out` that it puts on the right side; `by_input`
    is the same with the input's change in place of a forest.
    """
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(
        n_estimators=_TREES, max_depth=_DEPTH, min_samples_leaf=_LEAST_LEAF, random_state=0, max_features=None
    )
    forest.fit(torch.cat(changes.features).numpy(), torch.cat(changes.outputs).numpy())
    trees = [_tree(one.tree_) for one in forest.estimators_]
    loaded = CacheForest.of(trees, torch.device("cpu"))
    pairs = list(zip(held_out.features, held_out.outputs, strict=True))
    actual = torch.cat(held_out.outputs)
    predicted = torch.cat([loaded(int(one[0, 1]), torch.pow(10.0, one[:, 0])).log10() for one, _ in pairs])
    inputs = torch.cat(held_out.features)[:, 0]
    limits = {f"{one:g}": torch.tensor(one).log10() for one in thresholds}
    return {
        "format": FORMAT,
        "samples": sum(map(len, changes.outputs)),
        "accuracy": {name: _agreement(predicted, actual, limit) for name, limit in limits.items()},
        "by_input": {name: _agreement(inputs, actual, limit) for name, limit in limits.items()},
        "trees": trees,
    }


def _agreement(predicted: Tensor, actual: Tensor, limit: Tensor) -> float:
    return round(float(((predicted < limit) == (actual < limit)).float().mean()), 4)


def _tree(tree: Any) -> dict[str, list[float]]:
    """Return a tree of scikit-learn as lists; leaves lead to themselves."""
    is_leaf = tree.children_left < 0
    places = range(tree.node_count)
    return {
        "feature": [0 if leaf else int(one) for one, leaf in zip(tree.feature, is_leaf, strict=True)],
        "threshold": [0.0 if leaf else round(float(one), 5) for one, leaf in zip(tree.threshold, is_leaf, strict=True)],
        "left": [node if is_leaf[node] else int(tree.children_left[node]) for node in places],
        "right": [node if is_leaf[node] else int(tree.children_right[node]) for node in places],
        "value": [round(float(one), 4) for one in tree.value[:, 0, 0]],
    }
