"""Reads the body of a request within limits of size, depth and time: a JSON object, or the fields of a form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from urllib.parse import parse_qsl

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from tilework.server.http.errors import SERVER, ApiError
from tilework.server.text import shown

MAX_DEPTH = 64  # Far below the depth at which writing the value as JSON again would overflow the stack.


FORM = "multipart/form-data"
TEXT_FORM = "application/x-www-form-urlencoded"
"""A form of texts alone, which some libraries send where there is no file."""
JSON = "application/json"
MAX_FILES = 64
MAX_FIELDS = 200


class BodyRoom:
    """The memory for bodies that are read at a time: `most_bytes` for what each has beyond its first `own_bytes`."""

    def __init__(self, most_bytes: int, own_bytes: int) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._own_bytes = own_bytes

    @contextmanager
    def place(self) -> Iterator[BodyPlace]:
        """The place of one body, until the block is left."""
        place = BodyPlace(self)
        try:
            yield place
        finally:
            self.num_bytes -= place.num_beyond

    def grow(self, place: BodyPlace, num_bytes: int) -> None:
        """Raises:
        ApiError: 503, there is no room for it now.
        """
        beyond = max(0, num_bytes - self._own_bytes) - place.num_beyond
        if beyond > 0 and self.num_bytes + beyond > self._most_bytes:
            raise _too_many_bodies()
        place.num_beyond += beyond
        self.num_bytes += beyond


@dataclass(slots=True, eq=False)
class BodyPlace:
    """What one body takes of a room, beyond what each may have."""

    room: BodyRoom
    num_beyond: int = 0

    def grow(self, num_bytes: int) -> None:
        self.room.grow(self, num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """At most `max_bytes`, which have to be there within `timeout_s`, in a `place` of their own."""

    max_bytes: int
    timeout_s: float
    place: BodyPlace


def media_type(http: Request) -> str:
    return http.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_json(http: Request, limits: BodyLimits) -> dict[str, object]:
    """Read and parse the body.

    Raises:
        ApiError: 415 for another content type, 413 and 408 beyond the limits, 503 without room for it, 400 for anything
            but a JSON object of at most `MAX_DEPTH` levels.
        ClientDisconnect: the client went away while sending.
    """
    if media_type(http) != JSON:
        raise wrong_media_type(http, f'JSON with "Content-Type: {JSON}"')
    content = await _content(http, limits)
    try:
        body = json.loads(content)
    except RecursionError:
        raise _too_deep() from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _malformed(f"it is not JSON: {str(error)[:200]}") from None
    except ValueError:  # Python reads no integer of more than 4300 digits.
        raise _malformed("a number in it has too many digits") from None
    if is_deeper(body, MAX_DEPTH):
        raise _too_deep()
    if not isinstance(body, dict):
        raise _malformed(f"it is {shown(body)}")
    return body


async def read_form(http: Request, limits: BodyLimits) -> list[tuple[str, str | bytes]]:
    """Read the fields of a form, in their order: texts, and files as bytes.

    The body is parsed as it comes, and kept in memory: it is bounded. It may be of texts alone (TEXT_FORM).

    Raises:
        ApiError: 413 and 408 beyond the limits, 503 without room for it, 400 for anything but a form of at most
            `MAX_FILES` files and `MAX_FIELDS` other fields.
        ClientDisconnect: the client went away while sending.
    """
    if media_type(http) == TEXT_FORM:
        return _texts(await _content(http, limits))
    parser = MultiPartParser(
        http.headers,
        _chunks(http, limits),
        max_files=MAX_FILES,
        max_fields=MAX_FIELDS,
        max_part_size=limits.max_bytes,
    )
    parser.spool_max_size = limits.max_bytes
    try:
        async with _in_time(limits.timeout_s):
            form = await parser.parse()
    except MultiPartException as error:
        raise _no_form(error.message) from None
    try:
        return [
            (name, await value.read() if isinstance(value, UploadFile) else value) for name, value in form.multi_items()
        ]
    finally:
        await form.close()


def wrong_media_type(http: Request, remedy: str) -> ApiError:
    message = f"Content-Type = {shown(http.headers.get('content-type'))} is not accepted; send {remedy}."
    return ApiError(415, message, code="unsupported_media_type")


def _texts(content: bytearray) -> list[tuple[str, str | bytes]]:
    try:
        return [*parse_qsl(content.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict")]
    except UnicodeError:
        raise _no_form("it is no text") from None
    except ValueError:
        raise _no_form(f"Too many fields. Maximum number of fields is {MAX_FIELDS}") from None


async def _content(http: Request, limits: BodyLimits) -> bytearray:
    content = bytearray()
    async with _in_time(limits.timeout_s):
        async for chunk in _chunks(http, limits):
            content += chunk
    return content


@asynccontextmanager
async def _in_time(timeout_s: float) -> AsyncGenerator[None, None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise _too_slow(timeout_s) from None


async def _chunks(http: Request, limits: BodyLimits) -> AsyncGenerator[bytes, None]:
    """Refuse by the announced length at once, and a chunked body as soon as too much has come."""
    announced = http.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limits.max_bytes:
        raise _too_large(limits.max_bytes)
    num_bytes = 0
    async for chunk in http.stream():
        num_bytes += len(chunk)
        if num_bytes > limits.max_bytes:
            raise _too_large(limits.max_bytes)
        limits.place.grow(num_bytes)
        yield chunk


def is_deeper(value: object, max_depth: int) -> bool:
    """Whether lists and objects are nested deeper than `max_depth`. It goes level by level, without recursion."""
    level = [value]
    for _ in range(max_depth):
        if not level:
            return False
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return any(isinstance(inner, dict | list) for inner in level)


def _too_deep() -> ApiError:
    return _malformed(f"it is nested more than {MAX_DEPTH} levels deep")


def _malformed(reason: str) -> ApiError:
    return ApiError(400, f"The body must be a JSON object, but {reason}. Send one.", code="invalid_json")


def _no_form(reason: str) -> ApiError:
    message = f"The body must be a form (RFC 7578), but it is not accepted: {reason.rstrip('.')}. Send one."
    return ApiError(400, message, code="invalid_form", headers={"Connection": "close"})


def _too_many_bodies() -> ApiError:
    message = "The server reads as many large bodies as it takes. Retry in 1 second."
    headers = {"Connection": "close", "Retry-After": "1"}
    return ApiError(503, message, error_type=SERVER, code="too_many_bodies", headers=headers)


def _too_slow(timeout_s: float) -> ApiError:
    message = f"The body was not complete after {timeout_s:g} seconds; send it faster, or a shorter one."
    return ApiError(408, message, code="body_too_slow", headers={"Connection": "close"})


def _too_large(max_bytes: int) -> ApiError:
    message = f"The body exceeds {max_bytes} bytes; send a shorter one."
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
