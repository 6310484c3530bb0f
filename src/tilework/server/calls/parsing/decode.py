"""Decodes the picture files of clients. Nothing in a file is trusted: limits hold before it is decoded."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image as Pillow
from PIL import ImageChops, ImageOps, UnidentifiedImageError

from tilework.core.wire.spec import Image

FORMATS = ("PNG", "JPEG", "WEBP")
_ANIMATED_FORMATS = ("PNG", "WEBP")  # A JPEG may hold more pictures, too (MPO): phones add a small one.
_JPEG_START, _SCAN = b"\xff\xd8", b"\xff\xda"
# Each scan goes over all pixels again, and may have a few bytes only: hundreds of thousands fit into a small file. An
# ordinary progressive JPEG has about ten.
_MOST_SCANS = 100


class Undecodable(Exception):
    """The file cannot be used; the text says why, and what to give instead."""


def decode(content: bytes, *, is_mask: bool, max_pixels: int) -> Image:
    """The picture in a PNG, JPEG or WebP file, upright and in 8-bit RGB.

    What is transparent is white, as on paper. A mask says where to draw, in white: where the file is transparent (as
    OpenAI has it), or where it is white if it has no transparent part (as diffusers has it).

    Raises:
        Undecodable: it is another kind of file, damaged, animated, or has more than `max_pixels`.
    """
    if content.startswith(_JPEG_START) and content.count(_SCAN) > _MOST_SCANS:
        raise Undecodable(f"It has more than {_MOST_SCANS} scans: save it as a baseline JPEG.")
    try:
        with Pillow.open(io.BytesIO(content), formats=FORMATS) as picture:
            _check_head(picture, max_pixels)
            upright = _in_8_bits(ImageOps.exif_transpose(picture))
            rgb = _mask(upright) if is_mask else _on_white(upright)
    except Undecodable:
        raise
    except Pillow.DecompressionBombError:
        raise Undecodable(f"It has more than {max_pixels} pixels: give a smaller one.") from None
    except UnidentifiedImageError:
        raise Undecodable("It is no PNG, JPEG or WebP file, or its beginning is damaged: give one of these.") from None
    except Exception as error:  # For damaged files Pillow raises errors of nearly every type.
        reason = str(error)[:100] or type(error).__name__
        raise Undecodable(f"The file is damaged ({reason}): save the picture again.") from None
    return Image(rgb.height, rgb.width, rgb.tobytes())


def _check_head(picture: Pillow.Image, max_pixels: int) -> None:
    """By what its head says; no pixel is decoded yet."""
    width, height = picture.size
    if width * height > max_pixels:
        raise Undecodable(f"It has {width}x{height} pixels, and at most {max_pixels} are left: give a smaller one.")
    if picture.format in _ANIMATED_FORMATS and getattr(picture, "is_animated", False):
        raise Undecodable("It is animated: give one picture of it.")


def _in_8_bits(picture: Pillow.Image) -> Pillow.Image:
    """Pillow itself would cut off what is brighter than 255 of 65535."""
    if not picture.mode.startswith("I"):
        return picture
    values = np.asarray(picture).astype(np.int64) >> 8
    return Pillow.fromarray(values.clip(0, 255).astype(np.uint8))


def _on_white(picture: Pillow.Image) -> Pillow.Image:
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    opaque = Pillow.new("RGBA", picture.size, "white")
    return Pillow.alpha_composite(opaque, picture.convert("RGBA")).convert("RGB")


def _mask(picture: Pillow.Image) -> Pillow.Image:
    """A file whose alpha says nothing, since all of it is opaque, is one without alpha."""
    if picture.has_transparency_data:
        alpha = picture.convert("RGBA").getchannel("A")
        if alpha.getextrema() != (255, 255):
            return ImageChops.invert(alpha).convert("RGB")
    return picture.convert("RGB").convert("L").convert("RGB")
