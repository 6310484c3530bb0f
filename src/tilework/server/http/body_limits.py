"""Reads the body of a request piece by piece, within limits of size, memory and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from fastapi import Request

from tilework.server.bounded.json_reader import SMALL_BYTES
from tilework.server.http.content_coding import Plain, content_coding
from tilework.server.http.errors import CLOSE, SERVER, ApiError
from tilework.server.text import shown

FORM = "multipart/form-data"
TEXT_FORM = "application/x-www-form-urlencoded"
"""Media type of a form of texts alone, which some libraries send if there is no file."""
JSON = "application/json"


class BodyRoom:
    """The memory for bodies that are being read: `most_bytes` for the parts beyond the first `own_bytes` of each.

    Large bodies are read in `turn`, one piece of one of them in each round of the event loop: however many there are,
    other requests wait for one piece.
    """

    def __init__(self, most_bytes: int, own_bytes: int) -> None:
        self.num_bytes = 0
        self.turn = asyncio.Lock()
        self._most_bytes = most_bytes
        self._own_bytes = own_bytes

    @contextmanager
    def place(self) -> Iterator[BodyPlace]:
        """Yield the place of one body, until the block is left."""
        place = BodyPlace(self)
        try:
            yield place
        finally:
            self.num_bytes -= place.num_beyond

    def grow(self, place: BodyPlace, num_bytes: int) -> None:
        """Take memory for a body that has `num_bytes` now.

        Raises:
            ApiError: 503, there is no room for it now.
        """
        beyond = max(0, num_bytes - self._own_bytes) - place.num_beyond
        if beyond > 0 and self.num_bytes + beyond > self._most_bytes:
            raise _too_many_bodies()
        place.num_beyond += beyond
        self.num_bytes += beyond


@dataclass(slots=True, eq=False)
class BodyPlace:
    """The memory that one body takes of a room, beyond what each may have."""

    room: BodyRoom
    num_beyond: int = 0

    def grow(self, num_bytes: int) -> None:
        self.room.grow(self, num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTexts:
    """Limits of a JSON body that may have long texts: beside them it has at most `max_rest_bytes`.

    Texts of more than `kept_bytes` are read and not kept. A form has files instead: its texts together have as many
    bytes.
    """

    max_rest_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Limits of a body: at most `max_bytes`, which have to come within `timeout_s`, in its own `place`."""

    max_bytes: int
    timeout_s: float
    place: BodyPlace
    texts: LongTexts | None = None

    @property
    def max_rest_bytes(self) -> int:
        """Most bytes of a JSON body beside long texts."""
        return self.max_bytes if self.texts is None else min(self.max_bytes, self.texts.max_rest_bytes)


def media_type(http: Request) -> str:
    return http.headers.get("content-type", "").partition(";")[0].strip().lower()


async def in_pieces(http: Request, limits: BodyLimits) -> AsyncGenerator[bytes, None]:
    """Yield the body as it comes, decompressed, in pieces of at most `PIECE_BYTES`.

    Large or compressed bodies take turns.

    Raises:
        ApiError: 413 and 408 beyond the limits, 415 and 400 for a content coding that is not known, or not kept to.
        ClientDisconnect: the client went away while sending.
    """
    coding = content_coding(http)
    num_received = 0
    num_bytes = 0
    async with _in_time(limits.timeout_s):
        async for chunk in _chunks(http, limits.max_bytes):
            num_received += len(chunk)
            if num_received <= SMALL_BYTES and isinstance(coding, Plain):
                yield chunk
                continue
            coding.feed(chunk)
            while coding.has_more:
                async with limits.place.room.turn:
                    piece = coding.piece()
                    num_bytes += len(piece)
                    if num_bytes > limits.max_bytes:
                        raise too_large(limits.max_bytes, "decompressed")
                    yield piece
                    await asyncio.sleep(0)  # The next turn is in the next round of the loop.
        coding.end()


def wrong_media_type(http: Request, remedy: str) -> ApiError:
    message = f"Content-Type = {shown(http.headers.get('content-type'))} is not accepted; send {remedy}."
    return ApiError(415, message, code="unsupported_media_type")


@asynccontextmanager
async def _in_time(timeout_s: float) -> AsyncGenerator[None, None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise _too_slow(timeout_s) from None


async def _chunks(http: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the body as it comes. A length that is announced as too large is refused at once, a chunked body later."""
    announced = http.headers.get("content-length", "")
    if announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        raise too_large(max_bytes)
    num_bytes = 0
    async for chunk in http.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        yield chunk


def _too_many_bodies() -> ApiError:
    message = "The server reads as many large bodies as it may. Retry in 1 second."
    headers = {"Connection": "close", "Retry-After": "1"}
    return ApiError(503, message, error_type=SERVER, code="too_many_bodies", headers=headers)


def _too_slow(timeout_s: float) -> ApiError:
    message = f"The body was not complete after {timeout_s:g} seconds; send it faster, or a shorter one."
    return ApiError(408, message, code="body_too_slow", headers=CLOSE)


def too_large(max_bytes: int, of_what: str = "") -> ApiError:
    message = f"The body exceeds {max_bytes} bytes{of_what and ' '}{of_what}; send a shorter one."
    return ApiError(413, message, code="body_too_large", headers=CLOSE)
