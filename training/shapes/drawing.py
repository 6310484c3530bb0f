"""Procedural drawings with captions: the data that the `shapes` model learns from, and is judged against.

A scene is one flat shape on a flat background. Sizes are relative to the shorter side of the image, so that a
"large circle" looks alike at 64 px and at 192 px.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.88, 0.10, 0.12),
    "green": (0.10, 0.65, 0.22),
    "blue": (0.12, 0.25, 0.90),
    "yellow": (0.98, 0.88, 0.12),
    "orange": (0.98, 0.52, 0.05),
    "purple": (0.55, 0.15, 0.70),
    "white": (0.97, 0.97, 0.97),
    "black": (0.04, 0.04, 0.04),
}
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = ("small", "large")
RADII = {"small": 0.17, "large": 0.31}
DRAWN = {
    "colour": list(COLOURS),
    "shape": list(SHAPES),
    "size": list(SIZES),
    "background": list(COLOURS),
}
"""What captions say, by kind."""
PALETTE = np.array(list(COLOURS.values()), dtype=np.float32)
TEMPLATES = (
    "{a_size}{size}{colour} {shape} on {a_background} {background} background",
    "{a_colour} {colour} {shape} on {a_background} {background} background",
    "{size}{colour} {shape} on {background}",
    "{colour} {shape}, {background} background",
)


@dataclass(frozen=True, slots=True)
class Scene:
    """What a drawing shows. `size` is a key of RADII; whether a caption mentions it is the caption's affair."""

    colour: str
    shape: str
    size: str
    background: str


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def caption(scene: Scene, template: int = 0) -> str:
    """Describe `scene` in one of the TEMPLATES; templates 1 and 3 leave the size open."""
    return TEMPLATES[template].format(
        a_size=article(scene.size) + " ",
        a_colour=article(scene.colour),
        a_background=article(scene.background),
        size=scene.size + " ",
        colour=scene.colour,
        shape=scene.shape,
        background=scene.background,
    )


def all_scenes() -> list[Scene]:
    return [
        Scene(colour, shape, size, background)
        for colour in COLOURS
        for shape in SHAPES
        for size in SIZES
        for background in COLOURS
        if background != colour
    ]


def split_scenes(held_out_share: float = 0.12, seed: int = 7) -> tuple[list[Scene], list[Scene]]:
    """Split all scenes into (training, held out) by (colour, shape, background), whatever the size.

    A held-out caption is therefore a combination that training never showed at any size.
    """
    rng = Random(seed)
    combinations = sorted({(s.colour, s.shape, s.background) for s in all_scenes()})
    held_out = set(rng.sample(combinations, round(held_out_share * len(combinations))))
    training = [s for s in all_scenes() if (s.colour, s.shape, s.background) not in held_out]
    return training, [s for s in all_scenes() if (s.colour, s.shape, s.background) in held_out]


def signed_distance(shape: str, x: np.ndarray, y: np.ndarray, radius: np.ndarray | float) -> np.ndarray:
    """Approximate signed distance (negative inside) to `shape` of `radius` centred at the origin; y points down."""
    if shape == "circle":
        return np.sqrt(x * x + y * y) - radius
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - radius * 0.86
    if shape == "triangle":
        return np.maximum(y - radius * 0.75, (np.abs(x) * 1.8 - y - radius) / 2.06)
    horizontal = np.maximum(np.abs(x) - radius, np.abs(y) - radius * 0.32)
    vertical = np.maximum(np.abs(y) - radius, np.abs(x) - radius * 0.32)
    return np.minimum(horizontal, vertical)


def draw(scene: Scene, height: int, width: int, rng: Random, border: float | None = None) -> np.ndarray:
    """Draw `scene` anti-aliased at a random place; float32 of shape (3, height, width) in [0, 1].

    Of the shape all is drawn, or a `border` of this width, relative to the shorter side.
    """
    side = min(height, width)
    radius = (RADII[scene.size] + 0.03 * (rng.random() - 0.5)) * side
    margin = radius + 0.03 * side
    centre_x = width / 2 + (2 * rng.random() - 1) * min(0.18 * width, max(0.0, width / 2 - margin))
    centre_y = height / 2 + (2 * rng.random() - 1) * min(0.18 * height, max(0.0, height / 2 - margin))
    y, x = np.mgrid[0:height, 0:width].astype(np.float32) + 0.5
    distance = signed_distance(scene.shape, x - centre_x, y - centre_y, radius)
    if border is not None:
        distance = np.abs(distance + border * side / 2) - border * side / 2
    alpha = np.clip(0.5 - distance, 0, 1)[None]
    front = np.array(COLOURS[scene.colour], dtype=np.float32)[:, None, None]
    back = np.array(COLOURS[scene.background], dtype=np.float32)[:, None, None]
    return (alpha * front + (1 - alpha) * back).astype(np.float32)
