"""Times at which devices are free, in order and in sum, kept up to date as their works change.

Theory of operation. A device without works is free now, and usually one with works is free at a time that stays until
its works change. These times are kept in a sorted list, with their sum; devices note their changes in a set that they
share, and only changed devices are looked at again. Two kinds of devices are asked each time, since their times move
with the clock: those whose running work is late, and those that load something.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from tilework.control.cluster.device import Device, Now


class _Taken(NamedTuple):
    """The predicted end of a device's running work, and the time at which it is free, as of its last change."""

    head_ns: int
    free_ns: int


class FreeTimes:
    """The times at which some devices are free."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self._num_changes = 0
        self._devices: dict[int, Device] = {}
        self._changed: dict[int, Device] = {}
        self._taken: dict[int, _Taken] = {}
        self._loading: dict[int, Device] = {}
        self._by_head: list[_Taken] = []  # These two are sorted, and have all of `_taken`.
        self._free_ns: list[int] = []
        self._sum_ns = 0

    def add(self, device: Device) -> None:
        """Include a device, which notes its changes here from now on."""
        self._devices[device.device_id] = device
        device.changed = self._changed
        device.note_change()

    def remove(self, device: Device) -> None:
        """Exclude a device from now on."""
        self._forget(device.device_id)
        self._changed.pop(device.device_id, None)
        del self._devices[device.device_id]
        self._num_changes += 1

    @property
    def num_changes(self) -> int:
        """Number that grows whenever works or loads of one of the devices change, and whenever devices do."""
        self._update()
        return self._num_changes

    @property
    def is_fixed(self) -> bool:
        """True if the times stay when nothing but the clock changes: no device is idle, late or loading."""
        self._update()
        return len(self._taken) == len(self._devices) and not self._num_late()

    def ascending(self) -> list[int]:
        """Return when the devices are free, ascending, in a new list."""
        self._update()
        now_ns = self._now.ns
        free_ns = self._free_ns.copy()
        for late in self._late():
            del free_ns[bisect_left(free_ns, late.free_ns)]
            insort(free_ns, late.free_ns + now_ns - late.head_ns)
        for device in self._loading.values():
            insort(free_ns, device.free_ns)
        num_idle = len(self._devices) - len(self._taken) - len(self._loading)
        return [now_ns] * num_idle + free_ns

    def taken_ns(self) -> int:
        """Return how long the devices are still taken, all together."""
        self._update()
        now_ns = self._now.ns
        taken_ns = self._sum_ns - now_ns * len(self._taken)
        taken_ns += sum([now_ns - late.head_ns for late in self._late()])
        return taken_ns + sum([device.free_ns - now_ns for device in self._loading.values()])

    def _late(self) -> Iterable[_Taken]:
        return self._by_head[: self._num_late()]

    def _num_late(self) -> int:
        if not self._by_head or self._by_head[0].head_ns >= self._now.ns:  # False nearly always.
            return 0
        return bisect_left(self._by_head, self._now.ns, key=_head_ns)

    def _update(self) -> None:
        """Look again at the devices that have changed."""
        if not self._changed:
            return
        self._num_changes += 1
        for device_id, device in self._changed.items():
            self._forget(device_id)
            if device.loads:
                self._loading[device_id] = device
            elif device.works:
                self._take(device)
        self._changed.clear()

    def _take(self, device: Device) -> None:
        taken = self._taken[device.device_id] = _Taken(device.head_ns, device.head_ns + device.queued_ns)
        insort(self._by_head, taken)
        insort(self._free_ns, taken.free_ns)
        self._sum_ns += taken.free_ns

    def _forget(self, device_id: int) -> None:
        self._loading.pop(device_id, None)
        taken = self._taken.pop(device_id, None)
        if taken is not None:
            del self._by_head[bisect_left(self._by_head, taken)]
            del self._free_ns[bisect_left(self._free_ns, taken.free_ns)]
            self._sum_ns -= taken.free_ns


def _head_ns(taken: _Taken) -> int:
    return taken.head_ns
