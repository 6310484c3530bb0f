"""Images as stages write them, tensors of 8 bits, and as functions of users get them, images of PIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from torch import Tensor

from tilework.core.wire.spec import Image


def is_picture(value: object) -> bool:
    """Return whether a value is an image, (rows, columns, 3) of 8 bits, or a clip, (frames, rows, columns, 3)."""
    return isinstance(value, Tensor) and value.dtype is torch.uint8 and value.dim() in (3, 4) and value.shape[-1] == 3


def for_user(value: Any) -> Any:
    """Return what a function gets: an image of PIL for an image, a list of them for a clip, else the value itself."""
    if not is_picture(value):
        return value
    frames = value.cpu().numpy().reshape(-1, *value.shape[-3:])
    pictures = [Pillow.fromarray(frame) for frame in frames]
    return pictures if len(pictures) > 1 else pictures[0]


def from_user(value: Any) -> Any:
    """Invert `for_user`; images become RGB."""
    if isinstance(value, Pillow.Image):
        return torch.from_numpy(np.array(value.convert("RGB")))
    if isinstance(value, Sequence) and value and all(isinstance(one, Pillow.Image) for one in value):
        return torch.stack([from_user(one) for one in value])
    return value


def image_of(value: Tensor) -> Image:
    """Return an image or clip as a result."""
    *frames, rows, columns, _ = value.shape
    pixels = value.cpu().contiguous().numpy().tobytes()
    return Image(height=rows, width=columns, pixels=pixels, frames=frames[0] if frames else 1)


def tensor_of(image: Image) -> Tensor:
    """Invert `image_of`, for an image that a request gives."""
    pixels = torch.from_numpy(np.frombuffer(image.pixels, np.uint8).copy())
    shape = (image.height, image.width, 3)
    return pixels.view(shape if image.frames == 1 else (image.frames, *shape))
