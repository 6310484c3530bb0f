"""Frames of clips on one sheet: a row for each clip, from its first frame to its last."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from tilework.report.contact_sheet import Frame, draw_contact_sheet

COLUMNS = 5


def draw_clip_sheet(path: Path | str, clips: Sequence[Frame], *, title: str = "", columns: int = COLUMNS) -> None:
    """Write a PNG with `columns` frames of each clip, at equal distances; `image` of a clip is its video file.

    Raises:
        ValueError: there are no clips, or a video cannot be read.
    """
    cells = [cell for clip in clips for cell in _row(clip, columns)]
    draw_contact_sheet(path, cells, columns=columns, title=title)


def _row(clip: Frame, columns: int) -> list[Frame]:
    if clip.image is None:
        return [clip, *[Frame(image=None, caption="", size="", note=" ")] * (columns - 1)]
    pictures = read_frames(clip.image)
    places = [round(index * (len(pictures) - 1) / (columns - 1)) for index in range(columns)]
    others = [
        Frame(image=pictures[place], caption="", size=f"frame {place + 1} of {len(pictures)}") for place in places[1:]
    ]
    return [replace(clip, image=pictures[0]), *others]


def read_frames(video: bytes) -> list[bytes]:
    """All frames of a video file as PNGs. Raises ValueError if it cannot be read."""
    import av

    try:
        with av.open(io.BytesIO(video), "r") as container:
            return [_png(Image.fromarray(frame.to_ndarray(format="rgb24"))) for frame in container.decode(video=0)]
    except (av.FFmpegError, IndexError) as error:
        raise ValueError(f"the video cannot be read: {error}") from error


def _png(picture: Image.Image) -> bytes:
    data = io.BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()
