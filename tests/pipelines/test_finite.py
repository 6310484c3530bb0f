"""Values that are no numbers: a LoRA that has some is refused by name, and what is decoded to some is an error."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from loras import save_lora
from tilework.core.lora import UsedLora
from tilework.pipelines.draw import draw
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.family import Family
from tilework.pipelines.lora import InvalidLora
from tilework.pipelines.numerics import NotFinite, check_pictures
from tilework.pipelines.stock.sound import sound_of
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from zoo import requests
from zoo.registry import ZOO, build


@pytest.fixture(autouse=True)
def _prepared() -> None:
    tiny.prepare()


def sd3(pipeline: Any) -> Family:
    return StableDiffusion3(pipeline, "sd3", {"max_sequence_length": tiny.TEXT_LENGTH}, "")


def stock(pipeline: Any) -> Family:
    return StockPipeline(pipeline, "stock", {}, "")


@pytest.mark.parametrize("family_of_pipeline", [sd3, stock])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_lora_with_values_that_are_no_numbers_is_refused_by_name(
    family_of_pipeline: Any, value: float, tmp_path: Path
) -> None:
    file = save_lora(tiny.build_sd3(), tmp_path / "ink.safetensors", 1)
    good = save_lora(tiny.build_sd3(), tmp_path / "chalk.safetensors", 2)
    tensors = load_file(file)
    odd = sorted(tensors)[3]
    tensors[odd].view(-1)[-1] = value
    save_file(tensors, file)
    family, spec = family_of_pipeline(tiny.build_sd3()), tiny.spec(steps=2)
    before = tiny.pixels(draw(family, spec))
    with pytest.raises(InvalidLora, match=rf"{file}: its tensor {odd} has values that are NaN or infinite; train"):
        family.loras.add("ink", file)
    assert np.array_equal(tiny.pixels(draw(family, spec)), before), "nothing has changed"
    family.loras.add("chalk", good)
    family.loras.use([UsedLora("chalk", 1.0)])
    assert not np.array_equal(tiny.pixels(draw(family, spec)), before)


def test_a_lora_that_the_dtype_of_the_model_cannot_hold_is_refused(tmp_path: Path) -> None:
    file = save_lora(tiny.build_sd3(), tmp_path / "ink.safetensors", 1)
    tensors = load_file(file)
    odd = sorted(tensors)[0]
    tensors[odd].view(-1)[0] = 1e6  # float16 ends at 65504.
    save_file(tensors, file)
    sd3(tiny.build_sd3()).loras.add("ink", file)
    with pytest.raises(InvalidLora, match=rf"its tensor {odd} has values that torch.float16 cannot hold; .*float32"):
        sd3(tiny.build_sd3().to(torch.float16)).loras.add("ink", file)


@pytest.mark.parametrize("family_of_pipeline", [sd3, stock])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_picture_of_values_that_are_no_numbers_is_an_error(family_of_pipeline: Any, value: float) -> None:
    pipeline = tiny.build_sd3()
    family = family_of_pipeline(pipeline)
    draw(family, tiny.spec(steps=2))
    pipeline.vae.decoder.conv_out.bias.data[1] = value
    with pytest.raises(NotFinite, match=r"the decoded image has values that are NaN or infinite; serve .*float32"):
        draw(family, tiny.spec(steps=2))


@pytest.mark.parametrize("name", ["wan21", "ltx"])
def test_so_is_a_clip(name: str) -> None:
    pipeline = build(ZOO[name])
    family = stock(pipeline)
    spec = requests.spec_of(ZOO[name], family, seed=1)
    draw(family, spec)
    for weight in list(pipeline.vae.decoder.parameters())[-1:]:
        weight.data[0] = math.nan
    with pytest.raises(NotFinite):
        draw(family, spec)


def test_a_pipeline_without_a_processor_is_checked_as_well() -> None:
    class Plain:
        """As those that make pictures themselves."""

        @staticmethod
        def numpy_to_pil(pictures: np.ndarray) -> str:
            return "made"

    pipeline: Any = Plain()
    check_pictures(pipeline)
    assert pipeline.numpy_to_pil(np.zeros((1, 2, 2, 3))) == pipeline.numpy_to_pil(pictures=np.ones(3)) == "made"
    with pytest.raises(NotFinite):
        pipeline.numpy_to_pil(np.full((1, 2, 2, 3), np.nan))
    with pytest.raises(NotFinite):
        pipeline.numpy_to_pil(pictures=np.full((1, 2, 2, 3), np.inf))


def test_so_is_sound() -> None:
    assert sound_of(SimpleNamespace(audio=torch.zeros(1, 2, 8)), 8).rate == 8
    with pytest.raises(NotFinite, match="the decoded sound"):
        sound_of(SimpleNamespace(audio=torch.full((1, 2, 8), math.nan)), 8)
