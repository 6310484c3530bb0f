"""Values, counts and times of day as texts for messages and answers."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from itertools import islice

from tilework.server.bounded.long_text import LongText

_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def shown(value: object, max_chars: int = 80) -> str:
    """Return the value as JSON in ASCII, cut to `max_chars`: safe to print and to send back.

    Of a long value only the shown part is read.
    """
    text = json.dumps(_beginning(value, max_chars, max_chars))
    return text if len(text) <= max_chars else text[:max_chars] + "..."


def _beginning(value: object, max_chars: int, depth: int) -> object:
    """Return enough of a value to show it: each member takes a character of what is shown, and so does each level."""
    if isinstance(value, LongText):
        return value.head(max_chars + 1)
    if isinstance(value, str):
        return value[: max_chars + 1]
    if isinstance(value, list | tuple):
        return [_beginning(each, max_chars, depth - 1) for each in value[: max_chars if depth else 0]]
    if isinstance(value, dict):
        first = islice(value.items(), max_chars if depth else 0)
        return {_beginning(name, max_chars, 0): _beginning(each, max_chars, depth - 1) for name, each in first}
    return value


def counted(count: int, noun: str) -> str:
    """Count in words: `1 call`, `2 calls`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def parse_time(text: str) -> datetime | None:
    """Parse a time in RFC 3339, or return None if the text is none; an offset is required."""
    if not _RFC3339.fullmatch(text):
        return None
    try:
        return datetime.fromisoformat(text.upper())
    except ValueError:  # Such as the 31st of February.
        return None


def time_text(unix_s: float) -> str:
    """Format a time as RFC 3339 in UTC, to the millisecond."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
