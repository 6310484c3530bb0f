"""Turns the fields of a form, which are texts and files, into those of a JSON body."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from tilework.core.model import ArgumentKind, ModelInfo
from tilework.server.bounded.json_reader import MAX_VALUES, JsonRefused, inner_json
from tilework.server.calls.errors import invalid
from tilework.server.calls.parsing.reading import number_or_truth
from tilework.server.schema.image_request import ImageRequest
from tilework.server.schema.picture_fields import PICTURE_FIELDS

_LISTS = (ArgumentKind.INTEGERS, ArgumentKind.SCHEDULE)
_MAYBE_EMPTY = ("prompt", "negative_prompt")
_TEXTS = (ArgumentKind.TEXT, ArgumentKind.CHOICE)


def form_fields(form: Iterable[tuple[str, str | bytes]], info: ModelInfo) -> dict[str, object]:
    """Return the fields of a form as JSON has them.

    A text becomes the number, truth value or list that its field wants, if it is written as in JSON; otherwise it stays
    a text, which is then refused as such. A field without a value is absent, except for prompts. A list is one field
    several times, also as `NAME[]`, or JSON.

    Raises:
        InvalidValue: a field that holds one value is given several times, or a field that is no picture is a file.
    """
    lists = {one.name for one in info.arguments if one.kind in _LISTS}
    texts = _text_fields(info)
    pictures = PICTURE_FIELDS | {one.name for one in info.pictures}
    fields: dict[str, object] = {}
    for name, values in _by_name(form).items():
        if name in pictures:
            fields[name] = _unless_empty(values)
        elif name in lists:
            fields[name] = _list(name, values)
        elif name == "lora" and len(values) == 1:
            fields[name] = _json(_text(name, values[0]))
        elif len(values) > 1:
            raise invalid(name, [_shown(value) for value in values[:3]], "It is given several times: give it once.")
        elif (value := _text(name, values[0])) != "" or name in _MAYBE_EMPTY:
            fields[name] = value if name in texts else _value(value)
    return fields


def untyped_fields(form: Iterable[tuple[str, str | bytes]]) -> dict[str, object]:
    """Return the fields of a form as they came, for finding its model, on which their types depend."""
    return {name: _unless_empty(values) for name, values in _by_name(form).items()}


def _by_name(form: Iterable[tuple[str, str | bytes]]) -> dict[str, list[str | bytes]]:
    given: dict[str, list[str | bytes]] = {}
    for name, value in form:
        given.setdefault(name.removesuffix("[]"), []).append(value)
    return given


def _unless_empty(values: list[str | bytes]) -> object:
    return values if len(values) > 1 else None if values[0] == "" else values[0]


def _text_fields(info: ModelInfo) -> set[str]:
    """Return the fields whose values are texts, so that "7" stays one. Unknown fields are refused either way."""
    own = {name for name, one in ImageRequest.model_fields.items() if not _wants_other(one.annotation)}
    return own | {one.name for one in info.arguments if one.kind in _TEXTS}


def _wants_other(annotation: object) -> bool:
    """Return whether a field takes numbers or truth values."""
    return bool({int, float, bool} & {annotation, *get_args(annotation)})


def _list(name: str, values: list[str | bytes]) -> object:
    """Return the values, or those of a list written as JSON. No model takes nested lists."""
    texts = [_text(name, value) for value in values]
    if len(texts) == 1 and texts[0].startswith("["):
        if (num_values := texts[0].count(",") + 1) > MAX_VALUES:
            raise invalid(name, texts[0], f"It has {num_values} values: give at most {MAX_VALUES}.")
        inner = texts[0].removeprefix("[").removesuffix("]").strip()
        return [_value(each.strip()) for each in inner.split(",")] if inner else []
    return None if texts == [""] else [_value(text) for text in texts]


def _json(text: str) -> object:
    """Parse JSON; an empty text is null, as a field without a value, and a text that is no JSON stays a text."""
    try:
        return inner_json(text or "null")
    except JsonRefused:
        return text


def _text(name: str, value: str | bytes) -> str:
    if isinstance(value, bytes):
        raise invalid(name, _shown(value), "The field takes no file: send it as a text.")
    return value


def _value(text: str) -> object:
    """Read a value as `number_or_truth` does, or as an empty object."""
    return {} if text == "{}" else number_or_truth(text)


def _shown(value: str | bytes) -> str:
    return f"a file of {len(value)} bytes" if isinstance(value, bytes) else value[:100]
