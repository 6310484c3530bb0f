"""The size of previews: pictures that are shown while the request is being denoised."""

from __future__ import annotations

from tilework.core.request import Shape

PREVIEW_SIDE = 256
_MULTIPLE = 16  # Pixels; whole latents in every family, as a latent is 4, 8 or 16 px wide.


def preview_shape(shape: Shape) -> Shape:
    """The size of the preview of a picture of this `shape`, for any model family.

    A picture that fits into PREVIEW_SIDE x PREVIEW_SIDE keeps its size. For a larger one the longer side becomes
    PREVIEW_SIDE and the other side is scaled with it, rounded to a multiple of 16 and at least 16. A clip's preview is
    one frame.
    """
    longer = max(shape.height, shape.width)
    if longer <= PREVIEW_SIDE:
        return Shape(shape.height, shape.width)
    return Shape(_shrunk(shape.height, longer), _shrunk(shape.width, longer))


def _shrunk(side: int, longer: int) -> int:
    num_multiples = round(side * PREVIEW_SIDE / (longer * _MULTIPLE))
    return min(side, max(1, num_multiples) * _MULTIPLE)
