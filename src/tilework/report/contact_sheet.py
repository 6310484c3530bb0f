"""Many images on one sheet, each with its caption and how it was served; and clips, a row of frames for each."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

PAPER = "#FFFFFF"
MAT = "#ECEEF0"
EDGE = "#C9CDD1"
INK = "#1F2328"
FAINT = "#6B7075"
GOOD, BAD = "#00664B", "#B3261E"
GAP = 16
CAPTION_LINES = 3
FONT_SIZE = 13
LINE_HEIGHT = FONT_SIZE + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One cell. `image` is an encoded image; None draws an empty frame with `note` ("failed: ...") in it.

    `on_time` None means that there was no deadline; `latency_s` None leaves the time out.
    """

    image: bytes | None
    caption: str
    size: str
    latency_s: float | None = None
    on_time: bool | None = None
    note: str = ""


def draw_contact_sheet(
    path: Path | str, frames: Sequence[Frame], *, columns: int | None = None, side: int = 192, title: str = ""
) -> None:
    """Write a PNG grid of frames in reading order, each image fitted into `side` x `side` pixels.

    Images keep their aspect; small ones are enlarged. By default the sheet is about 1.6 times as wide as high.

    Raises:
        ValueError: there are no frames, or an image cannot be read; names the frame's place.
    """
    if not frames:
        raise ValueError("there are no images for the contact sheet")
    cell_height = side + 10 + LINE_HEIGHT * (CAPTION_LINES + 1) + GAP
    columns = columns or _columns(len(frames), side + GAP, cell_height)
    top = GAP + (LINE_HEIGHT + 18 if title else 0)
    rows = math.ceil(len(frames) / columns)
    sheet = Image.new("RGB", (columns * (side + GAP) + GAP, top + rows * cell_height), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((GAP, GAP), title, fill=INK, font=ImageFont.load_default(FONT_SIZE + 5))
    for index, frame in enumerate(frames):
        row, column = divmod(index, columns)
        corner = (GAP + column * (side + GAP), top + row * cell_height)
        sheet.paste(_mounted(index, frame, side), corner)
        _write_caption(pen, frame, corner[0], corner[1] + side + 8, side)
    sheet.save(path, "PNG")


def wrap(text: str, width: float, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, max_lines: int) -> list[str]:
    """Break text between words into lines of at most `width` pixels; what does not fit ends in "..."."""
    lines: list[str] = []
    for word in text.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], f"{lines[max_lines - 1]} ..."]
    return [_shortened(line, width, font) for line in lines]


def _shortened(line: str, width: float, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    if font.getlength(line) <= width:
        return line
    line = line.removesuffix(" ...")
    while line and font.getlength(f"{line}...") > width:
        line = line[:-1]
    return f"{line}..."


def _columns(num_frames: int, cell_width: int, cell_height: int) -> int:
    """Choose the columns of a sheet about 1.6 times as wide as high.

    Of the three nearest counts, takes the one that leaves the fewest cells empty."""
    wanted = math.sqrt(num_frames * 1.6 * cell_height / cell_width)
    near = [count for count in range(round(wanted) - 1, round(wanted) + 2) if 1 <= count <= num_frames]
    return min(near, key=lambda count: (-num_frames % count, abs(count - wanted)), default=num_frames)


def _mounted(index: int, frame: Frame, side: int) -> Image.Image:
    """Return the image in the middle of a neutral square."""
    mat = Image.new("RGB", (side, side), MAT)
    pen = ImageDraw.Draw(mat)
    if frame.image is None:
        font = ImageFont.load_default(FONT_SIZE)
        _write(pen, wrap(frame.note or "no image", side - 24, font, 6), 12, 12, INK)
    else:
        picture = _fitted(_opened(index, frame.image), side)
        mat.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    pen.rectangle((0, 0, side - 1, side - 1), outline=EDGE)
    return mat


def _opened(index: int, data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data)).convert("RGB")
    except OSError as error:
        raise ValueError(f"image {index} of the contact sheet cannot be read: {error}") from error


def _fitted(picture: Image.Image, side: int) -> Image.Image:
    longest = max(picture.size)
    size = (max(1, picture.width * side // longest), max(1, picture.height * side // longest))
    return picture.resize(size, Image.Resampling.LANCZOS)


def _write_caption(pen: ImageDraw.ImageDraw, frame: Frame, x: int, y: int, width: int) -> None:
    font = ImageFont.load_default(FONT_SIZE)
    facts = frame.size if frame.latency_s is None else f"{frame.size}   {frame.latency_s:.2f} s"
    indent = 0
    if frame.on_time is not None:
        _draw_mark(pen, frame.on_time, x, y + 1)
        indent = 18
        facts += "" if frame.on_time else "   late" if frame.image is not None else "   missed"
    _write(pen, [facts], x + indent, y, BAD if frame.on_time is False else FAINT)
    _write(pen, wrap(frame.caption, width, font, CAPTION_LINES), x, y + LINE_HEIGHT + 1, INK)


def _draw_mark(pen: ImageDraw.ImageDraw, good: bool, x: int, y: int) -> None:
    """Draw a tick in a disc, or a cross in a square; fonts differ in which marks they hold."""
    if good:
        pen.ellipse((x, y, x + 13, y + 13), fill=GOOD)
        pen.line(((x + 3, y + 7), (x + 6, y + 10), (x + 10, y + 4)), fill="white", width=2)
    else:
        pen.rectangle((x, y, x + 13, y + 13), fill=BAD)
        pen.line((x + 4, y + 4, x + 9, y + 9), fill="white", width=2)
        pen.line((x + 4, y + 9, x + 9, y + 4), fill="white", width=2)


def _write(pen: ImageDraw.ImageDraw, lines: Iterable[str], x: int, y: int, ink: str) -> None:
    font = ImageFont.load_default(FONT_SIZE)
    for index, line in enumerate(lines):
        pen.text((x, y + index * LINE_HEIGHT), line, fill=ink, font=font)


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
    """Write the same for clips whose frames are encoded images, by the place of their clip; none if it failed.

    Raises:
        ValueError: there are no clips, or an image cannot be read.
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
    """Return all frames of a video file as PNGs. Raises ValueError if it cannot be read."""
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
