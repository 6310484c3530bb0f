"""Reads JSON of clients: bounds are checked before it is parsed, and long texts are cut out of it.

The event loop decides for all requests, so no step may take long. `json.loads` and `bytes.decode` hold the interpreter
for 2 ms per MiB, on a thread as well. So a large body is read piece by piece as it comes: long texts are cut out, and
separators outside of texts are counted. The rest is short, and parsed at once.
"""

from __future__ import annotations

import json
import re
import secrets

from tilework.server.bounded.long_text import LONG_TEXT_BYTES, LongText

MAX_DEPTH = 64  # Far below the depth at which writing the value as JSON again would overflow the stack.
MAX_FIELDS = 200
MAX_VALUES = 10_000
MAX_DIGITS = 400
"""Most digits of an integer: the time to read one grows with the square of its digits."""
PIECE_BYTES = 32 << 10
"""Most bytes that are read in one step, which takes some 0.2 ms, and 3 ms at the worst."""
SMALL_BYTES = 32 << 10
"""Bodies up to this size are parsed at once."""
MAX_INNER_BYTES = 64 << 10
"""Most bytes of JSON inside a text."""

# Structure and whole short texts with few escapes, if there are any; the quote of another text follows.
_SHORT_TEXTS = re.compile(rb'[^"]*+(?:"[^"\\]{0,4095}+(?:\\.[^"\\]{0,4095}+){0,64}+"[^"]*+)*+', re.DOTALL)
_GZIP = b"\x1f\x8b"  # The first bytes of compressed data.
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)


class JsonRefused(Exception):
    """The JSON is not accepted. The message says why, as in "it is no object"; `code` is None if it is just no JSON."""

    def __init__(self, reason: str, code: str | None = None) -> None:
        super().__init__(reason)
        self.code = code


class RestTooLarge(Exception):
    """The body is too large without its long texts."""


class JsonReader:
    """Reads one body. Texts of `LONG_TEXT_BYTES` or more become `LongText`s, not kept beyond `kept_bytes`.

    Without `kept_bytes`, texts of any length are ordinary ones. `max_rest_bytes` bounds the body without long texts.
    """

    def __init__(self, max_rest_bytes: int, kept_bytes: int | None = None) -> None:
        self._max_rest_bytes = max_rest_bytes
        self._kept_bytes = kept_bytes
        self._rest = bytearray()
        self._texts: list[LongText] = []
        self._text_bytes = 0
        self._open: LongText | None = None
        self._is_open = False
        self._half_escape = b""
        self._num_values = 1
        self._is_scanning = False
        self._mark = secrets.token_hex(12)  # A client cannot know the mark, so it cannot write it.

    @property
    def num_held(self) -> int:
        """Memory that the reader takes, in bytes."""
        return len(self._rest) + self._text_bytes + (0 if self._open is None else self._open.num_held)

    def feed(self, piece: bytes) -> None:
        """Read another piece, of at most `PIECE_BYTES`.

        Raises:
            JsonRefused: there are too many values.
            RestTooLarge: the body is too large.
        """
        if self._is_scanning:
            self._scan(piece)
        else:
            self._rest += piece
            if len(self._rest) > SMALL_BYTES:
                self._scan_rest()

    def value(self) -> object:
        """Return the value that was read, with `LongText`s in place of long texts.

        Raises:
            JsonRefused: it is no JSON, or too deep; or there are too many values.
        """
        if not self._is_scanning and sum(self._rest.count(one) for one in (b",", b"[", b"{")) >= MAX_VALUES:
            self._scan_rest()
        if self._is_open:
            raise JsonRefused("it is not JSON: a text in it does not end")
        value = _parsed(self._rest)
        return self._with_texts(value) if self._texts else value

    def _scan_rest(self) -> None:
        self._is_scanning = True
        piece, self._rest = bytes(self._rest), bytearray()
        self._scan(piece)

    def _scan(self, piece: bytes) -> None:
        piece, self._half_escape, place = self._half_escape + piece, b"", 0
        while place < len(piece):
            if self._is_open:
                place = self._scan_inside(piece, place)
                continue
            match = _SHORT_TEXTS.match(piece, place)
            assert match is not None
            self._add(match[0])
            place = match.end()
            if place < len(piece):
                self._is_open = True
                self._open = None if self._kept_bytes is None else LongText(max(self._kept_bytes, LONG_TEXT_BYTES))
                if self._open is None:
                    self._keep(b'"')
                place += 1

    def _scan_inside(self, piece: bytes, place: int) -> int:
        """Read on inside a text. Return where the next step begins."""
        end = _end_of_text(piece, place)
        if self._open is None:
            self._keep(piece[place:end])
        elif end > place:
            self._open.add(piece[place:end])
        if end == len(piece):
            return end
        if piece[end : end + 1] == b"\\":
            self._half_escape = piece[end:]
            return len(piece)
        self._close()
        return end + 1

    def _close(self) -> None:
        text, self._open, self._is_open = self._open, None, False
        if text is None:
            self._keep(b'"')
        elif text.num_bytes < LONG_TEXT_BYTES:
            self._keep(text.literal())
        else:
            self._keep(b'"%b%d"' % (self._mark.encode(), len(self._texts)))
            self._texts.append(text)
            self._text_bytes += text.num_held

    def _add(self, part: bytes) -> None:
        """Add structure, with whole texts."""
        bare = _TEXT.sub(b"", part)
        self._num_values += sum(bare.count(one) for one in (b",", b"[", b"{"))
        if self._num_values > MAX_VALUES:
            raise JsonRefused(f"it has more than {MAX_VALUES} values", "too_many_values")
        self._keep(part)

    def _keep(self, part: bytes) -> None:
        self._rest += part
        if len(self._rest) > self._max_rest_bytes:
            raise RestTooLarge

    def _with_texts(self, value: object) -> object:
        if isinstance(value, str):
            return self._texts[int(value[len(self._mark) :])] if value.startswith(self._mark) else value
        if isinstance(value, list):
            return [self._with_texts(each) for each in value]
        if isinstance(value, dict):
            if any(name.startswith(self._mark) for name in value):
                raise JsonRefused(f"a name in it has {LONG_TEXT_BYTES} bytes or more")
            return {name: self._with_texts(each) for name, each in value.items()}
        return value


