"""Which groups of a node can communicate, under which id."""

from __future__ import annotations

from collections import OrderedDict

from tilework.core.wire import GroupRef
from tilework.core.work import Group

MAX_PER_WORKER = 32


class GroupTable:
    """Gives ids to groups, and says which to close so that no worker holds more than `max_per_worker`.

    The least recently used one is closed, by all its members alike: if each member chose by itself, one could wait
    in a group that another has closed. Ids are never used again.
    """

    def __init__(self, max_per_worker: int = MAX_PER_WORKER) -> None:
        self._max = max_per_worker
        self._refs: OrderedDict[Group, GroupRef] = OrderedDict()
        self._next_id = 1

    def use(self, devices: Group) -> tuple[GroupRef, list[GroupRef]]:
        """The group of these devices, and the groups to close before it is used."""
        if devices in self._refs:
            self._refs.move_to_end(devices)
            return self._refs[devices], []
        closed = [self._close_oldest(device_id) for device_id in devices if self._count(device_id) >= self._max]
        ref = self._refs[devices] = self.unique(devices)
        return ref, [old for old in closed if old is not None]

    def unique(self, devices: Group) -> GroupRef:
        """A new group that `use` does not return."""
        self._next_id += 1
        return GroupRef(self._next_id - 1, devices)

    def break_with(self, device_id: int) -> list[GroupRef]:
        """Forget the groups of a lost device."""
        return [self._refs.pop(devices) for devices in list(self._refs) if device_id in devices]

    def break_off(self, ref: GroupRef) -> bool:
        """Forget one group; False if it was forgotten before."""
        known = self._refs.get(ref.devices) == ref
        if known:
            del self._refs[ref.devices]
        return known

    def _count(self, device_id: int) -> int:
        return sum(device_id in devices for devices in self._refs)

    def _close_oldest(self, device_id: int) -> GroupRef | None:
        """None if closing for another member has made room already."""
        if self._count(device_id) < self._max:
            return None
        return self._refs.pop(next(devices for devices in self._refs if device_id in devices))
