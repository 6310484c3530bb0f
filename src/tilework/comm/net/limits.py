"""Limits on the contents of messages, beyond their types: the ranges of `core.wire.ranges`, finite numbers, sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from tilework.comm.net.frames import BadFrame
from tilework.core.wire.ranges import Range

_TEXT = Range(0, 1 << 20)
_MOST_THINGS = 1 << 17
_Ranges = tuple[Range, Range | None]
"""The ranges of the texts and of the numbers in a field."""
_Plan = tuple[tuple[str, _Ranges], ...]


class BadMessage(BadFrame):
    """A message that can be read, but has an impossible value; the error says which."""


class Limits:
    """Checks objects of dataclasses, and the objects that they hold."""

    def __init__(self) -> None:
        self._plans: dict[type, _Plan] = {}

    def check(self, message: object) -> None:
        """Check a message. Raises BadMessage, which names type, field and value."""
        for name, limits in self._plan(type(message)):
            self._check(getattr(message, name), limits, message, name)

    def _check(self, value: Any, limits: _Ranges, owner: object, name: str) -> None:
        kind = type(value)
        if kind is int or kind is float:
            if kind is float and not math.isfinite(value):
                raise _outside(owner, name, value, "is no number")
            number = limits[1]
            if number is not None and not number.least <= value <= number.most:
                raise _outside(owner, name, value, f"is not within {number.least:g} to {number.most:g}")
        elif kind is str:
            if len(value) > limits[0].most:
                raise _outside(owner, name, value[:40], f"has {len(value)} characters")
        elif kind is tuple or kind is frozenset or kind is dict:
            self._check_all(value, limits, owner, name)
        elif is_dataclass(kind):
            self.check(value)

    def _check_all(self, values: Any, limits: _Ranges, owner: object, name: str) -> None:
        if len(values) > _MOST_THINGS:
            raise _outside(owner, name, "", f"has {len(values)} entries")
        for value in values:
            self._check(value, limits, owner, name)
        if isinstance(values, Mapping):
            for value in values.values():
                self._check(value, limits, owner, name)

    def _plan(self, kind: type) -> _Plan:
        """Return the fields of a dataclass that must be checked, each with its ranges."""
        plan = self._plans.get(kind)
        if plan is None:
            assert is_dataclass(kind), kind
            hints = get_type_hints(kind, include_extras=True)
            named = ((one.name, hints[one.name]) for one in fields(kind))
            plan = tuple((name, _ranges(hint)) for name, hint in named if hint not in (bool, bytes))
            self._plans[kind] = plan
        return plan


def _ranges(hint: Any) -> _Ranges:
    found: dict[bool, Range] = {}
    _find(hint, found)
    return found.get(True, _TEXT), found.get(False)


def _find(hint: Any, found: dict[bool, Range]) -> None:
    """Note the first range of texts, under True, and that of numbers, under False."""
    inner = get_args(hint)
    for one in getattr(hint, "__metadata__", ()):
        if isinstance(one, Range):
            found.setdefault(inner[0] is str, one)
    for one in inner:
        _find(one, found)


def _outside(owner: object, name: str, value: object, why: str) -> BadMessage:
    return BadMessage(f"{name} = {value!r} of {type(owner).__name__} {why}")
