"""A model that is set to decode in tiles gives the picture of the stock pipeline so configured, and says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilework
import tiny
from tilework.core.model import ModelSource
from tilework.pipelines.defaults import FILE
from tilework.pipelines.errors import InvalidDefaults, UnsupportedModel
from tilework.pipelines.identity import model_identity
from tilework.pipelines.loading import load, load_stock
from tilework.pipelines.model_index import STOCK
from tilework.worker.models.describe import described
from zoo import requests
from zoo.registry import ZOO

WAN, SVD = ZOO["wan21"], ZOO["svd"]
BEYOND = 288  # A tile of the autoencoder of Wan has sides of 256 px.


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("wan")
    requests.family(WAN, directory)
    return directory


def drawn(directory: Path, **options: Any) -> np.ndarray:
    made = load(ModelSource(path=str(directory), adapter=STOCK, **options))
    return requests.alone(made, replace(requests.spec_of(model(), made, 1), height=BEYOND, width=16))


def model() -> Any:
    return replace(WAN, inputs={**WAN.inputs, "num_inference_steps": 1, "height": BEYOND, "width": 16})


def test_a_clip_in_tiles_is_that_of_the_stock_pipeline_in_tiles(directory: Path) -> None:
    stock = tilework.reference(str(directory), adapter=STOCK, vae_tiling=True)
    assert stock.vae.use_tiling
    tiled = requests.stock_pixels(model(), stock, 1)
    assert np.array_equal(drawn(directory, vae_tiling=True), tiled)
    stock.vae.disable_tiling()
    whole = requests.stock_pixels(model(), stock, 1)
    assert not np.array_equal(tiled, whole)
    assert np.array_equal(drawn(directory), whole)


def test_a_model_says_that_it_decodes_in_tiles_and_its_costs_are_its_own(directory: Path) -> None:
    source = ModelSource(path=str(directory), adapter=STOCK)
    for tiled in (False, True):
        asked = replace(source, vae_tiling=tiled)
        assert described(load(asked), asked, {}, {}, {}).info.vae_tiling == tiled
    assert model_identity(replace(source, vae_tiling=True)) == f"{model_identity(source)} in tiles"


def test_its_own_file_may_ask_for_tiles(tmp_path: Path) -> None:
    tiny.prepare()
    tiny.save_sd3(tmp_path)
    source = ModelSource(path=str(tmp_path))
    assert not load_stock(source).vae.use_tiling
    assert load(source).info.stages[-1].sliceable, "slices give the picture of the whole"
    tiny.write_defaults(tmp_path, vae_tiling=True)
    assert load_stock(source).vae.use_tiling
    assert not load(source).info.stages[-1].sliceable
    tiny.write_defaults(tmp_path, vae_tiling="yes")
    with pytest.raises(InvalidDefaults, match=f"{FILE}: vae_tiling is 'yes'; write true or false"):
        load_stock(source)


def test_an_autoencoder_without_tiles_is_named(tmp_path: Path) -> None:
    tiny.prepare()
    requests.family(SVD, tmp_path)
    with pytest.raises(UnsupportedModel, match=r"AutoencoderKLTemporalDecoder cannot; leave it out"):
        load_stock(ModelSource(path=str(tmp_path), adapter=STOCK, vae_tiling=True))
