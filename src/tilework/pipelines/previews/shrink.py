"""Latents of a preview: fewer of them, so that they decode at a fraction of the cost."""

from __future__ import annotations

import numpy as np
from PIL import Image as Pillow
from torch import Tensor
from torch.nn.functional import interpolate

from tilework.core.preview import shown_frames, spread
from tilework.core.request import Shape
from tilework.core.wire.spec import Image


def shrunk(latents: Tensor, whole: Shape, small: Shape) -> Tensor:
    """Shrink latents of an image or clip of `whole` size, as a decoder takes them, to about the `small` size.

    They are (rows, channels, height, width), or (rows, channels, frames, height, width) with some frames left out;
    other latents are returned unchanged. The mean of latents decodes to about the mean of the pixels.
    """
    if latents.ndim not in (4, 5):
        return latents
    sides = [
        max(1, side * new // old)
        for side, new, old in zip(
            latents.shape[-2:], (small.height, small.width), (whole.height, whole.width), strict=True
        )
    ]
    if latents.ndim == 4:
        return interpolate(latents, sides, mode="area")
    kept = latents[:, :, spread(latents.shape[2], _num_latents(latents.shape[2], whole.frames, small.frames))]
    return interpolate(kept, [kept.shape[2], *sides], mode="area")


def preview_of(frames: np.ndarray, small: Shape) -> Image:
    """Return the preview from decoded frames, (frames, rows, columns, 3) of 8 bits, at most of the `small` size."""
    shown = [Pillow.fromarray(frames[index]) for index in shown_frames(len(frames))]
    size = (small.width, small.height)
    shown = [one if one.size == size else one.resize(size) for one in shown]
    return Image(small.height, small.width, b"".join(one.tobytes() for one in shown), len(shown))


def _num_latents(num_latents: int, whole: int, small: int) -> int:
    """Return how many latents decode to about a `small` number of frames, if all of them decode to the `whole` clip."""
    if num_latents < 2 or whole <= small:
        return num_latents
    each = max(1, round((whole - 1) / (num_latents - 1)))
    return max(2, 1 + (small - 1) // each)
