"""A stock call that is interrupted at its components gives the stock picture, bit for bit, wherever it is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tiny
from tilework.pipelines.model_index import ADAPTERS, stock_classes
from zoo import requests
from zoo.registry import ZOO, build

QUICK = (
    *("qwen-image", "qwen-image-edit", "z-image", "flux2-klein", "chroma", "sana", "pixart-sigma", "sd3-inpaint"),
    *("sdxl-ancestral", "sd35-skip-layers", "flux-kontext", "wan22", "ltx-image", "hunyuan-video15"),
)
SERVED = [
    name
    for name, model in ZOO.items()
    if (model.class_name in stock_classes() or model.class_name in ADAPTERS) and not model.modular
]
# Modular pipelines are not served yet; these show that the mechanism is no matter of a class.
MODULAR = ["modular-qwen-image", "modular-z-image", "modular-sdxl", "modular-sd3"]


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


def test_every_class_that_is_served_is_in_the_zoo() -> None:
    assert {ZOO[name].class_name for name in SERVED} == stock_classes().keys() | ADAPTERS.keys()
    assert set(QUICK) <= set(SERVED)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in [*SERVED, *MODULAR]]
)
def test_stages_and_steps_that_move_and_take_turns_equal_the_stock_call(name: str, tmp_path: Path) -> None:
    model = ZOO[name]
    here, there = requests.family(model, tmp_path), requests.family(model, tmp_path)
    specs = [requests.spec_of(model, here, seed) for seed in (1, 2)]
    stock = [requests.stock_pixels(model, build(model), seed) for seed in (1, 2)]
    assert not np.array_equal(*stock), "the seed must matter"
    assert all(map(np.array_equal, requests.side_by_side(here, *specs), stock))
    assert np.array_equal(requests.moved(here, there, specs[0]), stock[0])
