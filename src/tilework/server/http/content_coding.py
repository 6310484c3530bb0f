"""Content codings of a request's body: gzip and deflate (RFC 9110, 8.4.1), decompressed in bounded pieces.

OpenAI's clients send none; aiohttp, proxies and scripts that upload batches do. Rejected: other codings, which need
further packages, and several on top of each other, which no client sends and which multiply the size that a small body
may become.
"""

from __future__ import annotations

import zlib

from fastapi import Request

from tilework.server.bounded.json_reader import PIECE_BYTES
from tilework.server.http.errors import CLOSE, ApiError
from tilework.server.text import shown

_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_ACCEPTED = "gzip, deflate"
_MAX_MEMBERS = 1024


class Plain:
    """A body that is not compressed."""

    def __init__(self) -> None:
        self._chunk = memoryview(b"")

    @property
    def has_more(self) -> bool:
        return bool(self._chunk)

    def feed(self, chunk: bytes) -> None:
        self._chunk = memoryview(chunk)

    def piece(self) -> bytes:
        piece, self._chunk = bytes(self._chunk[:PIECE_BYTES]), self._chunk[PIECE_BYTES:]
        return piece

    def end(self) -> None:
        """Do nothing: a plain body may end anywhere."""


class Inflated:
    """A compressed body. It takes the memory of a chunk, a piece and zlib's window of 32 KiB, whatever its full size.

    While it `has_more`, the chunk that it was fed gives pieces, of which some may be empty. Then it takes the next one.
    """

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._inflate = zlib.decompressobj(_WINDOW_BITS[coding])
        self._num_members = 1
        self._chunk = b""

    @property
    def has_more(self) -> bool:
        """True while the chunk gives pieces. With the checksum at its end, zlib holds back no piece of a whole body."""
        return bool(self._chunk)

    def feed(self, chunk: bytes) -> None:
        self._chunk = chunk

    def piece(self) -> bytes:
        """Return the next piece, of at most `PIECE_BYTES`.

        Raises:
            ApiError: 400, the body is not compressed so.
        """
        if self._inflate.eof:
            self._begin_member()
        try:
            piece = self._inflate.decompress(self._chunk, PIECE_BYTES)
        except zlib.error as error:
            raise self._malformed(f"cannot be decompressed ({error})") from None
        self._chunk = self._inflate.unused_data or self._inflate.unconsumed_tail
        return piece

    def _begin_member(self) -> None:
        """Begin the next gzip file: several in a row are one body. Each takes a turn, however small it is."""
        if self._num_members == _MAX_MEMBERS:
            raise self._malformed(f"has more than {_MAX_MEMBERS} members")
        self._num_members += 1
        self._inflate = zlib.decompressobj(_WINDOW_BITS[self._coding])

    def end(self) -> None:
        """Check that the body is complete.

        Raises:
            ApiError: 400, the body has ended too early.
        """
        if not self._inflate.eof:
            raise self._malformed("ends before the compressed data does")

    def _malformed(self, reason: str) -> ApiError:
        message = f"Content-Encoding is {self._coding}, but the body {reason}. Compress it so, or leave out the header."
        return ApiError(400, message, code="invalid_content_encoding", headers=CLOSE)


def content_coding(http: Request) -> Plain | Inflated:
    """Return the content coding of a request's body. Raises ApiError 415 for an unknown one."""
    given = ", ".join(http.headers.getlist("content-encoding"))
    codings = [coding for one in given.split(",") if (coding := one.strip().lower()) not in ("", "identity")]
    match codings:
        case []:
            return Plain()
        case [coding] if coding in _WINDOW_BITS:
            return Inflated(coding)
    remedy = "send the body as it is, or compressed once, by gzip or deflate."
    message = f"Content-Encoding = {shown(given)} is not accepted; {remedy}"
    raise ApiError(415, message, code="unsupported_content_encoding", headers={"Accept-Encoding": _ACCEPTED})
