"""The devices that are up."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from tilework.control.cluster.device import Device
from tilework.core.graph.stage import DeviceKind
from tilework.core.work import Work


class DeviceSet:
    """The devices that are up: by id in `by_id`; accelerators in order of ids in `ordered`, and CPU slots in `slots`.

    All are read-only to callers. `widest` is the largest number of accelerators of one node that were up at the same
    time.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Device] = {}
        self.ordered: tuple[Device, ...] = ()
        self.slots: tuple[Device, ...] = ()
        self.widest = 0
        self._num_on_node: Counter[int] = Counter()

    @property
    def widest_now(self) -> int:
        """The largest number of accelerators of one node that are up."""
        return max(self._num_on_node.values(), default=0)

    def add(self, device: Device) -> None:
        device_id, kind, node = device.device_id, device.kind, device.node
        assert device_id not in self.by_id, f"device {device_id} has joined before"
        self.by_id[device_id] = device
        if kind is DeviceKind.CPU:
            self.slots = tuple(sorted((*self.slots, device), key=_id))
            return
        index = bisect_left(self.ordered, device_id, key=_id)
        self.ordered = (*self.ordered[:index], device, *self.ordered[index:])
        self._num_on_node[node] += 1
        self.widest = max(self.widest, self.widest_now)

    def remove(self, device_id: int) -> Device:
        device = self.by_id.pop(device_id)
        if device.kind is DeviceKind.CPU:
            self.slots = tuple(one for one in self.slots if one is not device)
            return device
        index = bisect_left(self.ordered, device_id, key=_id)
        self.ordered = self.ordered[:index] + self.ordered[index + 1 :]
        self._num_on_node[device.node] -= 1
        return device

    def carries(self, device_id: int, work: Work) -> bool:
        """Whether a device still has this work; a device that was lost and joined again does not have it."""
        return device_id in self.by_id and self.by_id[device_id].has(work)

    def is_carried(self, work: Work) -> bool:
        """Whether any device of a work still has it."""
        return any(self.carries(device_id, work) for device_id in work.devices)

    def end_ns(self, work: Work) -> int:
        """Predicted end of a work on the last of its devices; 0 if none of them has it."""
        return max(
            [self.by_id[device_id].end_ns(work) for device_id in work.devices if device_id in self.by_id], default=0
        )


def _id(device: Device) -> int:
    return device.device_id
