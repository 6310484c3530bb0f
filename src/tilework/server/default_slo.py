"""Deadlines of requests that give none: a time, or a multiple of the time that the request takes alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator

WANTED = 'a time such as "30s" or "800ms", a multiple of the time that a request takes alone such as "3x", or "none"'
_TEXT = re.compile(r"(\d+(?:\.\d+)?)(ms|s|x)")


@dataclass(frozen=True, slots=True)
class DefaultSlo:
    """A default deadline: `seconds`, or `times` the time that a request takes alone; with neither, none."""

    seconds: float | None = None
    times: float | None = None

    @classmethod
    def parse(cls, text: str) -> DefaultSlo:
        """Read "30s", "800ms", "3x" or "none". Raises ValueError, which says what to give."""
        if text == "none":
            return cls()
        match = _TEXT.fullmatch(text)
        if match is None or not float(match[1]):
            raise ValueError(f"give {WANTED}")
        number, unit = float(match[1]), match[2]
        return cls(times=number) if unit == "x" else cls(seconds=number / 1000 if unit == "ms" else number)

    def __str__(self) -> str:
        if self.times is not None:
            return f"{self.times:g}x"
        return "none" if self.seconds is None else f"{self.seconds:g}s"

    def slo_s(self, alone_s: float | None) -> float | None:
        """Return the deadline of a request that takes `alone_s` alone; None if there is none, or that is unknown."""
        if self.times is None:
            return self.seconds
        return None if alone_s is None else self.times * alone_s


def _checked(value: Any) -> Any:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"give {WANTED}")
    return None if value is None else DefaultSlo.parse(value)


DefaultSloField = Annotated[Any, AfterValidator(_checked)]
"""A field of a file or a body: a text, which becomes a `DefaultSlo`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultSlos:
    """The defaults that may hold for a request of some tenant and model: the first that is set, in this order, does."""

    tenant: DefaultSlo | None = None
    classes: Mapping[str, DefaultSlo] = field(default_factory=dict)
    model: DefaultSlo | None = None
    server: DefaultSlo | None = None

    def of(self, priority: str) -> tuple[DefaultSlo, str] | None:
        """Return the default for a class, and its source: "tenant", "class", "model" or "server"."""
        found = {"tenant": self.tenant, "class": self.classes.get(priority), "model": self.model, "server": self.server}
        return next(((slo, source) for source, slo in found.items() if slo is not None), None)
