"""What messages may hold beyond their types: the ranges of `core.wire.ranges`, finite numbers, sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from tilework.comm.net.frames import BadFrame
from tilework.core.wire.ranges import Range

_TEXT = Range(0, 1 << 20)
_MOST_THINGS = 1 << 17
_Plan = tuple[tuple[str, Range | None], ...]


class BadMessage(BadFrame):
    """A message that is whole, and says what cannot be; the message of the error says what."""


class Limits:
    """Checks objects of dataclasses, and of those that they hold."""

    def __init__(self) -> None:
        self._plans: dict[type, _Plan] = {}

    def check(self, message: object) -> None:
        """Raises BadMessage, which names type, field and value."""
        for name, limits in self._plan(type(message)):
            self._check(getattr(message, name), limits, message, name)

    def _check(self, value: Any, limits: Range | None, owner: object, name: str) -> None:
        kind = type(value)
        if kind is int or kind is float:
            if kind is float and not math.isfinite(value):
                raise _outside(owner, name, value, "is no number")
            if limits is not None and not limits.least <= value <= limits.most:
                raise _outside(owner, name, value, f"is not within {limits.least:g} to {limits.most:g}")
        elif kind is str:
            if len(value) > (limits or _TEXT).most:
                raise _outside(owner, name, value[:40], f"has {len(value)} characters")
        elif kind is tuple or kind is frozenset or kind is dict:
            self._check_all(value, limits, owner, name)
        elif is_dataclass(kind):
            self.check(value)

    def _check_all(self, values: Any, limits: Range | None, owner: object, name: str) -> None:
        if len(values) > _MOST_THINGS:
            raise _outside(owner, name, "", f"has {len(values)} entries")
        for value in values:
            self._check(value, limits, owner, name)
        if isinstance(values, Mapping):
            for value in values.values():
                self._check(value, limits, owner, name)

    def _plan(self, kind: type) -> _Plan:
        """The fields of a dataclass that have to be looked at, each with its range."""
        plan = self._plans.get(kind)
        if plan is None:
            assert is_dataclass(kind), kind
            hints = get_type_hints(kind, include_extras=True)
            named = ((one.name, hints[one.name]) for one in fields(kind))
            plan = tuple((name, _range(hint)) for name, hint in named if hint not in (bool, bytes))
            self._plans[kind] = plan
        return plan


def _range(hint: Any) -> Range | None:
    """The first range within a type."""
    if get_origin(hint) is None:
        return None
    for one in getattr(hint, "__metadata__", ()):
        if isinstance(one, Range):
            return one
    return next((found for one in get_args(hint) if (found := _range(one)) is not None), None)


def _outside(owner: object, name: str, value: object, why: str) -> BadMessage:
    return BadMessage(f"{name} = {value!r} of {type(owner).__name__} {why}")
