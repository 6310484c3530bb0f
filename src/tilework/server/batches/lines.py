"""The lines of a batch: calls that go in, answers that come out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilework.server.calls.errors import InvalidValue
from tilework.server.calls.parsing.fields import spread
from tilework.server.http.body import MAX_DEPTH, is_deeper
from tilework.server.schema.batch_answers import LineError
from tilework.server.text import shown

MAX_LINES = 50_000
_MOST_ERRORS = 20


@dataclass(frozen=True, slots=True)
class Line:
    """A call: the number of its line from 1 on, what its client calls it, and its body."""

    number: int
    custom_id: str
    body: dict[str, Any]

    def given(self) -> Mapping[str, object]:
        """The fields that it gives, wherever they are; null means absent."""
        try:
            fields = spread(self.body)
        except InvalidValue:  # Its route will say so.
            fields = self.body
        return {name: value for name, value in fields.items() if value is not None}


def read_lines(place: Path, endpoint: str) -> Iterator[Line | LineError]:
    """The calls of a file, in order, or what is wrong with a line. Empty lines are none."""
    seen: set[str] = set()
    with place.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                line = _line(number, text, endpoint)
                if isinstance(line, Line) and line.custom_id in seen:
                    line = LineError(line=number, message="The custom_id is that of another line.", param="custom_id")
                if isinstance(line, Line):
                    seen.add(line.custom_id)
                yield line


def check(place: Path, endpoint: str) -> tuple[int, list[LineError]]:
    """How many calls a file has, and what is wrong with some; the first mistakes."""
    num_calls, mistakes = 0, list[LineError]()
    for line in read_lines(place, endpoint):
        num_calls += 1
        if isinstance(line, LineError):
            mistakes.append(line)
        if len(mistakes) == _MOST_ERRORS or num_calls > MAX_LINES:
            break
    if num_calls > MAX_LINES:
        mistakes.append(LineError(line=MAX_LINES + 1, message=f"There are more than {MAX_LINES} lines: send several."))
    if not num_calls:
        mistakes.append(LineError(line=1, message="The file is empty: give one call a line."))
    return num_calls, mistakes


def answered(place: Path) -> set[str]:
    """The calls of which a file has answers. A line that was cut off, as the process was killed, is removed."""
    content = place.read_bytes()
    whole = content.rpartition(b"\n")[0]
    if len(whole) + 1 < len(content) or (content and not whole):
        with place.open("r+b") as file:
            file.truncate(len(whole) + 1 if whole else 0)
    return {json.loads(line)["custom_id"] for line in whole.splitlines()}


def answer_line(batch_id: str, line: Line, status: int, uid: str, body: object) -> bytes:
    answer = {
        "id": f"{batch_id}-{line.number}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": uid, "body": body},
        "error": None,
    }
    return json.dumps(answer).encode("ascii") + b"\n"


def _line(number: int, text: bytes, endpoint: str) -> Line | LineError:
    def wrong(message: str, param: str | None = None) -> LineError:
        return LineError(line=number, message=message, param=param)

    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return wrong('It is no JSON: give {"custom_id": "...", "method": "POST", "url": "...", "body": {...}}.')
    if not isinstance(call, dict):
        return wrong("It is no object.")
    custom_id, body = call.get("custom_id"), call.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return wrong(f"custom_id = {shown(custom_id)} is not accepted. Give a text.", "custom_id")
    for name, wanted in (("method", "POST"), ("url", endpoint)):
        if call.get(name) != wanted:
            return wrong(f'{name} = {shown(call.get(name))} is not accepted. Give "{wanted}".', name)
    if not isinstance(body, dict):
        return wrong("The body is no object.", "body")
    if is_deeper(body, MAX_DEPTH):
        return wrong(f"The body is nested more than {MAX_DEPTH} levels deep.", "body")
    line = Line(number, custom_id, body)
    return wrong("A batch does not stream: leave stream out.", "body") if line.given().get("stream") else line
