"""The fields of a route's body, in the terms of a call for images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilework.core.model import ModelInfo
from tilework.server.bounded.json_reader import MAX_FIELDS, JsonRefused, inner_json
from tilework.server.bounded.long_text import LONG_TEXT_BYTES, LongText
from tilework.server.calls.errors import InvalidValue, invalid
from tilework.server.calls.parsing.video_format import AskedVideo
from tilework.server.schema.foreign_fields import OTHER_NAMES

EXTRA = "extra_body"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fields of an image. Videos have a format."""

    fields: Mapping[str, object]
    video: AskedVideo | None = None


def spread(body: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fields with those in `extra_body`, which override fields beside it. A form has it as JSON.

    OpenAI's libraries spread it themselves; some clients of vLLM-Omni and SGLang send it as it is.

    Raises:
        InvalidValue: it is no object, or there are more than `MAX_FIELDS` fields in all.
    """
    if EXTRA not in body:
        return body
    rest = {name: value for name, value in body.items() if name != EXTRA}
    extra = body[EXTRA]
    if isinstance(extra, str):
        try:
            extra = inner_json(extra)
        except JsonRefused as error:
            raise invalid(EXTRA, body[EXTRA], f"Give an object as JSON, or leave it out: {error}.") from None
    if extra is None:
        return rest
    if not isinstance(extra, dict):
        raise invalid(EXTRA, body[EXTRA], "Give an object with any of the other fields, or leave it out.")
    if len(rest) + len(extra) > MAX_FIELDS:
        message = f"{EXTRA} has {len(extra)} fields beside {len(rest)} others: give at most {MAX_FIELDS} in all."
        raise InvalidValue(message, field=EXTRA, code="too_many_fields")
    return {**rest, **{name: value for name, value in extra.items() if value is not None}}


def most_text_bytes(max_chars: int) -> int:
    """Return the most bytes that this number of characters takes in JSON: twelve each, as a pair of escapes."""
    return max(LONG_TEXT_BYTES, 12 * max_chars)


def with_texts(fields: Mapping[str, object], max_chars: int) -> dict[str, object]:
    """Return the fields, which are no pictures, with texts in place of `LongText`s.

    Raises:
        InvalidValue: one is too long.
    """
    return {
        name: short_text(name, value, max_chars) if isinstance(value, LongText) else value
        for name, value in fields.items()
    }


def short_text(name: str, text: str | LongText, max_chars: int) -> str:
    """Return a text of ordinary length. Raises InvalidValue if it is too long, or no text in JSON."""
    if isinstance(text, str):
        return text
    if not text.is_whole or text.num_bytes > most_text_bytes(max_chars):
        raise invalid(name, text, f"It has {text.num_bytes} bytes: give a text of at most {max_chars} characters.")
    try:
        return text.text()
    except ValueError:
        raise invalid(name, text, "Give a text that is valid JSON.") from None


def renamed(fields: Mapping[str, object], info: ModelInfo) -> dict[str, object]:
    """Rename fields that other servers call otherwise. A name that the model itself has stays.

    Raises:
        InvalidValue: a field is given by two names.
    """
    found: dict[str, object] = {}
    for name, value in fields.items():
        own = OTHER_NAMES.get(name, name) if info.argument(name) is None else name
        if value is None and (own != name or own in found):
            continue
        if found.get(own) is not None:
            other = next(one for one in fields if one != name and OTHER_NAMES.get(one, one) == own)
            raise invalid(name, value, f"{other} is given as well: leave one of them out.")
        found[own] = value
    return found
