"""Devices that may be given a work now, one by one or in lanes, and when the next one opens.

A device has at most one running and one queued work, so that it never waits for the controller, and a more urgent job
waits for two chunks at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import compress
from operator import attrgetter, ne

from tilework.core.policy import DeviceView
from tilework.core.time import NS_PER_MS

_num_changes = attrgetter("num_changes")
WORKS_PER_DEVICE = 2
LEAD_NS = 10 * NS_PER_MS


def has_room(device: DeviceView) -> bool:
    """Return whether one more work may be queued on a device."""
    return len(device.works) < WORKS_PER_DEVICE


def is_open(device: DeviceView, now_ns: int, lead_ns: int = LEAD_NS) -> bool:
    """Return whether a device is idle, or will be within `lead_ns`: it gets its next work now, so that no bubble opens.

    At most one work may be in flight: with an encode, a chunk and a decode, three more are sent ahead.
    """
    return device.free_ns <= now_ns + lead_ns and has_room(device)


def next_open_ns(devices: Iterable[DeviceView], now_ns: int) -> int | None:
    """Return when the next device opens, unless it is by an event."""
    opens_ns = [device.free_ns - LEAD_NS for device in devices if len(device.works) == 1]
    return min((at_ns for at_ns in opens_ns if at_ns > now_ns), default=None)


class DeviceChanges:
    """The devices that have changed since they were last asked for, by their counters (`DeviceView.num_changes`)."""

    __slots__ = ("_devices", "_num_changes")

    def __init__(self) -> None:
        self._devices: Sequence[DeviceView] | None = None
        self._num_changes: list[int] = []

    def are_of(self, devices: Sequence[DeviceView]) -> bool:
        """Return whether these devices were asked for last; after devices join or are lost it is another object."""
        return self._devices is devices

    def among(self, devices: Sequence[DeviceView]) -> Sequence[DeviceView]:
        """Return those of these devices that have changed since the latest call; all if others were asked for then."""
        before = self._num_changes if self._devices is devices else None
        self._devices = devices
        self._num_changes = list(map(_num_changes, devices))
        if before is None:
            return devices
        if self._num_changes == before:
            return ()
        return list(compress(devices, map(ne, before, self._num_changes)))


class OpenDevices:
    """The devices that are open, kept from plan to plan: those that have not changed are not looked at again.

    `by_id` are all devices that are up, `widest` is the most of them on a node, and `soon` are those whose works end
    within `LEAD_NS`, idle ones included.
    """

    def __init__(self) -> None:
        self.by_id: Mapping[int, DeviceView] = {}
        self.widest = 0
        self.soon: dict[int, DeviceView] = {}
        self._changes = DeviceChanges()
        self._with_one: list[tuple[int, int, int]] = []  # Devices with one work: when they open, id, `num_changes`.
        self._with_more: list[tuple[int, int, int]] = []  # Others that are taken: when to look at them again.

    def update(self, devices: Sequence[DeviceView], now_ns: int) -> None:
        """Look at the devices that have changed, and at those of which works end about now."""
        if not self._changes.are_of(devices):
            self.by_id = {device.device_id: device for device in devices}
            sizes: dict[int, int] = {}
            for device in devices:
                sizes[device.node] = sizes.get(device.node, 0) + 1
            self.widest = max(sizes.values(), default=0)
            self.soon = {}
            self._with_one = []
            self._with_more = []
        for device in self._changes.among(devices):
            self._look(device, now_ns)
        for heap in (self._with_one, self._with_more):
            while heap and heap[0][0] <= now_ns:
                _, device_id, num_changes = heappop(heap)
                if (device := self.by_id[device_id]).num_changes == num_changes:
                    self._look(device, now_ns)

    def _look(self, device: DeviceView, now_ns: int) -> None:
        device_id = device.device_id
        at_ns = device.free_ns - LEAD_NS
        if at_ns <= now_ns:
            self.soon[device_id] = device
            return
        self.soon.pop(device_id, None)
        heappush(self._with_one if len(device.works) == 1 else self._with_more, (at_ns, device_id, device.num_changes))

    @property
    def has_open(self) -> bool:
        """True if any device `is_open`."""
        return any(map(has_room, self.soon.values()))

    def open(self) -> list[DeviceView]:
        """Return the devices that are open, by id."""
        return [device for _, device in sorted(self.soon.items()) if has_room(device)]

    def next_open_ns(self) -> int | None:
        """Return when the next device opens, unless it is by an event."""
        heap = self._with_one
        while heap and self.by_id[heap[0][1]].num_changes != heap[0][2]:
            heappop(heap)
        return heap[0][0] if heap else None
