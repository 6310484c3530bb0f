"""The margin by which reserved work must end before its deadline; `admission.reservations` says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilework.core.interfaces import Block
from tilework.core.time import NS_PER_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """The margin before a deadline: a fixed part, and a share of the time until then."""

    fixed_ns: int
    percent: int

    def due_ns(self, end_ns: int, now_ns: int) -> int:
        """The earliest deadline of a block that ends at `end_ns`."""
        return end_ns + self.fixed_ns - (-self.percent * (end_ns - now_ns)) // 100

    def latest_ns(self, due_ns: int, now_ns: int) -> int:
        """The latest end of a block with this deadline."""
        return now_ns + (due_ns - self.fixed_ns - now_ns) * 100 // (100 + self.percent)

    def latest_all_ns(self, blocks: Sequence[Block], now_ns: int) -> list[int]:
        """`latest_ns` of each block, at once: there may be thousands."""
        begin_ns, share = now_ns + self.fixed_ns, 100 + self.percent
        return [now_ns + (block.due_ns - begin_ns) * 100 // share for block in blocks]


ADMISSION_MARGIN = Margin(fixed_ns=80 * NS_PER_MS, percent=6)
GUARD_MARGIN = Margin(fixed_ns=40 * NS_PER_MS, percent=3)
