"""Two event logs, line by line: the first place where they differ."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from suite.decisions.names import Names

_MOST_CHARACTERS = 160
_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How many events are answered alike, and what differs in the first that is not; empty if all are alike."""

    num_events: int
    difference: str = ""


def read_lines(log: Path) -> list[str]:
    """Of a log, compressed or not. Raises OSError."""
    text = gzip.decompress(log.read_bytes()) if log.suffix == ".gz" else log.read_bytes()
    return text.decode("utf-8").splitlines()


def renewed_lines(lines: Iterable[str], names: Names) -> Iterator[str]:
    """An old log as the new code would write it, header included."""
    iterator = iter(lines)
    for header in iterator:
        yield json.dumps(names.renewed_header(json.loads(header)))
        break
    for line in iterator:
        yield json.dumps(names.renewed(json.loads(line), "entry"))


def compare_lines(old: Iterable[str], new: Iterable[str], names: Names) -> Agreement:
    """Compare the lines of an old log and a new one, without headers; whatever reading a line raises passes through."""
    count = 0
    for was, now in zip_longest(old, new):
        if was != now:
            before = None if was is None else names.compared(names.renewed(json.loads(was), "entry"))
            after = None if now is None else names.compared(json.loads(now))
            if before != after:
                return Agreement(num_events=count, difference=f"line {count + 2}: {_difference(before, after)}")
        count += 1
    return Agreement(num_events=count)


def _difference(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    if old is None or new is None:
        longer, entry = ("new", new) if old is None else ("old", old)
        return f"only the {longer} log goes on, with {_short(entry)}"
    event = old["event"]["is"] if old.get("event") == new.get("event") else "the event itself"
    path, was, now = _first(old, new, "")
    return f"t = {old['t']}, {event}: {path} was {_short(was)}, is {_short(now)}"


def _first(old: Any, new: Any, path: str) -> tuple[str, Any, Any]:
    """The innermost place of the first difference, and what stands there."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(f"{path}.{key}", old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in {**old, **new}]
    elif isinstance(old, list) and isinstance(new, list):
        both = zip_longest(old, new, fillvalue=_ABSENT)
        pairs = [(f"{path}[{index}]", was, now) for index, (was, now) in enumerate(both)]
    else:
        return path.lstrip("."), old, new
    return next(_first(was, now, place) for place, was, now in pairs if was is _ABSENT or now is _ABSENT or was != now)


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = json.dumps(value, separators=(",", ":"))
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."
