"""The groups of a node that have communicators, with their ids."""

from __future__ import annotations

from collections import OrderedDict

from tilework.core.wire.commands import GroupRef
from tilework.core.work import Group

MAX_PER_WORKER = 32
MOST_CLOSING = 1024


class GroupTable:
    """Assigns ids to groups, and closes groups so that no worker holds more than `max_per_worker`.

    The least recently used group is closed, on all its members: if each member chose, one could wait in a group that
    another has closed. Ids are not reused.
    """

    def __init__(self, max_per_worker: int = MAX_PER_WORKER) -> None:
        self._max = max_per_worker
        self._refs: OrderedDict[Group, GroupRef] = OrderedDict()
        self._closing: OrderedDict[int, GroupRef] = OrderedDict()  # By id.
        self._next_id = 1

    def use(self, devices: Group, node_id: int | None = None) -> tuple[GroupRef, list[GroupRef]]:
        """Return the group of these devices, as a part of this node, and the groups to close before using it."""
        known = self._refs.get(devices)
        if known is not None and known.node_id == node_id:
            self._refs.move_to_end(devices)
            return known, []
        closed = [] if known is None else [self._refs.pop(devices)]
        oldest = [self._close_oldest(device_id) for device_id in devices if self._count(device_id) >= self._max]
        ref = self._refs[devices] = self.new_ref(devices, node_id)
        return ref, closed + [old for old in oldest if old is not None]

    def new_ref(self, devices: Group, node_id: int | None = None) -> GroupRef:
        """Return a new id for these devices, which `use` does not return."""
        self._next_id += 1
        return GroupRef(self._next_id - 1, devices, node_id)

    def close_parts(self, node_id: int) -> list[GroupRef]:
        """Remove the groups that are parts of a node; returns them. Works may still run in them, so they may be broken.

        The last MOST_CLOSING of them are remembered for that.
        """
        closed = [self._refs.pop(devices) for devices, ref in list(self._refs.items()) if ref.node_id == node_id]
        self._closing.update({ref.group_id: ref for ref in closed})
        while len(self._closing) > MOST_CLOSING:
            self._closing.popitem(last=False)
        return closed

    def forget_device(self, device_id: int) -> list[GroupRef]:
        """Remove the groups of a lost device, also those in which works may still run; returns them."""
        closing = [self._closing.pop(one.group_id) for one in list(self._closing.values()) if device_id in one.devices]
        return closing + [self._refs.pop(devices) for devices in list(self._refs) if device_id in devices]

    def forget(self, ref: GroupRef) -> bool:
        """Remove a group; returns whether it was known, or works may still run in it."""
        if self._closing.pop(ref.group_id, None) is not None:
            return True
        known = self._refs.get(ref.devices) == ref
        if known:
            del self._refs[ref.devices]
        return known

    def _count(self, device_id: int) -> int:
        return sum(device_id in devices for devices in self._refs)

    def _close_oldest(self, device_id: int) -> GroupRef | None:
        """Remove the least recently used group of a device; None if the device has room already."""
        if self._count(device_id) < self._max:
            return None
        return self._refs.pop(next(devices for devices in self._refs if device_id in devices))
