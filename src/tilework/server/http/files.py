"""Answers with a result that is kept as a file, whole or in part, read as its client takes it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import closing

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from tilework.server.http.middleware import PIECE_BYTES, is_head
from tilework.server.http.ranges import part_headers, wanted_part
from tilework.store.results import Result


async def file_answer(result: Result, name: str, http: Request) -> Response:
    """Answer with a file, or with the part of it that a Range asks for. `name` is unique to this file.

    Raises:
        ApiError: 416, no byte of it is in the part.
    """
    etag = f'"{name}"'
    total = result.num_bytes
    try:
        part = wanted_part(http.headers, total, etag)
    except BaseException:
        result.close()
        raise
    headers = part_headers(part, total, etag)
    status = 200 if part is None else 206
    wanted = range(total) if part is None else part
    if len(wanted) <= PIECE_BYTES or is_head(http.scope):
        with closing(result):
            content = b"" if is_head(http.scope) else await result.read(wanted)
        return Response(content, status, headers, result.media_type)
    return StreamingResponse(_pieces(result, wanted), status, headers, result.media_type)


async def _pieces(result: Result, wanted: range) -> AsyncGenerator[bytes, None]:
    with closing(result):
        for start in range(wanted.start, wanted.stop, PIECE_BYTES):
            yield await result.read(range(start, min(start + PIECE_BYTES, wanted.stop)))
