"""What the body of a route asks for, in the terms of a call for images."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tilework.core.model import ModelInfo
from tilework.server.calls.errors import invalid
from tilework.server.calls.parsing.video_format import AskedVideo
from tilework.server.schema.foreign_fields import OTHER_NAMES

EXTRA = "extra_body"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fields of an image. Videos have a format."""

    fields: Mapping[str, object]
    video: AskedVideo | None = None


def spread(body: Mapping[str, object]) -> Mapping[str, object]:
    """The fields with those in `extra_body`, which override those beside it. A form has it as JSON.

    OpenAI's libraries spread it themselves; some clients of vLLM-Omni and SGLang send it as it is.

    Raises:
        InvalidValue: it is no object.
    """
    if EXTRA not in body:
        return body
    rest, extra = {name: value for name, value in body.items() if name != EXTRA}, body[EXTRA]
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except (ValueError, RecursionError):
            raise invalid(EXTRA, body[EXTRA], "Give an object as JSON, or leave it out.") from None
    if extra is None:
        return rest
    if not isinstance(extra, dict):
        raise invalid(EXTRA, body[EXTRA], "Give an object with any of the other fields, or leave it out.")
    return {**rest, **{name: value for name, value in extra.items() if value is not None}}


def renamed(fields: Mapping[str, object], info: ModelInfo) -> dict[str, object]:
    """The fields by their names here, where other servers have others; what the model itself calls so stays.

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