def inner_json(text: str) -> object:
    """Parse JSON inside a text of a client.

    Raises:
        JsonRefused: it is no JSON, or beyond the bounds of a body; or it has more than `MAX_INNER_BYTES`.
    """
    content = text.encode("utf-8", "surrogatepass") if len(text) <= MAX_INNER_BYTES else b""
    if len(text) > MAX_INNER_BYTES or len(content) > MAX_INNER_BYTES:
        raise JsonRefused(f"it has more than {MAX_INNER_BYTES} bytes")
    reader = JsonReader(MAX_INNER_BYTES)
    reader.feed(content)
    return reader.value()


def _is_deeper(value: object, max_depth: int) -> bool:
    """Return whether lists and objects are nested deeper than `max_depth`. Goes level by level, without recursion."""
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


def _end_of_text(piece: bytes, place: int) -> int:
    """Return the end of the text that contains `place`: its quote, half an escape, or the end of the piece."""
    quote = piece.find(b'"', place)
    end = len(piece) if quote < 0 else quote
    escape = piece.find(b"\\", place, end)
    if escape < 0:
        return end
    match = _INSIDE.match(piece, escape)
    assert match is not None
    return match.end()


def _parsed(content: bytearray) -> object:
    """Parse the rest of a body. Raises JsonRefused."""
    try:
        value = _DECODER.decode(content.decode("utf-8-sig"))
    except RecursionError:
        raise _too_deep() from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        if content.startswith(_GZIP):
            raise JsonRefused("it is compressed; say so by the header Content-Encoding: gzip") from None
        raise JsonRefused(f"it is not JSON: {str(error)[:200]}") from None
    if _is_deeper(value, MAX_DEPTH):
        raise _too_deep()
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise JsonRefused("a number in it has too many digits")
    return int(digits)


def _too_deep() -> JsonRefused:
    return JsonRefused(f"it is nested more than {MAX_DEPTH} levels deep")


_DECODER = json.JSONDecoder(parse_int=_integer)
