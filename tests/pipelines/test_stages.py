"""A stage that an adapter adds: the example of docs/change.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Picture

import tiny
from tilework.core.model import ModelSource
from tilework.pipelines.draw import draw
from tilework.pipelines.errors import InvalidSource
from tilework.pipelines.family import Family
from tilework.pipelines.identity import model_identity
from tilework.pipelines.loading import load

EXAMPLES = Path(__file__).parents[2] / "examples"
ADAPTER = "upscale_sd3:UpscaledStableDiffusion3"


@pytest.fixture(scope="module")
def upscaled() -> Iterator[Family]:
    tiny.prepare()
    sys.path.insert(0, str(EXAMPLES))
    yield load(ModelSource(path="shapes", adapter=ADAPTER))
    sys.path.remove(str(EXAMPLES))


def test_the_added_stage_is_the_last_and_all_others_stay(upscaled: Family) -> None:
    stock = load(ModelSource(path="shapes"))
    assert upscaled.info.graph.stages[:-1] == stock.info.graph.stages
    assert upscaled.info.graph.stages[-1].name == "upscale"


def test_the_picture_is_the_stock_one_at_twice_the_size(upscaled: Family) -> None:
    spec = tiny.spec(prompt="a red circle on a blue background", width=96, height=64, steps=4, seed=11)
    small, large = draw(load(ModelSource(path="shapes")), spec), draw(upscaled, spec)
    assert (large.width, large.height) == (192, 128)
    shrunk = Picture.fromarray(tiny.pixels(large)).resize((96, 64), Picture.Resampling.BOX)
    assert np.abs(np.asarray(shrunk).astype(int) - tiny.pixels(small)).mean() < 2


def test_measurements_of_another_adapter_are_its_own() -> None:
    usual, other = ModelSource(path="shapes"), ModelSource(path="shapes", adapter=ADAPTER)
    assert model_identity(other) != model_identity(usual)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere:X", "there is no module 'nowhere' on Python's path"),
        ("json:JSONDecode", "module 'json' has no 'JSONDecode'; did you mean 'JSONDecoder'?"),
        ("not a name", "there is no module 'not a name' on Python's path"),
    ],
)
def test_an_adapter_that_cannot_be_imported_is_named(name: str, reason: str) -> None:
    with pytest.raises(InvalidSource, match=re.escape(f"adapter is {name!r}: {reason}")):
        load(ModelSource(path="shapes", adapter=name))
