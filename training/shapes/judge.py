"""Read colour, shape and background off a picture, by geometry alone: the automatic check of the `shapes` model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from training.shapes.drawing import COLOURS, PALETTE, SHAPES, signed_distance

COLOUR_NAMES = list(COLOURS)


class Verdict(NamedTuple):
    """What the judge sees; `shape` is "" and `colour` "" when nothing stands out from the background."""

    colour: str
    shape: str
    background: str


def nearest_colours(image: np.ndarray) -> np.ndarray:
    """Map (3, H, W) in [0, 1] to palette indices (H, W)."""
    difference = image[None] - PALETTE[:, :, None, None]
    return np.square(difference).sum(1).argmin(0)


class Ground(NamedTuple):
    """A picture taken apart: palette indices (H, W), which of them is the background's, and what stands out from it."""

    indices: np.ndarray
    background: int
    mask: np.ndarray


def find_ground(image: np.ndarray) -> Ground:
    """Take apart one picture of shape (3, H, W) in [0, 1]. The background is the commonest colour of the border."""
    indices = nearest_colours(image)
    border = np.concatenate(
        [indices[:3].ravel(), indices[-3:].ravel(), indices[:, :3].ravel(), indices[:, -3:].ravel()]
    )
    background = int(np.bincount(border, minlength=len(PALETTE)).argmax())
    back = np.median(image[:, indices == background], axis=1)
    return Ground(indices, background, np.square(image - back[:, None, None]).sum(0) > 0.04)


def judge(image: np.ndarray) -> Verdict:
    """Classify one picture of shape (3, H, W) in [0, 1].

    The shape is the template that, with the same centre and area, overlaps the foreground best (intersection over
    union).
    """
    return judge_ground(find_ground(image))


def judge_ground(ground: Ground) -> Verdict:
    indices, background, mask = ground
    if mask.sum() < 0.01 * mask.size:
        return Verdict("", "", COLOUR_NAMES[background])
    return Verdict(front_colour(indices, mask, background), best_shape(mask), COLOUR_NAMES[background])


def front_colour(indices: np.ndarray, mask: np.ndarray, background: int) -> str:
    counts = np.bincount(indices[mask], minlength=len(PALETTE))
    counts[background] = 0
    return COLOUR_NAMES[int(counts.argmax())]


def best_shape(mask: np.ndarray) -> str:
    y, x = np.nonzero(mask)
    return max(SHAPES, key=lambda shape: overlap(shape, mask, float(x.mean()), float(y.mean()), len(x)))


def overlap(shape: str, mask: np.ndarray, centre_x: float, centre_y: float, area: int) -> float:
    """Intersection over union of `mask` with the template of equal area and equal centroid."""
    grid_y, grid_x = np.mgrid[0 : mask.shape[0], 0 : mask.shape[1]].astype(np.float32)
    unit = UNIT[shape]
    radius = (area / unit.area) ** 0.5
    template = signed_distance(shape, grid_x - centre_x, grid_y - centre_y + unit.centroid_y * radius, radius) < 0
    return float((template & mask).sum() / max(1, (template | mask).sum()))


class UnitShape(NamedTuple):
    area: float
    centroid_y: float


def measure_unit(shape: str) -> UnitShape:
    """Area and vertical centroid of `shape` at radius 1."""
    y, x = np.mgrid[-2:2:801j, -2:2:801j]
    inside = signed_distance(shape, x, y, 1.0) < 0
    return UnitShape(float(inside.mean() * 16), float(y[inside].mean()))


UNIT = {shape: measure_unit(shape) for shape in SHAPES}
