"""The predictor of the patch cache: its evaluation in torch, its file, and its training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tilework.pipelines.caching.forest import FILE, CacheForest, features_of, read_forest
from tilework.pipelines.errors import InvalidDefaults
from tilework.pipelines.model_index import shipped_directory
from tilework.worker.caching.training import Changes, can_train, train

CPU = torch.device("cpu")
# By the change: below 0.01 a thousandth; above, a tenth in block 0, and as much as it is in others.
TREE = {
    "feature": [0, 0, 1, 0, 0],
    "threshold": [-2.0, 0.0, 0.5, 0.0, 0.0],
    "left": [1, 1, 3, 3, 4],
    "right": [2, 1, 4, 3, 4],
    "value": [0.0, -3.0, 0.0, -1.0, 0.0],
}
STUMP = {"feature": [0], "threshold": [0.0], "left": [0], "right": [0], "value": [-1.0]}


def test_a_forest_is_the_mean_of_its_trees_whatever_their_size() -> None:
    change = torch.tensor([0.001, 0.5, 0.0])
    assert torch.allclose(CacheForest.of([TREE], CPU)(0, change), torch.tensor([0.001, 0.1, 0.001]))
    assert torch.allclose(CacheForest.of([TREE], CPU)(3, change), torch.tensor([0.001, 1.0, 0.001]))
    both = CacheForest.of([STUMP, TREE], CPU)(3, change)
    assert torch.allclose(both, torch.tensor([0.01, 10**-0.5, 0.01]))


def test_a_forest_is_read_and_a_wrong_file_is_named(tmp_path: Path) -> None:
    assert read_forest(tmp_path, CPU) is None
    path = tmp_path / FILE
    path.write_text(json.dumps({"format": 1, "trees": [TREE]}))
    forest = read_forest(tmp_path, CPU)
    assert forest is not None
    assert forest.depth == 2
    for text in ("[]", "{}", '{"format": 2, "trees": []}', '{"format": 1, "trees": [{}]}', "{"):
        path.write_text(text)
        with pytest.raises(
            InvalidDefaults, match=r"cache_forest.json: .* tilework profile --train-cache, or remove it"
        ):
            read_forest(tmp_path, CPU)


def drawn(seed: int) -> Changes:
    """Outputs that change a tenth as much as inputs in block 0, and ten times as much in block 1."""
    changes, generator = Changes(), torch.Generator().manual_seed(seed)
    for index in (0, 1) * 20:
        change = torch.pow(10.0, -4 * torch.rand(50, generator=generator))
        changes.observe(index, change, change * (0.1, 10.0)[index])
    return changes


@pytest.mark.skipif(not can_train(), reason="needs scikit-learn")
def test_training_learns_what_the_input_alone_does_not_say_and_torch_evaluates_it_alike() -> None:
    document = train(drawn(1), drawn(2), (0.01, 0.1))
    assert document["samples"] == 2000
    for name in ("0.01", "0.1"):
        assert document["accuracy"][name] > 0.95
        assert document["by_input"][name] < 0.8
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(12, max_depth=5, min_samples_leaf=50, random_state=0, max_features=None)
    own = drawn(1)
    forest.fit(torch.cat(own.features).numpy(), torch.cat(own.outputs).numpy())
    change = torch.tensor([1e-4, 3e-3, 0.02, 0.9])
    expected = forest.predict(features_of(1, change).numpy())
    found = CacheForest.of(document["trees"], CPU)(1, change).log10().numpy()
    assert np.abs(found - expected).max() < 1e-3


def test_the_model_that_ships_has_one() -> None:
    forest = read_forest(shipped_directory("shapes"), CPU)
    assert forest is not None
    changes = forest(3, torch.tensor([1e-5, 1e-3, 1e-1]))
    assert changes[0] < changes[1] < changes[2]
