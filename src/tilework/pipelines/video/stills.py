"""Images of a video file: its first frame, and a sheet of many. They are made when a client asks for them."""

from __future__ import annotations

import io
import math
from typing import Any

from PIL import Image as Pillow

from tilework.core.preview import spread
from tilework.core.wire.spec import File
from tilework.pipelines.video.pyav import pyav

_THUMBNAIL_SIDE, _TILE_SIDE = 512, 160
_MOST_TILES = 25
_QUALITY = 85


def thumbnail(content: bytes) -> File:
    """Return the first frame of a video, which fits into 512 x 512, as WebP."""
    with pyav().open(io.BytesIO(content), "r") as container:
        first = _picture(next(container.decode(video=0)))
    first.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
    return _file(first, "webp")


def some_frames(content: bytes) -> list[Pillow.Image]:
    """Return up to 25 frames of a video, spread evenly, including the first and the last."""
    with pyav().open(io.BytesIO(content), "r") as container:
        wanted = set(spread(container.streams.video[0].frames, _MOST_TILES))
        return [_picture(frame) for index, frame in enumerate(container.decode(video=0)) if index in wanted]


def spritesheet(content: bytes) -> File:
    """Return up to 25 frames of a video, spread evenly, as JPEG: row by row in a square whose end may lack tiles.

    Each fits into 160 x 160.
    """
    tiles = some_frames(content)
    for tile in tiles:
        tile.thumbnail((_TILE_SIDE, _TILE_SIDE))
    width, height = tiles[0].size
    num_columns = math.ceil(math.sqrt(len(tiles)))
    sheet = Pillow.new("RGB", (num_columns * width, -(-len(tiles) // num_columns) * height))
    for index, tile in enumerate(tiles):
        row, column = divmod(index, num_columns)
        sheet.paste(tile, (column * width, row * height))
    return _file(sheet, "jpeg")


def _picture(frame: Any) -> Pillow.Image:
    return Pillow.fromarray(frame.to_ndarray(format="rgb24"))


def _file(picture: Pillow.Image, form: str) -> File:
    buffer = io.BytesIO()
    picture.save(buffer, form.upper(), quality=_QUALITY)
    return File(buffer.getvalue(), f"image/{form}")
