"""The GPU x time plane: when blocks end that take, one after another, the devices that are free first."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from tilework.core.interfaces import Ahead, Block, Demand

Levels = list[list[int]]
"""When the devices of each node are free, ascending."""


def place(levels: Levels, block: Demand, ready_ns: int = 0) -> int:
    """Let a block take `width` devices of one node; returns its end.

    It goes where it can begin first: when enough devices are free, not before `ready_ns`. It holds all of them to its
    end; one that is wider than a node takes all of it. Of the devices that are free by its beginning it takes those
    that became free last, so that the others are left to whoever comes next.
    """
    node = levels[0] if len(levels) == 1 else min(levels, key=lambda free_ns: _start_ns(free_ns, block.width))
    return _place_on(node, block.width, block.run_ns, ready_ns)


def _place_on(node: list[int], width: int, run_ns: int, ready_ns: int) -> int:
    """`place` on a given node. Thousands of calls may be behind one answer, so that each name and call counts."""
    if width >= len(node):
        end_ns = max(node[-1], ready_ns) + run_ns
        node[:] = [end_ns] * len(node)
        return end_ns
    start_ns = max(node[width - 1], ready_ns)
    end_ns = start_ns + run_ns
    stop = bisect_right(node, start_ns)
    del node[stop - width : stop]
    index = bisect_left(node, end_ns)
    node[index:index] = [end_ns] * width
    return end_ns


def _start_ns(free_ns: list[int], width: int) -> tuple[bool, int]:
    """Where a block begins in a node; nodes that are too narrow come last."""
    return width > len(free_ns), free_ns[min(width, len(free_ns)) - 1]


def levels_after(free_ns: Iterable[int], running: Iterable[Block], waiting: Ahead) -> Levels:
    """When devices, which are taken for one node, are free after the blocks ahead have been placed on them in order.

    `running` are the rests of jobs that have a device, `waiting` jobs that have none: those of which only the volume is
    known are poured over the devices like a fluid.
    """
    node = sorted(free_ns)
    for block in running:
        _place_on(node, block.demand.width, block.demand.run_ns, block.ready_ns)
    if waiting.volume_ns:
        node = _pour(node, waiting.volume_ns)
    for demand in waiting.demands:
        _place_on(node, demand.width, demand.run_ns, 0)
    return [node]


def _pour(free_ns: list[int], volume_ns: int) -> list[int]:
    """Level the devices' free times from below with `volume_ns` of work; `free_ns` is sorted, and so is the answer."""
    below_ns = volume_ns  # And all that comes before the devices that are poured on are free.
    for count, first_ns in enumerate(free_ns, start=1):
        below_ns += first_ns
        level_ns = below_ns // count
        if count == len(free_ns) or level_ns <= free_ns[count]:
            return [level_ns] * count + free_ns[count:]
    raise AssertionError("no device to pour work on")
