"""The LoRA of the examples draws outlines, and how it is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

import tiny
from tilework.core.lora import UsedLora
from tilework.core.model import LoraSource, ModelSource
from tilework.pipelines.draw import draw as drawn
from tilework.pipelines.loading import load
from training.shapes.drawing import COLOURS, Scene, caption, draw
from training.shapes.lora import WIDTH

FILE = Path(__file__).parents[1] / "examples" / "loras" / "outline.safetensors"
SCENES = (Scene("red", "circle", "large", "white"), Scene("blue", "square", "large", "yellow"))


def fill(picture: np.ndarray, scene: Scene) -> float:
    """Share of a shape's bounding box that has the shape's colour, not the background's; (3, height, width).

    Unlike the share of the whole picture, it does not depend on how large the shape was drawn.
    """
    front, back = (np.array(COLOURS[name])[:, None, None] for name in (scene.colour, scene.background))
    ink = np.abs(picture - front).sum(0) < np.abs(picture - back).sum(0)
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    return float(ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].mean())


@pytest.mark.parametrize("scene", SCENES)
def test_of_an_outline_only_the_border_is_drawn(scene: Scene) -> None:
    whole, border = (fill(draw(scene, 96, 96, Random(1), one), scene) for one in (None, WIDTH))
    assert border < 0.4
    assert whole > 0.7


@pytest.mark.exhaustive
def test_the_lora_of_the_examples_draws_outlines() -> None:
    family = load(ModelSource(path="shapes", loras=(LoraSource("outline", str(FILE)),), threads=2))
    family.loras.add("outline", FILE)
    for scene in SCENES:
        spec = tiny.spec(prompt=caption(scene), width=96, height=96, steps=12, guidance_scale=4.0, seed=7)
        fills = []
        for loras in ((), (UsedLora("outline", 1.0),)):
            family.loras.use(loras)
            image = drawn(family, replace(spec, loras=loras))
            pixels = np.frombuffer(bytes(image.pixels), np.uint8).reshape(96, 96, 3) / 255
            fills.append(fill(pixels.transpose(2, 0, 1), scene))
        plain, outline = fills
        assert plain > 0.7, scene
        assert 0.1 < outline < 0.6, scene
