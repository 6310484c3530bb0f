"""A text of a JSON body that is too long for a usual prompt: most are pictures as base64."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

from pydantic_core import core_schema

LONG_TEXT_BYTES = 4096
"""Texts of fewer bytes are ordinary ones."""
_ESCAPES = ((b"\\/", b"/"), (b"\\n", b"\n"), (b"\\r", b"\r"), (b"\\t", b"\t"))
"""Escapes that base64 may have: PHP writes `\\/`, and MIME breaks lines."""


class LongText:
    """A text as it stands in a JSON body, in the pieces in which it came: no step has to handle all of it.

    Of a text of more than `kept_bytes`, only the first piece is kept. `num_bytes` counts its bytes in the body.
    """

    __slots__ = ("_digest", "_kept_bytes", "_pieces", "num_bytes")

    def __init__(self, kept_bytes: int) -> None:
        self.num_bytes = 0
        self._kept_bytes = kept_bytes
        self._pieces: list[bytes] = []
        self._digest = hashlib.sha256()

    @property
    def is_whole(self) -> bool:
        """True if all of it is kept."""
        return self.num_bytes <= self._kept_bytes

    @property
    def num_held(self) -> int:
        """Memory that it takes, in bytes."""
        return self.num_bytes if self.is_whole else len(self._pieces[0])

    def add(self, piece: bytes) -> None:
        """Append a piece, in which no escape is cut in two."""
        self.num_bytes += len(piece)
        self._digest.update(piece)
        if self.is_whole or not self._pieces:
            self._pieces.append(piece)
        else:
            del self._pieces[1:]

    def pieces(self) -> Sequence[bytes]:
        """Return the pieces of a whole text as they stand between the quotes."""
        assert self.is_whole
        return self._pieces

    def literal(self) -> bytes:
        """Return a whole text as a JSON literal."""
        return b'"%b"' % b"".join(self.pieces())

    def text(self) -> str:
        """Return the value of a whole text. Raises ValueError if it is no JSON."""
        return str(json.loads(self.literal()))

    def head(self, max_chars: int) -> str:
        """Return its beginning, for messages and to recognise its form."""
        return _unescaped(b"".join(self._pieces[:1])[: 2 * max_chars]).decode("utf-8", "replace")[:max_chars]

    def unescaped(self) -> Iterator[bytes]:
        """Yield its pieces without the escapes that base64 may have; other escapes stay as they are."""
        assert self.is_whole
        return map(_unescaped, self._pieces)

    def digest(self) -> str:
        """Return its SHA-256, in hexadecimal digits."""
        return self._digest.hexdigest()

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, _handler: object) -> core_schema.CoreSchema:
        return core_schema.is_instance_schema(cls)


def _unescaped(piece: bytes) -> bytes:
    if b"\\" in piece:
        for escape, meant in _ESCAPES:
            piece = piece.replace(escape, meant)
    return piece
