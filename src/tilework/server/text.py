"""How values, counts and times of day look in messages and answers."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def shown(value: object, max_chars: int = 80) -> str:
    """The value as JSON in ASCII, cut to `max_chars`: safe to print and to send back."""
    text = json.dumps(value)
    return text if len(text) <= max_chars else text[:max_chars] + "..."


def counted(count: int, noun: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def parse_time(text: str) -> datetime | None:
    """The time that an RFC 3339 text means, or None if it is not one; an offset is required."""
    if not _RFC3339.fullmatch(text):
        return None
    try:
        return datetime.fromisoformat(text.upper())
    except ValueError:  # The 31st of February, say.
        return None


def time_text(unix_s: float) -> str:
    """A time as RFC 3339 in UTC, to the millisecond."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
