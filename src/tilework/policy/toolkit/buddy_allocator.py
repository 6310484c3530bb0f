"""The choice of free devices for a group: a buddy allocator that prefers to leave a job where it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tilework.core.policy import DeviceView
from tilework.core.work import Group


class Allocator:
    """The free devices of some nodes.

    A block is *aligned* if it is a power of two of consecutive ids that begins at a multiple of its width: its buddy
    halves are blocks again, and two aligned blocks overlap only if one contains the other. Any subset of a node is a
    legal group; aligned ones are preferred because they leave wide blocks whole for wide groups.

    A *hole* is a free aligned block that no wider one contains. Holes are kept by width, and nodes by how many of their
    devices are free, so that a group is found without looking at other nodes than those of the preferred devices.

    Source: buddy allocation of GPU groups, DDiT §5; placement preservation, TetriServe §4.2.3.
    """

    def __init__(self, nodes: Iterable[Sequence[int]]) -> None:
        """`nodes`: the free devices of each node."""
        self._free: list[set[int]] = [set(devices) for devices in nodes]
        self._room = {device_id: index for index, free in enumerate(self._free) for device_id in free}
        self._num_free = len(self._room)
        self._holes, self._nodes = _Shelves(), _Shelves()  # Named by their lowest devices.
        self._names: list[list[int]] = [[] for _ in self._free]  # The holes of each node as of the last `_tidy`.
        self._changed = set(range(len(self._free)))

    def num_free(self) -> int:
        return self._num_free

    def widest(self) -> int:
        """Return the most free devices of a node."""
        self._tidy()
        return self._nodes.highest()

    def take(self, width: int, preferred: Group = ()) -> Group | None:
        """Take `width` free devices of one node; None if no node has that many.

        The choice, in this order: the preferred group itself, where it has this width and is free; the aligned block
        with the most preferred devices, among equals the one in the smallest hole, then the lowest; without a
        free aligned block, the subset with the most preferred devices, of the node with the fewest free ones.
        """
        assert width > 0, "a group has at least one device"
        group = self._whole(width, preferred) or self._aligned(width, preferred) or self._subset(width, preferred)
        if group is not None:
            self._remove(group)
        return group

    def num_free_of(self, node: Sequence[int]) -> int:
        """Return how many of these devices are free."""
        return sum([device_id in self._free_beside(device_id) for device_id in node])

    def take_some(self, node: Sequence[int], most: int) -> None:
        """Take free devices among these, the lowest first, `most` at most."""
        self._remove([device_id for device_id in node if device_id in self._free_beside(device_id)][:most])

    def give(self, group: Group) -> None:
        """Make the devices of a group free again."""
        index = self._room[group[0]]
        self._free[index].update(group)
        self._num_free += len(group)
        self._changed.add(index)

    def exchange(self, group: Group, width: int, preferred: Group) -> Group | None:
        """Give a group back for one of another width; None if no node has room for that, and the group stays taken."""
        self.give(group)
        other = self.take(width, preferred)
        if other is None:
            self._remove(group)
        return other

    def _remove(self, devices: Sequence[int]) -> None:
        for device_id in devices:
            index = self._room[device_id]
            self._free[index].remove(device_id)
            self._changed.add(index)
        self._num_free -= len(devices)

    def _free_beside(self, device_id: int) -> set[int]:
        """Return the free devices of its node."""
        index = self._room.get(device_id)
        return set() if index is None else self._free[index]

    def _tidy(self) -> None:
        """Sort the nodes that have changed, and their holes, onto their shelves."""
        for index in self._changed:
            free = self._free[index]
            names = self._names[index]
            for name in names:
                self._holes.remove(name)
            if names:
                self._nodes.remove(names[0])
            self._names[index] = names = []
            end = -1  # The end of the latest hole.
            for device_id in sorted(free):
                if device_id >= end:
                    width = _buddy_width(free, device_id, 1)
                    end = device_id + width
                    names.append(device_id)
                    self._holes.put(device_id, width)
            if names:
                self._nodes.put(names[0], len(free))
        self._changed.clear()

    def _whole(self, width: int, preferred: Group) -> Group | None:
        is_free = len(preferred) == width and self._free_beside(preferred[0]).issuperset(preferred)
        return preferred if is_free else None

    def _aligned(self, width: int, preferred: Group) -> Group | None:
        if width & (width - 1):
            return None
        best: tuple[int, int, int] | None = None
        for first in {device_id - device_id % width for device_id in preferred}:
            free = self._free_beside(first)
            if _is_free(free, first, width):
                overlap = sum(first <= device_id < first + width for device_id in preferred)
                key = (-overlap, _buddy_width(free, first, width), first)
                best = key if best is None else min(best, key)
        if best is not None:
            return tuple(range(best[2], best[2] + width))
        self._tidy()
        lowest = self._holes.lowest(width)
        return None if lowest is None else tuple(range(lowest, lowest + width))

    def _subset(self, width: int, preferred: Group) -> Group | None:
        self._tidy()
        if (lowest := self._nodes.lowest(width)) is None:
            return None
        wanted = set(preferred)
        rooms = [
            free
            for device_id in preferred
            if device_id in (free := self._free_beside(device_id)) and len(free) >= width
        ]
        rooms = rooms or [self._free_beside(lowest)]
        room = min(rooms, key=lambda free: (-min(width, len(wanted & free)), len(free), min(free)))
        chosen = sorted(
            room, key=lambda device_id: (device_id not in wanted, _buddy_width(room, device_id, 1), device_id)
        )[:width]
        return tuple(sorted(chosen))


@dataclass(slots=True)
class _Shelves:
    """Names, each a number, on numbered shelves.

    Each shelf is a heap; a removed name stays in it until it comes to the top.
    """

    _shelf_of: dict[int, int] = field(default_factory=dict)
    _heaps: dict[int, list[int]] = field(default_factory=dict)

    def put(self, name: int, shelf: int) -> None:
        self._shelf_of[name] = shelf
        heappush(self._heaps.setdefault(shelf, []), name)

    def remove(self, name: int) -> None:
        del self._shelf_of[name]

    def lowest(self, least: int) -> int | None:
        """Return the lowest name on the first shelf, from this one on, that is not empty."""
        return next((heap[0] for shelf in sorted(self._heaps) if shelf >= least and (heap := self._heap(shelf))), None)

    def highest(self) -> int:
        """Return the last shelf that is not empty; 0 if all are."""
        return max((shelf for shelf in self._heaps if self._heap(shelf)), default=0)

    def _heap(self, shelf: int) -> list[int]:
        heap = self._heaps[shelf]
        while heap and self._shelf_of.get(heap[0]) != shelf:
            heappop(heap)
        return heap


def _is_free(free: set[int], first: int, width: int) -> bool:
    for device_id in range(first, first + width):  # noqa: SIM110 (A generator takes twice as long.)
        if device_id not in free:
            return False
    return True


def _buddy_width(free: set[int], first: int, width: int) -> int:
    """Return the width of the hole around a free aligned block."""
    while _is_free(free, first - first % (2 * width), 2 * width):
        width *= 2
        first -= first % width
    return width


def nodes(devices: Iterable[DeviceView]) -> list[list[int]]:
    """Return the ids of devices by pool, in which groups lie: by node, where all devices serve the same pipelines."""
    by_pool: dict[int, list[int]] = {}
    for device in devices:
        by_pool.setdefault(device.pool, []).append(device.device_id)
    return list(by_pool.values())
