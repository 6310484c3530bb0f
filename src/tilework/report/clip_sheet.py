"""Frames of clips on one sheet: a row for each clip, from its first frame to its last."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
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
    frames = {place: read_frames(clip.image) for place, clip in enumerate(clips) if clip.image is not None}
    draw_frames(path, clips, frames, title=title, columns=columns)


def draw_frames(
    path: Path | str,
    clips: Sequence[Frame],
    frames: Mapping[int, Sequence[bytes]],
    *,
    title: str = "",
    columns: int = COLUMNS,
    side: int = 192,
) -> None:
    """The same for clips whose frames are pictures already, encoded, by the place of their clip; none if it failed.

    Raises:
        ValueError: there are no clips, or a picture cannot be read.
    """
    cells = [cell for place, clip in enumerate(clips) for cell in _row(clip, frames.get(place, ()), columns)]
    draw_contact_sheet(path, cells, columns=columns, title=title, side=side)


def _row(clip: Frame, pictures: Sequence[bytes], columns: int) -> list[Frame]:
    if not pictures:
        return [clip, *[Frame(image=None, caption="", size="", note=" ")] * (columns - 1)]
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
