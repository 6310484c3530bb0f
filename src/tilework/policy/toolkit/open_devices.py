"""Devices that may be given a work now, one by one or in lanes, and when the next one opens.

A device has at most one running and one queued work, so that it never waits for the controller, and a more urgent job
waits for two chunks at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tilework.core.interfaces import ClusterView, DeviceView
from tilework.core.time import NS_PER_MS
from tilework.core.work import Group
from tilework.policy.toolkit.buddy_allocator import Allocator, nodes

WORKS_PER_DEVICE = 2
LEAD_NS = 10 * NS_PER_MS


def has_room(device: DeviceView) -> bool:
    """Whether one more work may be queued on a device."""
    return len(device.works) < WORKS_PER_DEVICE


def is_open(device: DeviceView, now_ns: int, lead_ns: int = LEAD_NS) -> bool:
    """Whether a device is idle, or will be within `lead_ns`: it gets its next work now, so that no bubble opens.

    At most one work may be in flight: with an encode, a chunk and a decode, three more are sent ahead.
    """
    return device.free_ns <= now_ns + lead_ns and has_room(device)


def next_open_ns(devices: Iterable[DeviceView], now_ns: int) -> int | None:
    """When the next device opens, unless it is by an event."""
    opens_ns = [device.free_ns - LEAD_NS for device in devices if len(device.works) == 1]
    return min((at_ns for at_ns in opens_ns if at_ns > now_ns), default=None)


@dataclass(frozen=True, slots=True)
class Lane:
    """Devices of one node that serve one job at a time: steps on all of them, encode and decode on the first.

    No device is in two lanes.
    """

    devices: tuple[DeviceView, ...]
    ids: Group = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple([device.device_id for device in self.devices]))

    @property
    def num_works(self) -> int:
        if len(self.devices) == 1:
            return len(self.devices[0].works)
        return max([len(device.works) for device in self.devices])

    @property
    def free_ns(self) -> int:
        if len(self.devices) == 1:
            return self.devices[0].free_ns
        return max([device.free_ns for device in self.devices])


def open_lanes(view: ClusterView, groups: Iterable[Group]) -> list[Lane]:
    """The lanes of these groups that have room; under load most have none."""
    open_devices = {device.device_id: device for device in view.devices if has_room(device)}
    return [
        Lane(tuple([open_devices[device_id] for device_id in group]))
        for group in groups
        if all(device_id in open_devices for device_id in group)
    ]


@dataclass(slots=True)
class LaneDivision:
    """All devices divided into lanes of `degree`; they are divided again only when devices join or are lost.

    The remaining devices of a node are divided into narrower lanes.
    """

    degree: int = 1
    _devices: Sequence[DeviceView] | None = field(default=None, init=False)
    _lanes: Sequence[Lane] = field(default=(), init=False)

    def is_of(self, devices: Sequence[DeviceView]) -> bool:
        """Whether the latest division is of these devices."""
        return self._devices is devices

    def lanes(self, devices: Sequence[DeviceView]) -> Sequence[Lane]:
        if self._devices is not devices:
            self._devices, self._lanes = devices, _divided(devices, self.degree)
        return self._lanes


def _divided(devices: Sequence[DeviceView], degree: int) -> list[Lane]:
    """The devices of each node in groups of `degree`, aligned ones first; then of half of that, and so on."""
    if degree == 1:
        return [Lane((device,)) for device in devices]
    by_id, lanes = {device.device_id: device for device in devices}, []
    for node in nodes(devices):
        allocator, width = Allocator([node]), degree
        while width:
            while group := allocator.take(width):
                lanes.append(Lane(tuple([by_id[device_id] for device_id in group])))
            width //= 2
    return lanes
