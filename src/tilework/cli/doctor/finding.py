"""What was found about one thing that a server needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """ERROR: a server with these options would not start, or not serve. WARNING: it serves with less than it could."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """`what` was looked at, what was `found`, and a `remedy`, which is empty if none is needed."""

    level: Level
    what: str
    found: str
    remedy: str = ""


def ok(what: str, found: str) -> Finding:
    return Finding(Level.OK, what, found)


def warning(what: str, found: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, what, found, remedy)


def error(what: str, found: str, remedy: str) -> Finding:
    return Finding(Level.ERROR, what, found, remedy)


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
