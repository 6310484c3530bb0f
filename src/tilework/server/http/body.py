"""Reads a JSON object from a request, within limits of size, depth and time."""

from __future__ import annotations

import asyncio
import json

from fastapi import Request

from tilework.server.http.errors import ApiError
from tilework.server.text import shown

MAX_DEPTH = 64  # Far below the depth at which writing the value as JSON again would overflow the stack.


async def read_json(http: Request, max_bytes: int, timeout_s: float) -> dict[str, object]:
    """Read and parse the body.

    Raises:
        ApiError: 415 for another content type, 413 beyond `max_bytes`, 408 if the body is not all there within
            `timeout_s`, 400 for anything but a JSON object of at most `MAX_DEPTH` levels.
        ClientDisconnect: the client went away while sending.
    """
    _check_content_type(http.headers.get("content-type"))
    try:
        async with asyncio.timeout(timeout_s):
            content = await _read(http, max_bytes)
    except TimeoutError:
        raise _too_slow(timeout_s) from None
    try:
        body = json.loads(content)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _malformed(f"it is not JSON: {str(error)[:200]}") from None
    if _is_deeper(body, MAX_DEPTH):
        raise _too_deep()
    if not isinstance(body, dict):
        raise _malformed(f"it is {shown(body)}")
    return body


def _check_content_type(value: str | None) -> None:
    if (value or "").partition(";")[0].strip().lower() != "application/json":
        message = f'Content-Type = {shown(value)} is not accepted; send JSON with "Content-Type: application/json".'
        raise ApiError(415, message, code="unsupported_media_type")


async def _read(http: Request, max_bytes: int) -> bytes:
    """Refuse by the announced length at once, and a chunked body as soon as too much has come."""
    announced = http.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _is_deeper(value: object, max_depth: int) -> bool:
    """Whether lists and objects are nested deeper than `max_depth`. It goes level by level, without recursion."""
    level = [value]
    for _ in range(max_depth):
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


def _too_slow(timeout_s: float) -> ApiError:
    message = f"The body was not complete after {timeout_s:g} seconds; send it faster, or a shorter one."
    return ApiError(408, message, code="body_too_slow", headers={"Connection": "close"})


def _too_large(max_bytes: int) -> ApiError:
    message = f"The body exceeds {max_bytes} bytes; send a shorter one."
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
