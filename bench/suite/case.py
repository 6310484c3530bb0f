"""What a case is and what it finds out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from suite.stats import Interval

Note = Callable[[str], None]
"""Tells a person how far a case is."""


class CaseFailed(RuntimeError):
    """A case could not be measured at all; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One number with a goal: `low` <= measured <= `high`, in `unit`."""

    what: str
    measured: Interval
    high: float = float("inf")
    low: float = float("-inf")
    unit: str = ""

    @property
    def passed(self) -> bool:
        return self.low <= self.measured.value <= self.high

    @property
    def sure(self) -> bool:
        """Whether the whole interval lies on the same side of the goal as the number itself."""
        inside = [self.low <= end <= self.high for end in (self.measured.low, self.measured.high)]
        return all(inside) if self.passed else not any(inside)

    @property
    def goal(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        if self.low == float("-inf"):
            return f"≤ {self.high:g}{unit}"
        return f"≥ {self.low:g}{unit}" if self.high == float("inf") else f"{self.low:g} to {self.high:g}{unit}"

    @property
    def verdict(self) -> str:
        return ("pass" if self.passed else "miss") + ("" if self.sure else ", but the interval crosses the goal")

    def to_json(self) -> dict[str, Any]:
        measured = asdict(self.measured)
        return {"what": self.what, "goal": self.goal, "measured": measured, "unit": self.unit, "verdict": self.verdict}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Numbers beside the checks; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A PNG that is written beside the result, under the result's name with `name` behind it."""

    name: str
    png: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a case found. `method` says what is included and how it was measured, one sentence per entry."""

    checks: tuple[Check, ...]
    method: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


class Case(Protocol):
    """A theme. Its attributes are its resolved configuration; `quick` makes a short, rough one."""

    @classmethod
    def make(cls, quick: bool) -> Case: ...
    def measure(self, note: Note) -> Finding:
        """Raises CaseFailed."""


class Maker(Protocol):
    """Makes a case: its class, or what stands for it with settings."""

    def make(self, quick: bool) -> Case: ...
