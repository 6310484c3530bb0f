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


def share(picture: np.ndarray, scene: Scene) -> float:
    """Of pixels that are closer to the colour of the shape than to that of the background; (3, height, width)."""
    front, back = (np.array(COLOURS[name])[:, None, None] for name in (scene.colour, scene.background))
    return float(np.mean(np.abs(picture - front).sum(0) < np.abs(picture - back).sum(0)))


@pytest.mark.parametrize("scene", SCENES)
def test_of_an_outline_only_the_border_is_drawn(scene: Scene) -> None:
    whole, border = (share(draw(scene, 96, 96, Random(1), one), scene) for one in (None, WIDTH))
    assert 0.2 * whole < border < 0.5 * whole


@pytest.mark.exhaustive
def test_the_lora_of_the_examples_draws_outlines() -> None:
    family = load(ModelSource(path="shapes", loras=(LoraSource("outline", str(FILE)),), threads=2))
    family.loras.add("outline", FILE)
    for scene in SCENES:
        spec = tiny.spec(prompt=caption(scene), width=96, height=96, steps=12, guidance_scale=4.0, seed=7)
        shares = []
        for loras in ((), (UsedLora("outline", 1.0),)):
            family.loras.use(loras)
            image = drawn(family, replace(spec, loras=loras))
            pixels = np.frombuffer(bytes(image.pixels), np.uint8).reshape(96, 96, 3) / 255
            shares.append(share(pixels.transpose(2, 0, 1), scene))
        plain, outline = shares
        assert 0.1 * plain < outline < 0.75 * plain, scene
