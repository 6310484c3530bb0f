"""Time is integer nanoseconds inside, seconds at the edges (files, HTTP, command line)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NEVER_NS = 1 << 62
"""Later than any time. Sums with real times stay integers of one machine word."""


def ns_from_s(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def s_from_ns(nanoseconds: int) -> float:
    return nanoseconds / NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """Time by which reserved work must end before its deadline: a fixed part, and a share of the time until then."""

    fixed_ns: int
    permille: int

    def due_ns(self, end_ns: int, now_ns: int) -> int:
        """Return the earliest deadline of a block that ends at `end_ns`."""
        return end_ns + self.fixed_ns - (-self.permille * (end_ns - now_ns)) // 1000

    def latest_ns(self, due_ns: int, now_ns: int) -> int:
        """Return the latest end of a block with this deadline."""
        return now_ns + (due_ns - self.fixed_ns - now_ns) * 1000 // (1000 + self.permille)

    def latest_all_ns(self, dues_ns: Iterable[int], now_ns: int) -> list[int]:
        """Return `latest_ns` of each deadline, at once: there may be thousands."""
        begin_ns = now_ns + self.fixed_ns
        share = 1000 + self.permille
        return [now_ns + (due_ns - begin_ns) * 1000 // share for due_ns in dues_ns]


class Margins(NamedTuple):
    """The margin that a new promise needs, and the smaller margin that the guard keeps."""

    admission: Margin
    guard: Margin


START_MARGINS = Margins(
    admission=Margin(fixed_ns=80 * NS_PER_MS, permille=60), guard=Margin(fixed_ns=40 * NS_PER_MS, permille=30)
)
"""Margins of a server that has seen too few works to derive its own."""
