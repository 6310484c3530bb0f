"""Read colour, shape, background and motion off a clip, by geometry alone: the check of the `shapes-motion` model."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from training.shapes.judge import find_ground, judge_ground
from training.shapes_motion.drawing import MOTIONS, TRAVEL

# Half of the least way, along an axis, of a shape that moves; relative to the shorter side.
MOVES = TRAVEL[0] / 2


class Verdict(NamedTuple):
    """What the judge sees. A property is "" if it sees none of its values, as the motion of a shape that vanishes."""

    colour: str
    shape: str
    background: str
    motion: str


def judge(clip: np.ndarray) -> Verdict:
    """Classify a clip of shape (3, frames, H, W) in [0, 1]: what most of its frames show, and where the shape goes."""
    grounds = [find_ground(frame) for frame in clip.swapaxes(0, 1)]
    verdicts = [judge_ground(ground) for ground in grounds]
    colour, shape, background = (Counter(values).most_common(1)[0][0] for values in zip(*verdicts, strict=True))
    return Verdict(colour, shape, background, motion([ground.mask for ground in grounds]))


def motion(masks: list[np.ndarray]) -> str:
    """The motion of what `masks` (H, W) show, frame by frame: a key of MOTIONS, or "".

    The centre of the shape is fitted by a straight line in time. It stands still if that goes less than MOVES along
    either axis, and moves along an axis if it goes less than half as far along the other one.
    """
    if any(mask.sum() < 0.01 * mask.size for mask in masks):
        return ""
    centres = np.array([np.argwhere(mask).mean(0)[::-1] for mask in masks]) / min(masks[0].shape)
    times = np.linspace(-0.5, 0.5, len(masks))
    way = (centres - centres.mean(0)).T @ times / np.square(times).sum()
    if np.abs(way).max() < MOVES:
        return "still"
    direction = tuple(int(sign) for sign in np.sign(way) * (np.abs(way) > np.abs(way).max() / 2))
    return next((name for name, of_name in MOTIONS.items() if of_name == direction), "")
