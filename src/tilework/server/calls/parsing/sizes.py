"""The size of a call's images, and the number of a clip's frames, within the limits of the model and the server."""

from __future__ import annotations

import math
import re

from tilework.core.model import ModelInfo
from tilework.core.request import Shape
from tilework.core.wire.spec import Image
from tilework.server.calls.errors import invalid
from tilework.server.config import ServerConfig
from tilework.server.schema.foreign_fields import OPENAI_SIZES
from tilework.server.schema.image_request import ImageRequest


def shape_of(
    ask: ImageRequest, info: ModelInfo, config: ServerConfig, picture: Image | None, num_given: int | None = None
) -> Shape:
    """Return the shape that is asked for; else the size of the given picture, or the model's.

    Unless the server is strict, one of OpenAI's sizes that is not allowed here is made smaller in proportion, or is
    replaced by the size of a picture that decides it.

    `num_given` is the number of frames of the given clip that decides how many are made (`ModelInfo.frames_of`), if
    there is one.

    Raises:
        InvalidValue: the model or the configuration does not allow it.
    """
    frames = _frames(ask, info, num_given)
    if picture is not None and not info.takes_size:
        return _shape_of_picture(ask, info, frames, picture, is_strict=config.strict)
    default = _default(info, frames, config.max_pixels, picture)
    size = _size(ask, default)
    if size in OPENAI_SIZES and not config.strict:
        plain = _fitted(*_sides(size), info, config.max_pixels // frames)
    else:
        plain = _plain_shape(size, info, default)
    shape = Shape(plain.height, plain.width, frames)
    if shape.pixels > config.max_pixels:
        given = size_text(shape) if size is None else size
        what = "An image has" if frames == 1 else f"{frames} frames have"
        remedy = f"{what} at most {config.max_pixels} pixels here; this one has {shape.pixels}."
        raise invalid("size", given, remedy if frames == 1 else f"{remedy} Give a smaller size, or fewer num_frames.")
    return shape


def size_text(shape: Shape) -> str:
    """Return width and height, as clients write them."""
    return f"{shape.width}x{shape.height}"


def _shape_of_picture(ask: ImageRequest, info: ModelInfo, frames: int, picture: Image, *, is_strict: bool) -> Shape:
    """Return the size that the stock call makes of a picture: its own, cut to legal sides."""
    multiple = info.side_multiple
    height, width = (side // multiple * multiple for side in (picture.height, picture.width))
    if not (height and width) or max(height, width) > info.max_side:
        name = next(one.name for one in info.pictures if not one.is_mask)
        remedy = (
            f"{info.name} draws at the size of this image: give one with sides from {multiple} to {info.max_side} "
            "pixels."
        )
        raise invalid(name, f"an image of {picture.width}x{picture.height}", remedy)
    shape = Shape(height, width, frames)
    size = _size(ask, shape)
    if size not in (None, "auto", size_text(shape)) and (is_strict or size not in OPENAI_SIZES):
        remedy = f"{info.name} draws at the size of the input image: leave it out, or give another image."
        raise invalid("size", size, remedy, code="unsupported_value")
    return shape


def _frames(ask: ImageRequest, info: ModelInfo, num_given: int | None) -> int:
    frames = info.default_frames if ask.num_frames is None else ask.num_frames
    if num_given is not None:
        return _given_frames(ask, info, num_given)
    if info.default_frames == 1:
        if frames != 1:
            raise invalid("num_frames", frames, f"{info.name} makes single images: give 1, or leave it out.")
        return 1
    multiple = info.frame_multiple
    if not 1 <= frames <= info.max_frames or (frames - 1) % multiple:
        most = info.max_frames - (info.max_frames - 1) % multiple
        near = 1 + multiple * round((min(max(frames, 1), most) - 1) / multiple)
        rule = "" if multiple == 1 else f", one more than a multiple of {multiple}"
        raise invalid("num_frames", frames, f"Give an integer from 1 to {most}{rule}; the nearest is {near}.")
    return frames


def _given_frames(ask: ImageRequest, info: ModelInfo, num_given: int) -> int:
    if ask.num_frames not in (None, num_given):
        remedy = f"{info.frames_of} has {num_given} frames, and the clip gets as many: leave it out."
        raise invalid("num_frames", ask.num_frames, remedy)
    multiple = info.frame_multiple
    if (num_given - 1) % multiple:
        near = 1 + (num_given - 1) // multiple * multiple
        remedy = f"Give one more than a multiple of {multiple}, such as the first {near}."
        raise invalid(info.frames_of, f"a clip of {num_given} frames", remedy)
    return num_given


def _default(info: ModelInfo, frames: int, max_pixels: int, picture: Image | None) -> Shape:
    """Return the model's size, or that of the picture, made smaller in proportion if needed, and cut to legal sides."""
    if picture is None:
        return Shape(info.default_height, info.default_width)
    return _fitted(picture.height, picture.width, info, max_pixels // frames)


def _fitted(height: int, width: int, info: ModelInfo, max_pixels: int) -> Shape:
    """Make these sides smaller in proportion if needed, then cut them to legal ones."""
    scale = min(1.0, info.max_side / max(height, width), math.sqrt(max_pixels / (height * width)))
    multiple = info.side_multiple
    rows, columns = (max(1, int(side * scale + 1e-9) // multiple) * multiple for side in (height, width))
    return Shape(rows, columns)


def _sides(size: str) -> tuple[int, int]:
    """Return height and width of a size that is written as one."""
    width, _, height = size.partition("x")
    return int(height), int(width)


def _size(ask: ImageRequest, default: Shape) -> str | None:
    """Return the size as one text; a side that is not given is the default's."""
    if ask.width is None and ask.height is None:
        return ask.size
    if ask.size is not None:
        raise invalid("size", ask.size, "width or height is given as well: leave one of them out.")
    return f"{ask.width or default.width}x{ask.height or default.height}"


def _plain_shape(size: str | None, info: ModelInfo, default: Shape) -> Shape:
    if size is None or size == "auto":
        return default
    match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", size)
    if match is None:
        remedy = f'Give "auto", or width and height in pixels as in "{info.default_width}x{info.default_height}".'
        raise invalid("size", size, remedy)
    asked = Shape(width=int(match[1]), height=int(match[2]))
    nearest = Shape(width=_legal_side(asked.width, info), height=_legal_side(asked.height, info))
    if asked != nearest:
        limits = f"Sides are multiples of {info.side_multiple}, at most {info.max_side}"
        raise invalid("size", size, f'{limits}; the nearest size is "{size_text(nearest)}".')
    return asked


def _legal_side(side: int, info: ModelInfo) -> int:
    """Return the nearest legal side; the larger one if two are equally near."""
    multiples = (2 * side + info.side_multiple) // (2 * info.side_multiple)
    return info.side_multiple * min(max(multiples, 1), info.max_side // info.side_multiple)
