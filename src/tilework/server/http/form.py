"""Reads the fields of a form: texts, and files as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote_to_bytes

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from tilework.server.bounded.json_reader import MAX_FIELDS, SMALL_BYTES
from tilework.server.bounded.new_file import ended, new_file
from tilework.server.http.body_limits import TEXT_FORM, BodyLimits, in_pieces, media_type
from tilework.server.http.errors import CLOSE, ApiError
from tilework.server.text import shown

MAX_FILES = 64
MAX_TEXT_BYTES = 1 << 20
"""Most bytes of all texts of a form together, unless the server sets a limit."""
_CHARSETS = {b"utf-8", b"utf8", b"us-ascii", b"iso-8859-1", b"latin-1"}
_MAX_OPTIONS = 8
_QUOTED_BYTES = 32 << 10
_COPIED_BYTES = 1 << 20


async def read_form(http: Request, limits: BodyLimits) -> list[tuple[str, str | bytes]]:
    """Read the fields of a form, in their order: texts, and files as bytes.

    The body is parsed as it comes, and kept in memory: it is bounded. It may be of texts alone (TEXT_FORM).

    Raises:
        ApiError: 413 and 408 beyond the limits, 503 without room for it, 400 for anything but a form of at most
            `MAX_FILES` files and `MAX_FIELDS` other fields.
        ClientDisconnect: the client went away while sending.
    """
    max_text_bytes = MAX_TEXT_BYTES if limits.texts is None else limits.texts.max_rest_bytes
    if media_type(http) == TEXT_FORM:
        return await _texts(http, limits, max_text_bytes)
    _check_type(http)
    async with aclosing(_charged(http, limits)) as pieces:
        parser = _Parser(http.headers, pieces, max_text_bytes)
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise _no_form(error.message) from None
    await form.close()
    num_bytes = sum(len(piece) for content in parser.contents.values() for piece in content)
    fields: list[tuple[str, str | bytes]] = []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            fields.append((name, await _content(parser.contents.pop(value, []), num_bytes, limits)))
        else:
            fields.append((name, value))
    return fields


class _Parser(MultiPartParser):
    """A parser that bounds the texts of a form together, and keeps files in the pieces in which they came.

    In memory a text may take four times its bytes.
    """

    def __init__(self, headers: Headers, stream: AsyncGenerator[bytes, None], max_text_bytes: int) -> None:
        more: Any = {"max_files": MAX_FILES, "max_fields": MAX_FIELDS, "max_part_size": max_text_bytes}
        super().__init__(headers, stream, **more)
        self.contents: dict[UploadFile, list[bytes]] = {}
        self._num_text_bytes = 0

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._current_part.file is not None:
            self.contents.setdefault(self._current_part.file, []).append(data[start:end])
            return
        self._num_text_bytes += end - start
        if self._num_text_bytes > self.max_part_size:
            raise MultiPartException(f"Its texts exceed {self.max_part_size} bytes: send images as files")
        super().on_part_data(data, start, end)


async def _charged(http: Request, limits: BodyLimits) -> AsyncGenerator[bytes, None]:
    num_bytes = 0
    async with aclosing(in_pieces(http, limits)) as pieces:
        async for piece in pieces:
            num_bytes += len(piece)
            limits.place.grow(num_bytes)
            yield piece


async def _content(pieces: list[bytes], num_bytes: int, limits: BodyLimits) -> bytes:
    """Return a whole file, copied in pieces: a single copy would hold the interpreter all the time."""
    size = sum(map(len, pieces))
    limits.place.grow(num_bytes + size)
    file = new_file(size)
    place = 0
    for piece in pieces:
        file.write(piece)
        if file.tell() - place > _COPIED_BYTES:
            place = file.tell()
            async with limits.place.room.turn:
                await asyncio.sleep(0)
    return ended(file)


def _check_type(http: Request) -> None:
    """Check the content type. Raises ApiError if it has too many options, or a charset that is slow to read."""
    given = http.headers.get("content-type", "")
    if given.count(";") > _MAX_OPTIONS:
        raise _no_form("its Content-Type has too many options")
    charset = parse_options_header(given)[1].get(b"charset", b"utf-8")
    if charset.lower() not in _CHARSETS:
        raise _no_form(f"charset = {shown(charset.decode('latin-1'))} is not accepted. Send UTF-8")


async def _texts(http: Request, limits: BodyLimits, max_bytes: int) -> list[tuple[str, str | bytes]]:
    content = bytearray()
    async with aclosing(_charged(http, limits)) as pieces:
        async for piece in pieces:
            content += piece
            if len(content) > max_bytes:
                raise _no_form(f"Its texts exceed {max_bytes} bytes: send a form with files")
    if len(content) <= SMALL_BYTES:
        return _decoded(content)
    return await asyncio.to_thread(_decoded, content)


def _decoded(content: bytearray) -> list[tuple[str, str | bytes]]:
    """Parse a form of texts. Raises ApiError if there are too many fields, or one is no text."""
    if content.count(b"&") >= MAX_FIELDS:
        raise _no_form(f"Too many fields. Maximum number of fields is {MAX_FIELDS}")
    pairs = (bytes(pair).partition(b"=") for pair in content.split(b"&") if pair)
    try:
        return [(_unquoted(name), _unquoted(value)) for name, _, value in pairs]
    except UnicodeError:
        raise _no_form("it is no text") from None


def _unquoted(text: bytes) -> str:
    """Decode a text in pieces, none of which ends within an escape: a large one at once would hold the interpreter."""
    text.decode("ascii")
    pieces = []
    place = 0
    while place < len(text):
        escape = text.rfind(b"%", max(place + 1, place + _QUOTED_BYTES - 2), place + _QUOTED_BYTES)
        end = place + _QUOTED_BYTES if escape < 0 else escape
        pieces.append(unquote_to_bytes(text[place:end].replace(b"+", b" ")))
        place = end
    return b"".join(pieces).decode()


def _no_form(reason: str) -> ApiError:
    message = f"The body must be a form (RFC 7578), but it is not accepted: {reason.rstrip('.')}. Send one."
    return ApiError(400, message, code="invalid_form", headers=CLOSE)
