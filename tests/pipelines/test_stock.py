"""A stock call that is interrupted at its components gives the stock picture, bit for bit, wherever it is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tiny
from tilework.pipelines.model_index import ADAPTERS
from tilework.pipelines.support.record import read_record, served_classes
from zoo import support
from zoo.registry import ZOO

QUICK = (
    *("qwen-image", "qwen-image-edit", "z-image", "flux2-klein", "chroma", "sana", "pixart-sigma", "sd3-inpaint"),
    *("sdxl-ancestral", "sd35-skip-layers", "flux-kontext", "wan22", "ltx-image", "hunyuan-video15"),
    *("modular-qwen-image-image", "modular-sdxl", "modular-wan22"),
)


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


def test_the_record_has_every_class_of_the_zoo_and_serves_no_other() -> None:
    in_zoo = {model.class_name for model in ZOO.values()}
    assert in_zoo == read_record().classes.keys(), "python -m zoo.support writes the record"
    assert ADAPTERS.keys() <= served_classes()
    assert {ZOO[name].class_name for name in QUICK} <= served_classes()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ZOO])
def test_stages_and_steps_that_move_and_take_turns_equal_the_stock_call(name: str, tmp_path: Path) -> None:
    """Each model does what the record says of its class; a class that is not served has a model that shows why."""
    model = ZOO[name]
    found, recorded = support.measure(model, tmp_path), read_record().classes[model.class_name]
    if recorded.is_served and not found.reason.endswith(support.BEYOND):
        assert model.kind in recorded.kinds
        assert replace(found, kinds=recorded.kinds) == recorded
    elif len(support.models_of(model.class_name)) == 1:
        assert not found.is_served, "it is served now: python -m zoo.support"
