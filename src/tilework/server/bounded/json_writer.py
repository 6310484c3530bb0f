"""Writes values that `json_reader` has read."""

from __future__ import annotations

import json
import secrets

from tilework.server.bounded.long_text import LongText


def json_pieces(value: object) -> list[bytes]:
    """Write a value as JSON, in pieces. Its long texts, which must be whole, are written as they were read."""
    mark = secrets.token_hex(12)
    texts: list[LongText] = []

    def marked(one: object) -> str:
        if not isinstance(one, LongText):
            raise TypeError(f"{type(one).__name__} is no JSON")
        texts.append(one)
        return mark

    rest = json.dumps(value, default=marked).encode("ascii")
    first, *others = rest.split(mark.encode("ascii"))  # The quotes of the mark stay around each text.
    pieces = [first]
    for text, other in zip(texts, others, strict=True):
        pieces += (*text.pieces(), other)
    return pieces
