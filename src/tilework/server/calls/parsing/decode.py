"""Decodes the picture files of clients. Nothing in a file is trusted: limits are checked before it is decoded."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image as Pillow
from PIL import ImageChops, ImageOps, UnidentifiedImageError

from tilework.core.wire.spec import Image
from tilework.server.bounded.new_file import ended, new_file
from tilework.server.calls.parsing.file_parts import Undecodable, check_parts

_WEBP = "WEBP"
FORMATS = ("PNG", "JPEG", _WEBP)
_ANIMATED_FORMATS = ("PNG", _WEBP)  # A JPEG may hold more pictures, too (MPO): phones add a small one.
_STRIP_PIXELS = 1 << 18
_MOST_WEBP_PIXELS = 1 << 23
"""Most pixels of a WebP file: Pillow copies them all at once, which holds the interpreter for 2 ms per 1 Mi pixels."""
_HALF_OPAQUE = 128
"""Alpha below which a part is where stock pipelines draw: they round masks."""
_WHITE = 240
"""Least grey that may have been white before lossy compression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedPicture:
    """A decoded image, and whether its file has a part that is more transparent than opaque.

    A mask `is_white_on_transparent` if everything else in it is white: it was made for a server that draws where a mask
    is transparent, or for one that draws where it is white. Nothing in it says which.
    """

    image: Image
    has_transparent_part: bool
    is_white_on_transparent: bool


def decode(content: bytes, *, is_mask: bool, max_pixels: int | None) -> DecodedPicture:
    """Decode the picture in a PNG, JPEG or WebP file, upright and in 8-bit RGB.

    Transparent parts become white, as on paper. A mask says where to draw, in white: where the file is transparent (as
    OpenAI has it), or where it is white if it has no transparent part (as diffusers has it).

    Raises:
        Undecodable: it is another kind of file, damaged, animated, or has more than `max_pixels`. None sets no limit,
            for a file that was accepted before, maybe by a version with other limits.
    """
    check_parts(content)
    try:
        with Pillow.open(io.BytesIO(content), formats=FORMATS) as picture:
            _check_head(picture, max_pixels)
            upright = ImageOps.exif_transpose(picture)
            has_hole = _has_transparent_part(upright)
            pixels = _pixels(upright, _mask(has_hole) if is_mask else _on_white)
            is_ambiguous = is_mask and has_hole and _is_white(upright)
    except Undecodable:
        raise
    except Pillow.DecompressionBombError:
        raise Undecodable(f"It has more than {max_pixels} pixels: give a smaller one.") from None
    except UnidentifiedImageError:
        raise Undecodable("It is no PNG, JPEG or WebP file, or its beginning is damaged: give one of these.") from None
    except Exception as error:  # Pillow raises errors of nearly every type for damaged files.
        reason = str(error)[:100] or type(error).__name__
        raise Undecodable(f"The file is damaged ({reason}): save the image again.") from None
    return DecodedPicture(
        image=Image(upright.height, upright.width, pixels),
        has_transparent_part=has_hole,
        is_white_on_transparent=is_ambiguous,
    )


def _check_head(picture: Pillow.Image, max_pixels: int | None) -> None:
    """Check the head of a file; no pixel is decoded yet."""
    width, height = picture.size
    if max_pixels is not None and width * height > max_pixels:
        raise Undecodable(f"It has {width}x{height} pixels, and at most {max_pixels} are left: give a smaller one.")
    if max_pixels is not None and picture.format == _WEBP and width * height > _MOST_WEBP_PIXELS:
        raise Undecodable(
            f"It is a WebP file of {width}x{height} pixels, and may have {_MOST_WEBP_PIXELS}: save it as PNG or JPEG."
        )
    if picture.format in _ANIMATED_FORMATS and getattr(picture, "is_animated", False):
        raise Undecodable("It is animated: give one frame of it.")


def _pixels(picture: Pillow.Image, converted: Callable[[Pillow.Image], Pillow.Image]) -> bytes:
    """Convert strip by strip: on a whole picture, Pillow would hold the interpreter for a quarter of a second."""
    pixels = new_file(3 * picture.height * picture.width)
    for strip in _strips(picture):
        pixels.write(converted(strip).tobytes())
    return ended(pixels)


def _strips(picture: Pillow.Image) -> Iterator[Pillow.Image]:
    """Yield strips in 8 bits, each of at most `_STRIP_PIXELS` or one row."""
    num_rows = max(1, _STRIP_PIXELS // picture.width)
    for top in range(0, picture.height, num_rows):
        yield _in_8_bits(picture.crop((0, top, picture.width, min(top + num_rows, picture.height))))


def _in_8_bits(picture: Pillow.Image) -> Pillow.Image:
    """Scale a picture to 8 bits. Pillow itself would cut off values above 255 of 65535."""
    if not picture.mode.startswith("I"):
        return picture
    values = np.asarray(picture).astype(np.int64) >> 8
    return Pillow.fromarray(values.clip(0, 255).astype(np.uint8))


def _on_white(picture: Pillow.Image) -> Pillow.Image:
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    opaque = Pillow.new("RGBA", picture.size, "white")
    return Pillow.alpha_composite(opaque, picture.convert("RGBA")).convert("RGB")


def _mask(has_transparent_part: bool) -> Callable[[Pillow.Image], Pillow.Image]:
    """Return the function that makes the mask of a strip."""
    if has_transparent_part:
        return lambda strip: ImageChops.invert(_alpha(strip)).convert("RGB")
    return lambda strip: strip.convert("RGB").convert("L").convert("RGB")


def _has_transparent_part(picture: Pillow.Image) -> bool:
    if not picture.has_transparency_data:
        return False
    return any(_alpha_range(strip)[0] < _HALF_OPAQUE for strip in _strips(picture))


def _is_white(picture: Pillow.Image) -> bool:
    """Return whether there is an opaque part, and all of it is white."""
    if all(_alpha_range(strip)[1] < _HALF_OPAQUE for strip in _strips(picture)):
        return False
    return all(_darkest(_on_white(strip)) >= _WHITE for strip in _strips(picture))


def _alpha(strip: Pillow.Image) -> Pillow.Image:
    return strip.convert("RGBA").getchannel("A")


def _alpha_range(strip: Pillow.Image) -> tuple[int, int]:
    alpha = np.asarray(_alpha(strip))
    return int(alpha.min()), int(alpha.max())


def _darkest(strip: Pillow.Image) -> int:
    return int(np.asarray(strip.convert("L")).min())
