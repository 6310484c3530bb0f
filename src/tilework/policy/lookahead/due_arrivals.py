"""When requests that can be on time come to a node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

_WEIGHT = 0.1  # Of the latest gap in the mean.


@dataclass(slots=True)
class DueArrivals:
    """The latest arrival `last_ns`, and the mean time between two, in which later ones count more; inf before two."""

    last_ns: float = -inf
    gap_ns: float = inf

    def gap_at(self, now_ns: int) -> float:
        """The mean time between two, or the time since the latest if that is longer or there was only one."""
        since_ns = max(1.0, now_ns - self.last_ns)
        return since_ns if self.gap_ns == inf else max(self.gap_ns, since_ns)

    def add(self, arrivals_ns: Iterable[int]) -> None:
        """Count those that are later than the latest so far."""
        for at_ns in sorted(arrivals_ns):
            if at_ns > self.last_ns:
                gap_ns = at_ns - self.last_ns
                self.gap_ns = gap_ns if self.gap_ns == inf else (1 - _WEIGHT) * self.gap_ns + _WEIGHT * gap_ns
                self.last_ns = at_ns
