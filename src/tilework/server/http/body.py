"""Reads the JSON object in the body of a request, within limits of size, depth and time."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import Request

from tilework.server.bounded.json_reader import (
    MAX_FIELDS,
    JsonReader,
    JsonRefused,
    RestTooLarge,
)
from tilework.server.http.body_limits import (
    JSON,
    BodyLimits,
    in_pieces,
    media_type,
    too_large,
    wrong_media_type,
)
from tilework.server.http.errors import CLOSE, ApiError
from tilework.server.text import shown


async def read_json(http: Request, limits: BodyLimits) -> dict[str, object]:
    """Read and parse the body.

    Raises:
        ApiError: 415 for another content type, 413 and 408 beyond the limits, 503 without room for it, 400 for anything
            but a JSON object of at most `MAX_FIELDS` members, `MAX_VALUES` values and `MAX_DEPTH` levels.
        ClientDisconnect: the client went away while sending.
    """
    if media_type(http) != JSON:
        raise wrong_media_type(http, f'JSON with "Content-Type: {JSON}"')
    reader = JsonReader(limits.max_rest_bytes, None if limits.texts is None else limits.texts.kept_bytes)

    try:
        async with aclosing(in_pieces(http, limits)) as pieces:
            async for piece in pieces:
                reader.feed(piece)
                limits.place.grow(reader.num_held)
        body = reader.value()
    except JsonRefused as error:
        raise _malformed(str(error), error.code) from None
    except RestTooLarge:
        raise too_large(limits.max_rest_bytes, "without its long texts" if limits.texts else "") from None
    if not isinstance(body, dict):
        raise _malformed(f"it is {shown(body)}")
    if len(body) > MAX_FIELDS:
        raise _malformed(f"it has {len(body)} members, and may have {MAX_FIELDS}", "too_many_fields")
    return body


def _malformed(reason: str, code: str | None = None) -> ApiError:
    message = f"The body must be a JSON object, but {reason}. Send {'one' if code is None else 'less'}."
    return ApiError(400, message, code=code or "invalid_json", headers=None if code is None else CLOSE)
