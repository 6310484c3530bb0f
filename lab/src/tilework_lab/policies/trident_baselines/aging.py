"""Shortest remaining time first, with aging."""

from __future__ import annotations

SCALES = 4
"""S: how many priorities late requests go through. Our number; the paper's is missing in our text."""


def priority(end_ns: int, due_ns: int, best_ns: int) -> int:
    """The priority of a request that would end at `end_ns` if it began now; a smaller one is served first.

    0 if that is in time. Else the overtime is counted in whole times of `best_ns`, which the request takes at optimal
    degrees: max(1, S - overtime), so that it rises as it waits, and 0 again from 2 S on.

    Source: TridentServe appendix D.2, "SRTF with aging"; its formulas are missing in our text. That a request rises to
    0 at last is ours: requests in time would pass it for ever.
    """
    if end_ns <= due_ns:
        return 0
    overtime = (end_ns - due_ns) // max(1, best_ns)
    return 0 if overtime >= 2 * SCALES else max(1, SCALES - overtime)
