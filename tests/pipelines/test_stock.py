"""Any pipeline of diffusers, interrupted at its components' calls, is the stock call bit for bit, wherever it is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tiny
from tilework.patches.layout import pack
from zoo import requests
from zoo.registry import ZOO, build

QUICK = ("qwen-image", "z-image", "flux2-klein-edit", "wan-2.2", "sana")
"""One of each way to call: guidance as a second pass, lists, reference pictures, two denoisers, linear attention."""


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ZOO])
def test_every_model_of_the_zoo(name: str, tmp_path: Path) -> None:
    model = ZOO[name]
    here, there = requests.family(model, tmp_path), requests.family(model, tmp_path)
    specs = [requests.spec_of(model, here, seed) for seed in (1, 2)]
    stock = [requests.stock_pixels(model, build(model), seed) for seed in (1, 2)]
    assert not np.array_equal(*stock), "the seed must matter"
    assert all(map(np.array_equal, requests.side_by_side(here, *specs), stock))
    assert np.array_equal(requests.moved(here, there, specs[0]), stock[0])
    for together, reference in zip(requests.side_by_side(here, *specs, pack=pack), stock, strict=True):
        assert np.abs(together.astype(int) - reference).max() <= 2
