"""The lines of a batch: calls that go in, answers that come out."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tilework.server.bounded.json_reader import PIECE_BYTES, JsonReader, JsonRefused, RestTooLarge
from tilework.server.bounded.long_text import LONG_TEXT_BYTES
from tilework.server.calls.errors import InvalidValue
from tilework.server.calls.parsing.fields import spread
from tilework.server.schema.batch_answers import LineError
from tilework.server.text import shown

MAX_LINES = 50_000
_MOST_WITH_EMPTY = 2 * MAX_LINES
_MOST_ERRORS = 20
_AT_ONCE_BYTES = 1 << 20
_MOST_REST_BYTES = 4 << 20
"""Most bytes of a line without its long texts. It is parsed at once: for 2 ms per MiB no other thread runs."""
_EXAMPLE = '{"custom_id": "...", "method": "POST", "url": "...", "body": {...}}'


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A call: the number of its line from 1 on, its client's `custom_id`, and its body, which may have long texts."""

    number: int
    custom_id: str
    body: dict[str, Any]

    def given(self) -> Mapping[str, object]:
        """Return the fields that the call sets, also in `extra_body`; null means absent."""
        try:
            fields = spread(self.body)
        except InvalidValue:  # The call's route will report it.
            fields = self.body
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class LinePosition:
    """A place between two lines: after the first `number` lines, `offset` bytes from the beginning."""

    number: int = 0
    offset: int = 0


def check(place: Path, endpoint: str) -> tuple[int, list[LineError]]:
    """Return the number of calls in a file, and its first mistakes. Empty lines do not count. Blocks."""
    seen: dict[str, int] = {}
    num_calls = 0
    mistakes: list[LineError] = []
    for line in _read(place, endpoint):
        num_calls += 1
        if isinstance(line, LineError):
            mistakes.append(line)
        elif line.custom_id in seen:
            message = f"custom_id = {shown(line.custom_id)} is also that of line {seen[line.custom_id]}."
            message += " Give each line its own."
            mistakes.append(LineError(line=line.number, message=message, param="custom_id"))
        else:
            seen[line.custom_id] = line.number
        if len(mistakes) == _MOST_ERRORS or num_calls > MAX_LINES:
            break
    if num_calls > MAX_LINES:
        mistakes.append(
            LineError(line=MAX_LINES + 1, message=f"There are more than {MAX_LINES} lines: send several files.")
        )
    if not num_calls:
        mistakes.append(LineError(line=1, message="The file is empty: give one call per line."))
    return num_calls, mistakes


def read_calls(
    place: Path, endpoint: str, begin: LinePosition, *answered: Collection[int]
) -> tuple[list[BatchLine], LinePosition | None]:
    """Return some calls of a file that `check` found right, from `begin` on, and where to go on; None at the end.

    Calls whose numbers are among `answered` are skipped without parsing. Blocks, for a piece of the file.
    """
    number = begin.number
    num_bytes = 0
    calls: list[BatchLine] = []
    with place.open("rb") as file:
        file.seek(begin.offset)
        for text in _texts(file):
            number, num_bytes = number + 1, num_bytes + sum(map(len, text))
            if any(map(bytes.strip, text)) and not any(number in one for one in answered):
                line = _line(number, text, endpoint)
                if isinstance(line, BatchLine):
                    calls.append(line)
            if num_bytes >= _AT_ONCE_BYTES:
                return calls, LinePosition(number, begin.offset + num_bytes)
    return calls, None


def answer_line(batch_id: str, line: BatchLine, status: int, uid: str, body: bytes) -> bytes:
    """Return the line of an answer. `body` is the route's answer: JSON, which is not parsed."""
    about = json.dumps({"id": f"{batch_id}-{line.number}", "custom_id": line.custom_id}).encode("ascii")
    response = json.dumps({"status_code": status, "request_id": uid}).encode("ascii")
    body = body.strip().replace(b"\n", b" ")  # A newline can only be between values: texts in JSON have none.
    return about[:-1] + b', "response": ' + response[:-1] + b', "body": ' + body + b'}, "error": null}\n'


def _read(place: Path, endpoint: str) -> Iterator[BatchLine | LineError]:
    """Yield the calls of a file in order, or the mistake in a line."""
    with place.open("rb") as file:
        for number, text in enumerate(_texts(file), 1):
            if number > _MOST_WITH_EMPTY:
                message = f"There are more than {_MOST_WITH_EMPTY} lines, empty ones counted: send several files."
                yield LineError(line=number, message=message)
                return
            if any(map(bytes.strip, text)):
                yield _line(number, text, endpoint)


def _texts(file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield each line in pieces: copying a long line at once would take other threads' time."""
    line = list[bytes]()
    while piece := file.read(PIECE_BYTES):
        begin = 0
        while (end := piece.find(b"\n", begin) + 1) > 0:
            line.append(piece[begin:end])
            yield line
            line = []
            begin = end
        if begin < len(piece):
            line.append(piece[begin:])
    if line:
        yield line


def _parsed(text: Sequence[bytes]) -> object:
    """Parse a line. Raises JsonRefused, RestTooLarge."""
    reader = JsonReader(_MOST_REST_BYTES, sum(map(len, text)))
    for piece in text:
        reader.feed(piece)
    return reader.value()


def _line(number: int, text: Sequence[bytes], endpoint: str) -> BatchLine | LineError:
    def wrong(message: str, param: str | None = None) -> LineError:
        return LineError(line=number, message=message, param=param)

    try:
        call = _parsed(text)
    except JsonRefused as error:
        reason = str(error)
        remedy = f"Give {_EXAMPLE}" if error.code is None else "Give less"
        return wrong(f"{reason[0].upper()}{reason[1:]}. {remedy}.")
    except RestTooLarge:
        return wrong(
            f"Apart from texts of {LONG_TEXT_BYTES} bytes and more, such as images as base64, it has more than "
            f"{_MOST_REST_BYTES >> 20} MiB. Give fewer or shorter fields beside them."
        )
    if not isinstance(call, dict):
        return wrong("It is no object.")
    custom_id = call.get("custom_id")
    body = call.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        remedy = f"Give a text of less than {LONG_TEXT_BYTES} bytes."
        return wrong(f"custom_id = {shown(custom_id)} is not accepted. {remedy}", "custom_id")
    for name, wanted in (("method", "POST"), ("url", endpoint)):
        if call.get(name) != wanted:
            return wrong(f'{name} = {shown(call.get(name))} is not accepted. Give "{wanted}".', name)
    if not isinstance(body, dict):
        return wrong("The body is no object.", "body")
    line = BatchLine(number, custom_id, body)
    return wrong("A batch does not stream: leave stream out.", "stream") if line.given().get("stream") else line
