"""Pictures as stages write them, tensors of 8 bits, and as functions of users get them, images of PIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from torch import Tensor

from tilework.core.wire.spec import Image


def is_picture(value: object) -> bool:
    """Whether a value is a picture, (rows, columns, 3) of 8 bits, or a clip, (frames, rows, columns, 3)."""
    return isinstance(value, Tensor) and value.dtype is torch.uint8 and value.dim() in (3, 4) and value.shape[-1] == 3


def for_user(value: Any) -> Any:
    """What a function gets: an image of PIL for a picture, a list of them for a clip, and all else as it is."""
    if not is_picture(value):
        return value
    frames = value.cpu().numpy().reshape(-1, *value.shape[-3:])
    pictures = [Pillow.fromarray(frame) for frame in frames]
    return pictures if len(pictures) > 1 else pictures[0]


def from_user(value: Any) -> Any:
    """The inverse of `for_user`; pictures become RGB."""
    if isinstance(value, Pillow.Image):
        return torch.from_numpy(np.array(value.convert("RGB")))
    if isinstance(value, Sequence) and value and all(isinstance(one, Pillow.Image) for one in value):
        return torch.stack([from_user(one) for one in value])
    return value


def image_of(value: Tensor) -> Image:
    """A picture or clip as a result."""
    *frames, rows, columns, _ = value.shape
    pixels = value.cpu().contiguous().numpy().tobytes()
    return Image(height=rows, width=columns, pixels=pixels, frames=frames[0] if frames else 1)


def tensor_of(image: Image) -> Tensor:
    """The inverse of `image_of`: what a request gives."""
    pixels = torch.from_numpy(np.frombuffer(image.pixels, np.uint8).copy())
    shape = (image.height, image.width, 3)
    return pixels.view(shape if image.frames == 1 else (image.frames, *shape))
