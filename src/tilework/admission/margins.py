"""The margins of promises, learned from the lateness of works.

Theory of operation. A reservation ends later than predicted by the overruns of works in the chain before and in it, one
after another on one device, or on the devices of groups that ran there. Over any chain the sum of overruns should be at
most a fixed time plus a share of the predicted time of its works, as traffic is bounded in network calculus (Cruz, A
Calculus for Network Delay, 1991). The fixed part covers single late works, the share works that are a little late each.

For one share, the fixed part that would have been enough is the highest level of a leaky bucket: each work adds its
overrun, and removes the share of its predicted time. A work on a group begins with the fullest bucket of its devices.
So each device has a bucket for each share of a ladder. Of the pairs that would have been enough lately, the margin of
the guard is the one that is smallest for a deadline `_TYPICAL_NS` from now. That of admission is twice as large: the
starts of other jobs that the guard allows may take the difference.

*Memory.* Levels count for at least `_MEMORY` works, and for twice as many at most. A margin grows at once, and shrinks
only where a memory begins. Before `_FEW` works were seen, no margin is below `START_MARGINS`.

*Limits.* The least margins cover what no work shows: the resolution of clocks and messages. An overrun counts for at
most `_MOST_AT_ONCE_NS` plus the largest share: a larger one is a fault like the loss of a device (a machine that was
suspended), and a margin that covers it would refuse nearly all promises. For the same reason no margin is larger than
the ends of the ladders.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tilework.core.time import NS_PER_MS, NS_PER_S, START_MARGINS, Margin, Margins

_FIXED_NS = tuple(ms * NS_PER_MS for ms in (5, 7, 10, 15, 20, 30, 40, 60, 80, 120, 160, 240, 320))
_PERMILLES = (5, 7, 10, 15, 20, 30, 40, 60, 80, 120)
_MOST_AT_ONCE_NS = 160 * NS_PER_MS
_MEMORY = 1000
_FEW = 300
_TYPICAL_NS = 4 * NS_PER_S


class MarginEstimator:
    """Learns margins from works that end. When they change, `margins` is a new object."""

    def __init__(self) -> None:
        self.margins = START_MARGINS
        self._levels_ns: dict[int, Sequence[int]] = {}  # Of the buckets of a device, in the order of `_PERMILLES`.
        self._highest_ns = self._before_ns = (0,) * len(_PERMILLES)  # Of this memory and of the one before.
        self._num_works = 0
        self._is_new = True

    def learn(self, devices: Sequence[int], overrun_ns: int, predicted_ns: int) -> None:
        """Learn from a work that took `predicted_ns` plus `overrun_ns`, which is less than 0 if it was early."""
        overrun_ns = min(overrun_ns, _MOST_AT_ONCE_NS + predicted_ns * _PERMILLES[-1] // 1000)
        buckets = [self._levels_ns[one] for one in devices if one in self._levels_ns]
        fullest_ns = [max(levels_ns) for levels_ns in zip(*buckets, strict=True)] or [0] * len(_PERMILLES)
        levels_ns = [
            min(max(0, level_ns + overrun_ns - predicted_ns * permille // 1000), _FIXED_NS[-1] + 1)
            for level_ns, permille in zip(fullest_ns, _PERMILLES, strict=True)
        ]
        for device_id in devices:
            if levels_ns[0]:
                self._levels_ns[device_id] = levels_ns
            else:
                self._levels_ns.pop(device_id, None)
        self._highest_ns = tuple(map(max, self._highest_ns, levels_ns))
        self._num_works += 1
        if self._num_works == (_FEW if self._is_new else _MEMORY):
            self._begin_memory()
        elif self._level_ns(self.margins.guard.permille) > self.margins.guard.fixed_ns:
            self._choose()

    def _begin_memory(self) -> None:
        self._num_works = 0
        self._is_new = False
        self._before_ns, self._highest_ns = self._highest_ns, (0,) * len(_PERMILLES)
        self._choose()

    def _level_ns(self, permille: int) -> int:
        """Return the fixed part that would have been enough lately beside this share."""
        index = _PERMILLES.index(permille)
        return max(self._highest_ns[index], self._before_ns[index])

    def _choose(self) -> None:
        enough = [
            Margin(fixed_ns=_FIXED_NS[bisect_left(_FIXED_NS, self._level_ns(permille))], permille=permille)
            for permille in _PERMILLES
            if self._level_ns(permille) <= _FIXED_NS[-1]
        ]
        largest = Margin(fixed_ns=_FIXED_NS[-1], permille=_PERMILLES[-1])
        guard = min(enough, key=lambda one: one.due_ns(_TYPICAL_NS, 0), default=largest)
        if self._is_new:
            start = START_MARGINS.guard
            guard = Margin(fixed_ns=max(guard.fixed_ns, start.fixed_ns), permille=max(guard.permille, start.permille))
        if guard != self.margins.guard:
            admission = Margin(fixed_ns=2 * guard.fixed_ns, permille=2 * guard.permille)
            self.margins = Margins(admission, guard)
