"""The predictor of a model's patch cache: a random forest that predicts the change of a block's output.

Source: PatchedServe section 7, whose forest classifies. This one is a regression of the change, so that one threshold
of a request means the same with and without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilework.pipelines.errors import InvalidDefaults

FILE = "cache_forest.json"
"""Name of the file beside a model's `model_index.json`."""
FORMAT = 1
_LEAST = 1e-12  # A change of nothing has no logarithm.
_FIELDS = ("feature", "threshold", "left", "right", "value")


def features_of(index: int, change: Tensor) -> Tensor:
    """Return the forest's features, (P, 2): the logarithm (10) of the input's change, and the index of the block."""
    logarithm = change.float().clamp_min(_LEAST).log10()
    return torch.stack([logarithm, torch.full_like(logarithm, index)], dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class CacheForest:
    """Trees with equal numbers of nodes, (trees, nodes) each; a node whose `left` is itself is a leaf.

    A call is a fixed number of lookups on the device, without waiting for it.
    """

    feature: Tensor
    threshold: Tensor
    left: Tensor
    right: Tensor
    value: Tensor
    depth: int

    def __call__(self, index: int, change: Tensor) -> Tensor:
        """Predict the change of a block's output, (P), from the change of its input."""
        features = features_of(index, change)
        trees = torch.arange(len(self.feature), device=change.device)[:, None]
        nodes = torch.zeros(len(self.feature), len(change), dtype=torch.long, device=change.device)
        rows = torch.arange(len(change), device=change.device)[None]
        for _ in range(self.depth):
            is_left = features[rows, self.feature[trees, nodes]] <= self.threshold[trees, nodes]
            nodes = torch.where(is_left, self.left[trees, nodes], self.right[trees, nodes])
        return torch.pow(10.0, self.value[trees, nodes].mean(0))

    @classmethod
    def of(cls, trees: Sequence[Mapping[str, Sequence[float]]], device: torch.device) -> CacheForest:
        """Return a forest of trees as they are stored in a file."""
        size = max(len(tree["value"]) for tree in trees)
        columns = {name: [[*tree[name], *[0] * (size - len(tree[name]))] for tree in trees] for name in _FIELDS}
        integers = {name: torch.tensor(columns[name], dtype=torch.long) for name in ("feature", "left", "right")}
        numbers = {name: torch.tensor(columns[name], dtype=torch.float32) for name in ("threshold", "value")}
        tensors = {name: tensor.to(device) for name, tensor in {**integers, **numbers}.items()}
        return cls(**tensors, depth=max(map(_depth, trees)))


def read_forest(directory: Path, device: torch.device) -> CacheForest | None:
    """Return the forest of a model; None if it has none.

    Raises:
        InvalidDefaults: the file cannot be used.
    """
    path = directory / FILE
    if not path.exists():
        return None
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"it has format {document['format']}, and this Tilework reads {FORMAT}")
        return CacheForest.of(document["trees"], device)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InvalidDefaults(
            f"{path}: {reason}; write it anew by tilework profile --train-cache, or remove it"
        ) from error


def _depth(tree: Mapping[str, Sequence[float]]) -> int:
    """Return the number of steps from the root to the farthest leaf; children come after their parent."""
    depths = [0] * len(tree["left"])
    for node, (left, right) in enumerate(zip(tree["left"], tree["right"], strict=True)):
        for child in {int(left), int(right)} - {node}:
            depths[child] = depths[node] + 1
    return max(depths)
