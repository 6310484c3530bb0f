"""Strict reading of JSON-lines files: one object per line, whose fields are taken by name and checked.

Error messages count lines from 1, as editors do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

RequestId = int | str


class BadLine(ValueError):
    """A line of a file is not what its format asks for. `line` counts from 1; `field` is "" for the line as a whole."""

    def __init__(self, source: str, line: int, field: str, value: object, remedy: str) -> None:
        what = f'"{field}" is {_shown(value)}' if field else _shown(value)
        super().__init__(f"{source}:{line}: {what}; {remedy}")
        self.source = source
        self.line = line
        self.field = field
        self.value = value
        self.remedy = remedy


class JsonLine:
    """One JSON object of a file, whose fields are taken by name and checked.

    Every method raises `BadLine` if the field is missing (and has no default) or is of another type.
    """

    def __init__(self, source: str, line: int, text: bytes) -> None:
        self.source = source
        self.line = line
        try:
            values = json.loads(text.decode(), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            self.fail("", text.decode(errors="replace"), f"write one JSON object per line ({error})")
        if not isinstance(values, dict):
            self.fail("", values, "write one JSON object per line")
        self.values: dict[str, Any] = values

    def fail(self, field: str, value: object, remedy: str) -> NoReturn:
        raise BadLine(self.source, self.line, field, value, remedy)

    def allow(self, known: Sequence[str]) -> None:
        """Refuse every other key, naming the known one that is nearest in spelling."""
        for key in self.values:
            if key not in known:
                near = get_close_matches(key, known, n=1)
                remedy = f'did you mean "{near[0]}"?' if near else f"the known fields are {', '.join(known)}"
                self.fail(key, self.values[key], f"there is no such field; {remedy}")

    def given(self, field: str) -> bool:
        """Return whether the field is there and not null."""
        return self.values.get(field) is not None

    def _take(self, field: str, default: Any, remedy: str) -> Any:
        if field in self.values:
            return self.values[field]
        if default is MISSING:
            raise BadLine(self.source, self.line, field, MISSING, f"add it: {remedy}")
        return default

    def number(self, field: str, default: Any = MISSING, *, above: float = -math.inf, or_equal: bool = False) -> float:
        """Return a finite number above the bound, or equal to it if `or_equal`."""
        remedy = "use a number" + (f" {'of at least' if or_equal else 'above'} {above:g}" if above > -math.inf else "")
        value = self._take(field, default, remedy)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e300:
            self.fail(field, value, remedy)
        if value < above or (value == above and not or_equal):
            self.fail(field, value, remedy)
        return float(value)

    def integer(self, field: str, default: Any = MISSING, *, least: int) -> int:
        remedy = f"use a whole number of at least {least}"
        value = self._take(field, default, remedy)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fail(field, value, remedy)
        return value

    def text(self, field: str, default: Any = MISSING) -> str:
        remedy = "use text that is not empty"
        value = self._take(field, default, remedy)
        if not isinstance(value, str) or not value:
            self.fail(field, value, remedy)
        return value

    def truth(self, field: str, default: Any = MISSING) -> bool:
        remedy = "use true or false"
        value = self._take(field, default, remedy)
        if not isinstance(value, bool):
            self.fail(field, value, remedy)
        return value

    def numbers_by_name(self, field: str) -> dict[str, float]:
        """Return an object of finite numbers, by names that are not empty."""
        remedy = 'use an object of names and numbers, {"ink": 0.8}'
        values = self._take(field, MISSING, remedy)
        if not isinstance(values, dict) or "" in values:
            self.fail(field, values, remedy)
        for value in values.values():
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e300:
                self.fail(field, values, remedy)
        return {name: float(value) for name, value in values.items()}

    def choice(self, field: str, choices: Iterable[str], default: Any = MISSING) -> str:
        names = [str(choice) for choice in choices]
        remedy = f"use one of {', '.join(names)}"
        value = self._take(field, default, remedy)
        if value not in names:
            self.fail(field, value, remedy)
        return str(value)

    def request_id(self, field: str, default: Any = MISSING) -> RequestId:
        return self._checked_id(field, self._take(field, default, "use a name or a line number"))

    def request_ids(self, field: str) -> tuple[RequestId, ...]:
        return tuple(self._checked_id(field, value) for value in self._list(field))

    def integers(self, field: str) -> tuple[int, ...]:
        """Return different whole numbers from 0 on, at least one of them, in the order of the file."""
        values = self._list(field)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                self.fail(field, values, "use whole numbers of at least 0")
        return tuple(values)

    def _list(self, field: str) -> list[Any]:
        remedy = "use a list of at least one value, each different"
        values = self._take(field, MISSING, remedy)
        if not isinstance(values, list) or not values or any(value in values[:i] for i, value in enumerate(values)):
            self.fail(field, values, remedy)
        return values

    def _checked_id(self, field: str, value: Any) -> RequestId:
        if isinstance(value, str) and value:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.fail(field, value, "use a name that is not empty, or a line number from 0 on")
        return value


def read_lines(path: Path | str) -> Iterator[JsonLine]:
    """Yield the lines of a JSON-lines file; the last may lack its line break, an empty one is refused."""
    for index, text in enumerate(Path(path).read_bytes().splitlines()):
        yield JsonLine(str(path), index + 1, text)


def _shown(value: object) -> str:
    if value is MISSING:
        return "missing"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f'"{next(key for key in keys if keys.count(key) > 1)}" comes twice')
    return values
