"""Parts of a file: the Range header (RFC 9110, section 14), for players that begin or go on in the middle."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from tilework.server.http.errors import ApiError
from tilework.server.text import shown

_RANGE = re.compile(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*", re.ASCII)


def wanted_part(headers: Headers, num_bytes: int, etag: str) -> range | None:
    """Return the part of a file that a request asks for; None: all of it.

    Several parts, other units and invalid ranges are answered with all of it, as the RFC lets a server do. So is a
    range of another version (`If-Range`).

    Raises:
        ApiError: 416, no byte of the file is in the part.
    """
    text = headers.get("range", "")
    match = _RANGE.fullmatch(text)
    if match is None or not (match[1] or match[2]) or headers.get("if-range", etag) != etag:
        return None
    if match[1] and match[2] and int(match[1]) > int(match[2]):
        return None
    if match[1]:
        part = range(int(match[1]), min(int(match[2]) + 1, num_bytes) if match[2] else num_bytes)
    else:
        part = range(max(0, num_bytes - int(match[2])), num_bytes)
    if not part:
        message = f"Range = {shown(text)} is not accepted. The file has {num_bytes} bytes: ask for some of them."
        more = {"Content-Range": f"bytes */{num_bytes}"}
        raise ApiError(416, message, param="Range", code="range_not_satisfiable", headers=more)
    return part


def part_headers(part: range | None, num_bytes: int, etag: str) -> dict[str, str]:
    """Return the headers of an answer with this part of a file, or all of it."""
    headers = {"Accept-Ranges": "bytes", "ETag": etag, "Content-Length": str(num_bytes if part is None else len(part))}
    if part is not None:
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{num_bytes}"
    return headers
