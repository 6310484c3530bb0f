"""Procedural clips with captions: the data that the `shapes-motion` model learns from, and is judged against.

A scene is one flat shape on a flat background, in colours of `shapes`, that moves at a steady speed or stands still.
Lengths are relative to the shorter side of the frame. How far a shape moves does not depend on the number of frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from random import Random

import numpy as np

from training.shapes.drawing import COLOURS, article, signed_distance

SHAPES = ("circle", "square", "triangle")
FRONTS = ("red", "green", "blue", "yellow", "orange", "purple")
BACKGROUNDS = ("black", "white")
# Motion -> direction of (x, y); y points down.
MOTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}
TEMPLATES = (
    "{a} {colour} {shape} {does} {motion} on a {background} background",
    "{colour} {shape} {doing} {motion}, {background} background",
    "{a} {colour} {shape} {does} {motion}",
)
DRAWN = {
    "colour": list(FRONTS),
    "shape": list(SHAPES),
    "motion": list(MOTIONS),
    "background": list(BACKGROUNDS),
}
"""What captions say, by kind."""
RADIUS = (0.14, 0.20)
TRAVEL = (0.30, 0.42)
_GAP = 0.02  # Between the shape and the edge of the frame.


@dataclass(frozen=True, slots=True)
class Scene:
    """What a clip shows. `motion` is a key of MOTIONS; whether a caption mentions the background is its own affair."""

    colour: str
    shape: str
    motion: str
    background: str


def caption(scene: Scene, template: int = 0) -> str:
    """Describe `scene` in one of the TEMPLATES; the last leaves the background open."""
    does, doing = ("stands", "standing") if scene.motion == "still" else ("moves", "moving")
    return TEMPLATES[template].format(
        a=article(scene.colour),
        colour=scene.colour,
        shape=scene.shape,
        does=does,
        doing=doing,
        motion=scene.motion,
        background=scene.background,
    )


def all_scenes() -> list[Scene]:
    return [Scene(*values) for values in product(FRONTS, SHAPES, MOTIONS, BACKGROUNDS)]


def split_scenes(held_out_share: float = 0.14, seed: int = 7) -> tuple[list[Scene], list[Scene]]:
    """Split all scenes into (training, held out) by (colour, shape, motion), whatever the background."""
    combinations = sorted({(scene.colour, scene.shape, scene.motion) for scene in all_scenes()})
    held_out = set(Random(seed).sample(combinations, round(held_out_share * len(combinations))))
    training = [s for s in all_scenes() if (s.colour, s.shape, s.motion) not in held_out]
    return training, [s for s in all_scenes() if (s.colour, s.shape, s.motion) in held_out]


def draw(scene: Scene, frames: int, height: int, width: int, rng: Random) -> np.ndarray:
    """Draw `scene` anti-aliased, on a random path that stays inside the frame.

    Returns float32 of shape (3, frames, height, width) in [0, 1].
    """
    side = min(height, width)
    radius, travel = rng.uniform(*RADIUS) * side, rng.uniform(*TRAVEL) * side
    moved = np.linspace(0, travel, frames, dtype=np.float32)
    margin = radius + _GAP * side
    place = []
    for length, direction in zip((width, height), MOTIONS[scene.motion], strict=True):
        start = rng.uniform(margin, length - margin - abs(direction) * travel)
        place.append((start if direction >= 0 else length - start) + direction * moved)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32) + 0.5
    centre_x, centre_y = (centres[:, None, None] for centres in place)
    alpha = np.clip(0.5 - signed_distance(scene.shape, x - centre_x, y - centre_y, radius), 0, 1)[None]
    front, back = (
        np.array(COLOURS[name], np.float32)[:, None, None, None] for name in (scene.colour, scene.background)
    )
    return (alpha * front + (1 - alpha) * back).astype(np.float32)
