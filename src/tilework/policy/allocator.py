"""Choosing the GPUs of a group among those that are free: a buddy allocator that prefers to leave a job where it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilework.core.interfaces import GpuView
from tilework.core.work import Group


class Allocator:
    """The free GPUs of some nodes.

    A block is *aligned* if it is a power of two of consecutive ids that begins at a multiple of its width: its buddy
    halves are blocks again, and two aligned blocks overlap only if one contains the other. Any subset of a node is a
    legal group; aligned ones are preferred because they leave wide blocks whole for wide groups.

    Source: buddy allocation of GPU groups, DDiT §5; placement preservation, TetriServe §4.2.3.
    """

    def __init__(self, nodes: Iterable[Sequence[int]]) -> None:
        """`nodes`: the free GPUs of each node."""
        self._free: list[set[int]] = [set(gpus) for gpus in nodes]
        self._room = {gpu: index for index, free in enumerate(self._free) for gpu in free}

    def num_free(self) -> int:
        return sum(len(free) for free in self._free)

    def widest(self) -> int:
        """The most free GPUs of a node."""
        return max([len(free) for free in self._free], default=0)

    def take(self, width: int, preferred: Group = ()) -> Group | None:
        """Take `width` free GPUs of one node; None if no node has that many.

        The choice, in this order: the preferred group itself, where it has this width and is free; the aligned block
        with the most preferred GPUs, among equals the one in the smallest free block, then the lowest; without a
        free aligned block, the subset with the most preferred GPUs, of the node with the fewest free ones.
        """
        assert width > 0, "a group has at least one GPU"
        group = self._whole(width, preferred) or self._aligned(width, preferred) or self._subset(width, preferred)
        if group is not None:
            for free in self._free:
                free.difference_update(group)
        return group

    def num_free_of(self, node: Sequence[int]) -> int:
        """How many of these GPUs are free."""
        return sum(gpu in free for free in self._free for gpu in node)

    def take_some(self, node: Sequence[int], most: int) -> None:
        """Take free GPUs among these, the lowest first, `most` at most."""
        chosen = [gpu for gpu in node if any(gpu in free for free in self._free)][:most]
        for free in self._free:
            free.difference_update(chosen)

    def give(self, group: Group) -> None:
        """Take back what `take` gave."""
        self._free[self._room[group[0]]].update(group)

    def _whole(self, width: int, preferred: Group) -> Group | None:
        is_free = len(preferred) == width and any(free.issuperset(preferred) for free in self._free)
        return preferred if is_free else None

    def _aligned(self, width: int, preferred: Group) -> Group | None:
        if width & (width - 1):
            return None
        best: tuple[int, int, int] | None = None
        for free in self._free:
            for first in {gpu - gpu % width for gpu in free}:
                if _is_free(free, first, width):
                    overlap = sum(first <= gpu < first + width for gpu in preferred)
                    rank = (-overlap, _buddy_width(free, first, width), first)
                    best = rank if best is None else min(best, rank)
        return None if best is None else tuple(range(best[2], best[2] + width))

    def _subset(self, width: int, preferred: Group) -> Group | None:
        wanted = set(preferred)
        rooms = [free for free in self._free if len(free) >= width]
        if not rooms:
            return None
        room = min(rooms, key=lambda free: (-min(width, len(wanted & free)), len(free), min(free)))
        chosen = sorted(room, key=lambda gpu: (gpu not in wanted, _buddy_width(room, gpu, 1), gpu))[:width]
        return tuple(sorted(chosen))


def _is_free(free: set[int], first: int, width: int) -> bool:
    return all(gpu in free for gpu in range(first, first + width))


def _buddy_width(free: set[int], first: int, width: int) -> int:
    """Width of the largest free aligned block around an aligned free block."""
    while _is_free(free, first - first % (2 * width), 2 * width):
        width *= 2
        first -= first % width
    return width


def nodes(gpus: Iterable[GpuView]) -> list[list[int]]:
    """The ids of GPUs by node."""
    by_node: dict[int, list[int]] = {}
    for gpu in gpus:
        by_node.setdefault(gpu.node, []).append(gpu.gpu)
    return list(by_node.values())
