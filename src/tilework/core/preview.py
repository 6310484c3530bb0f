"""The size of previews: images, or a few frames of a clip, that are shown while the request is being denoised."""

from __future__ import annotations

from tilework.core.request import Shape

PREVIEW_SIDE = 256
DECODED_FRAMES = 17
"""Most frames of a clip that are decoded for its preview: whole latents in every family.

A latent has 1, 4, 8 or 16 frames after the first.
"""
SHOWN_FRAMES = 5
"""Most of these frames that a preview shows."""
_MULTIPLE = 16  # Pixels; whole latents in every family, since a latent is 4, 8 or 16 px wide.


def preview_shape(shape: Shape) -> Shape:
    """Return the shape that is decoded for the preview of an image or clip of this `shape`, for any model family.

    An image that fits into PREVIEW_SIDE x PREVIEW_SIDE keeps its size. For a larger one the longer side becomes
    PREVIEW_SIDE and the other side is scaled with it, rounded to a multiple of 16 and at least 16. Of a clip at most
    DECODED_FRAMES frames are decoded, and `shown_frames` of these are shown.
    """
    longer = max(shape.height, shape.width)
    frames = min(shape.frames, DECODED_FRAMES)
    if longer <= PREVIEW_SIDE:
        return Shape(shape.height, shape.width, frames)
    return Shape(_shrunk(shape.height, longer), _shrunk(shape.width, longer), frames)


def shown_frames(num_frames: int) -> list[int]:
    """Return the indices of the frames that a preview shows: the first, the last, and others spread evenly between."""
    return spread(num_frames, SHOWN_FRAMES)


def spread(num_items: int, most: int) -> list[int]:
    """Return the indices of `most` items, or of all if they are fewer: first, last, and others spread evenly."""
    if num_items <= most:
        return list(range(num_items))
    return [round(index * (num_items - 1) / (most - 1)) for index in range(most)]


def _shrunk(side: int, longer: int) -> int:
    num_multiples = round(side * PREVIEW_SIDE / (longer * _MULTIPLE))
    return min(side, max(1, num_multiples) * _MULTIPLE)
