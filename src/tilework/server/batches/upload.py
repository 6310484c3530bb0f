"""The fields of a form that uploads a file."""

from __future__ import annotations

from collections.abc import Mapping

from tilework.server.http.errors import invalid
from tilework.server.schema.batch_answers import LONGEST_S, SHORTEST_S

PURPOSE, FILE = "purpose", "file"
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


def taken_file(purpose: object, content: object) -> bytes:
    """Return the content of a file of calls. Raises ApiError if the form has none."""
    if purpose != "batch":
        raise invalid(PURPOSE, _text(purpose), 'Give "batch".')
    if not isinstance(content, bytes):
        raise invalid(FILE, content, "Give a file of lines of JSON, as a file of the form.")
    return content


def expires_after(fields: Mapping[str, object]) -> int | None:
    """Return the seconds after which the file expires; None if the form does not say. Raises ApiError."""
    anchor, seconds = fields.get(_ANCHOR), fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid(_ANCHOR, _text(anchor), 'Give "created_at".')
    if (
        not isinstance(seconds, str)
        or not seconds.isascii()
        or not seconds.isdigit()
        or len(seconds) > len(str(LONGEST_S))
        or not SHORTEST_S <= int(seconds) <= LONGEST_S
    ):
        raise invalid(_SECONDS, _text(seconds), f"Give a whole number from {SHORTEST_S} to {LONGEST_S}.")
    return int(seconds)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
