"""Decodes base64 in pieces: decoding a large text at once holds the interpreter all the time."""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Iterator

from tilework.server.bounded.long_text import LongText
from tilework.server.bounded.new_file import ended, new_file

_PIECE = 64 << 10
_BREAKS = b" \t\n\r\v\f"


def decode_base64(content: str | LongText, num_head: int) -> bytes:
    """Return the bytes that a text encodes, without its first `num_head` characters.

    Raises:
        ValueError: it is no base64. Line breaks may be in it.
    """
    pieces = _encoded(content) if isinstance(content, str) else content.unescaped()
    file = new_file(len(content) if isinstance(content, str) else content.num_bytes)
    left = b""
    for piece in _without(pieces, num_head):
        left += piece.translate(None, _BREAKS)
        if b"=" in left:  # The end; only line breaks may follow.
            if len(left) > 4 * _PIECE:
                raise ValueError("it goes on after its end")
            continue
        num_whole = len(left) // 4 * 4
        file.write(binascii.a2b_base64(left[:num_whole], strict_mode=True))
        left = left[num_whole:]
    file.write(binascii.a2b_base64(left, strict_mode=True))
    return ended(file)


def _encoded(text: str) -> Iterator[bytes]:
    """Yield a text as ASCII, in pieces. Raises ValueError if there are other characters in it."""
    return (text[start : start + _PIECE].encode("ascii") for start in range(0, len(text), _PIECE))


def _without(pieces: Iterable[bytes], num_head: int) -> Iterator[bytes]:
    for piece in pieces:
        yield piece[num_head:]
        num_head = max(0, num_head - len(piece))
