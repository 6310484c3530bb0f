"""List scheduling: blocks of device x time are placed one after another on the devices that are free first."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from tilework.core.block import Demand

FreeTimes = list[int]
"""Times at which the devices of a node are free, ascending."""


def first_slot(free_ns: Sequence[int], width: int, ready_ns: int) -> tuple[int, int]:
    """Return the start of a block, and the end of the slice of devices that it takes: this package's placement rule.

    `free_ns` are the times at which the devices of one node are free, ascending. The block begins when `width` of them
    are free, not before `ready_ns`. Of the devices that are free by then it takes those that became free last, which
    are `[stop - width : stop]`, and leaves the others to the next blocks.

    Predictions and reservations use the same rule. A reservation may not use a device beyond the time until which later
    reservations can spare it: `reservation_timeline.choose_group` leaves out such devices and calls this again.
    """
    start_ns = max(free_ns[width - 1], ready_ns)
    return start_ns, bisect_right(free_ns, start_ns)


def place(free_ns: FreeTimes, block: Demand, ready_ns: int = 0) -> int:
    """Let a block take its devices; returns its end. A block wider than the node takes all of it.

    The rule of `first_slot` is written out here: an answer to one request may take thousands of calls. CPU slots count
    as always free.
    """
    width = block.width
    if width > 1 and (block.before_ns or block.after_ns):
        return _place_shaped(free_ns, block, ready_ns)
    if width >= len(free_ns):
        end_ns = max(free_ns[-1], ready_ns) + block.run_ns
        free_ns[:] = [end_ns] * len(free_ns)
        return end_ns
    start_ns = max(free_ns[width - 1], ready_ns)
    stop = bisect_right(free_ns, start_ns)
    end_ns = start_ns + block.run_ns
    del free_ns[stop - width : stop]
    index = bisect_left(free_ns, end_ns)
    free_ns[index:index] = [end_ns] * width
    return end_ns


def end_of_next(free_ns: Sequence[int], block: Demand, ready_ns: int = 0) -> int:
    """Return the end that `place` would return; the devices stay as they are.

    `free_ns` may have the first `block.width` devices only.
    """
    width = min(block.width, len(free_ns))
    start_ns = max(free_ns[width - 1], ready_ns)
    if width > 1:
        start_ns = max(free_ns[width - 1] - block.before_ns, free_ns[0], ready_ns)
    return start_ns + block.run_ns


def _place_shaped(free_ns: FreeTimes, block: Demand, ready_ns: int) -> int:
    """Place a block as `place` does, if its first device is taken before and after the others."""
    width = min(block.width, len(free_ns))
    start_ns = max(free_ns[width - 1] - block.before_ns, free_ns[0], ready_ns)
    del free_ns[bisect_right(free_ns, start_ns) - 1]
    stop = bisect_right(free_ns, start_ns + block.before_ns)
    del free_ns[stop - width + 1 : stop]
    end_ns = start_ns + block.run_ns
    index = bisect_left(free_ns, end_ns - block.after_ns)
    free_ns[index:index] = [end_ns - block.after_ns] * (width - 1)
    insort(free_ns, end_ns)
    return end_ns
