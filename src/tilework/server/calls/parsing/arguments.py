"""Checks the fields of a body that only some models take; fields that none takes are refused or ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, assert_never

from tilework.core.model import Argument, ArgumentKind, ArgumentValue, ModelInfo
from tilework.server.calls.errors import InvalidValue, invalid
from tilework.server.calls.parsing.no_effect import NoEffect
from tilework.server.calls.parsing.reading import read_value
from tilework.server.schema.foreign_fields import SILENT, WITHOUT_CHOICE, WITHOUT_EFFECT, is_of_the_picture
from tilework.server.schema.image_request import ImageRequest

_NEAR = 0.8
_MAX_NAME_CHARS = 64
_MOST_NEAR = 8
"""Most unknown names that are compared with known ones: each takes about a millisecond."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a model that a body gives, by name; its unknown fields, and known ones that have no effect."""

    values: dict[str, ArgumentValue]
    ignored: tuple[str, ...]
    no_effect: tuple[NoEffect, ...]


def arguments_of(body: Mapping[str, object], info: ModelInfo, *, is_strict: bool) -> Arguments:
    """Return what a body gives beside the fields of all models.

    Raises:
        InvalidValue: a value is wrong or missing; or the model takes no such field, and the field would change the
            image, is a misspelling, or `is_strict`.
    """
    known = {one.name: one for one in info.arguments}
    found: dict[str, ArgumentValue] = {}
    ignored: list[str] = []
    no_effect: list[NoEffect] = []
    near = _Near([*ImageRequest.model_fields, *known])
    for name, value in body.items():
        if value is None or name in ImageRequest.model_fields:
            continue
        if name in known:
            found[name] = _checked(known[name], value if is_strict else _read(known[name], value))
        elif name in WITHOUT_CHOICE:
            _check_choice(name, value)
        elif name in WITHOUT_EFFECT:
            if value not in WITHOUT_EFFECT[name]:
                no_effect.append(NoEffect(name, value, "this server has no choice of it"))
        elif name in SILENT:
            continue
        elif (meant := near.of(name)) is not None or is_strict or _is_of_the_picture(name):
            raise invalid(name[:_MAX_NAME_CHARS], value, _remedy(meant, info, known), code="unsupported_value")
        else:
            ignored.append(name)
    for one in info.arguments:
        if one.required and one.name not in found:
            message = f"{one.name} is missing: {info.name} needs it. Give {wanted(one)}."
            raise InvalidValue(message, field=one.name, code="missing_value")
    return Arguments(found, tuple(ignored), tuple(no_effect))


def schedule_of(arguments: Mapping[str, ArgumentValue], info: ModelInfo) -> tuple[str, int] | None:
    """Return the name of the schedule among the arguments, and its number of steps; None if there is none.

    Raises:
        InvalidValue: there are two.
    """
    found = [
        (one.name, len(values) - one.more)
        for one in info.arguments
        if one.kind is ArgumentKind.SCHEDULE and isinstance(values := arguments.get(one.name), tuple)
    ]
    if len(found) > 1:
        (name, _), (other, _) = found[:2]
        raise invalid(name, arguments[name], f"{other} is given as well: leave one of them out.")
    return found[0] if found else None


def _check_choice(name: str, value: object) -> None:
    accepted = WITHOUT_CHOICE[name]
    if value not in accepted and read_value(bool, value) not in accepted:
        values = " or ".join(json.dumps(each) for each in accepted)
        remedy = f"This server has no other choice: give {values}, or leave it out."
        raise invalid(name, value, remedy, code="unsupported_value")


def _read(one: Argument, value: object) -> object:
    """Convert a value, or a list of them, to numbers if the argument wants numbers and the texts are numbers."""
    if one.kind in (ArgumentKind.TEXT, ArgumentKind.CHOICE):
        return value
    if isinstance(value, list):
        return [each if isinstance(each, list) else _read(one, each) for each in value]
    return read_value(int if one.kind in (ArgumentKind.INTEGER, ArgumentKind.INTEGERS) else float, value)


def _remedy(near: str | None, info: ModelInfo, known: Mapping[str, Argument]) -> str:
    hint = "." if near is None else f"; did you mean {near}?"
    own = f" {info.name} has {', '.join(sorted(known))} of its own." if known else ""
    return f"There is no such field here: leave it out{hint}{own}"


class _Near:
    """Finds the field that a misspelt name means. It looks at only the first few unknown names of a body."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._num_left = _MOST_NEAR

    def of(self, name: str) -> str | None:
        if len(name) > _MAX_NAME_CHARS or not self._num_left:
            return None
        self._num_left -= 1
        return next(iter(get_close_matches(name, self._names, n=1, cutoff=_NEAR)), None)


def _is_of_the_picture(name: str) -> bool:
    return len(name) <= _MAX_NAME_CHARS and is_of_the_picture(name)


def _checked(one: Argument, value: object) -> ArgumentValue:
    """Return the value of an argument. Raises InvalidValue."""
    if one.kind in (ArgumentKind.TEXT, ArgumentKind.CHOICE):
        if isinstance(value, str) and (not one.choices or value in one.choices):
            return value
    elif (numbers := _numbers(one, value)) is not None:
        return numbers
    raise invalid(one.name, value, f"Give {wanted(one)}.")


def _numbers(one: Argument, value: object) -> int | float | tuple[int | float, ...] | None:
    """Return a number or numbers as the argument wants them; None if they are not."""
    is_list = one.kind in (ArgumentKind.INTEGERS, ArgumentKind.SCHEDULE)
    if isinstance(value, list) != is_list:
        return None
    given: list[Any] = value if isinstance(value, list) else [value]
    if not given or not all(_is_within(one, each) for each in given):
        return None
    if not is_list:
        return int(given[0]) if one.kind is ArgumentKind.INTEGER else float(given[0])
    if one.kind is ArgumentKind.SCHEDULE:
        falls = all(before > after for before, after in pairwise(given))
        return tuple(given) if falls and len(given) > one.more else None
    return tuple(given) if one.count in (None, len(given)) else None


def _is_within(one: Argument, number: object) -> bool:
    whole = one.kind in (ArgumentKind.INTEGER, ArgumentKind.INTEGERS)
    if isinstance(number, bool) or not isinstance(number, int if whole else int | float):
        return False
    return one.low <= number <= one.high  # False for NaN.


def wanted(one: Argument) -> str:
    """Describe the values of an argument, in words for a client."""
    limits = f"from {one.low:g} to {one.high:g}"
    match one.kind:
        case ArgumentKind.TEXT:
            return "a text"
        case ArgumentKind.CHOICE:
            return " or ".join(f'"{choice}"' for choice in one.choices)
        case ArgumentKind.NUMBER:
            return f"a number {limits}"
        case ArgumentKind.INTEGER:
            return f"an integer {limits}"
        case ArgumentKind.INTEGERS:
            return f"a list of {'' if one.count is None else f'{one.count} '}integers {limits}"
        case ArgumentKind.SCHEDULE:
            more = f", and {one.more} more" if one.more else ""
            return f"a list of falling numbers {limits}, one for each step{more}"
        case _:
            assert_never(one.kind)
