"""Picture files for tests: right ones, and hostile ones."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

from PIL import Image

RED, BLUE, WHITE, BLACK = (255, 0, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)


def file_of(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def plain(width: int = 64, height: int = 48, colour: tuple[int, ...] = RED, kind: str = "PNG", **options: Any) -> bytes:
    """A picture of one colour."""
    mode = {3: "RGB", 4: "RGBA"}[len(colour)]
    return file_of(Image.new(mode, (width, height), colour), kind, **options)


def halves(left: Any, right: Any, mode: str = "RGB", size: tuple[int, int] = (32, 16)) -> Image.Image:
    """A picture whose halves have two colours."""
    picture = Image.new(mode, size, left)
    picture.paste(right, (size[0] // 2, 0, *size))
    return picture


def data_url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{text_of(content)}"


def text_of(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def png_with_size(width: int, height: int) -> bytes:
    """A small file whose head promises that many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(1 << 20))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def animated(kind: str) -> bytes:
    first, second = (Image.new("RGB", (16, 16), colour) for colour in (RED, BLUE))
    return file_of(first, kind, save_all=True, append_images=[second])


def jpeg_of_many_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again: each goes over all pixels."""
    content = plain(64, 64, kind="JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * count + content[-2:]
