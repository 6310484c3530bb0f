"""The devices that are up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from tilework.control.cluster.device import Device, Now
from tilework.control.cluster.free_times import FreeTimes
from tilework.core.graph.stage import DeviceKind
from tilework.core.pools import Within, may_run
from tilework.core.work import Work


class DeviceSet:
    """The devices that are up, by id in `by_id`.

    Accelerators that get works are in `ordered`, by id, and CPU slots that get works in `slots`; the other devices are
    cordoned. All are read-only to callers. `free_times` are of the accelerators that get works.
    """

    def __init__(self, now: Now) -> None:
        self.by_id: dict[int, Device] = {}
        self.ordered: tuple[Device, ...] = ()
        self.slots: tuple[Device, ...] = ()
        self._by_node: dict[int, tuple[Device, ...]] = {}
        self._pools: dict[int, frozenset[int]] = {}  # The accelerators of each pool that are up.
        self._most: dict[int, frozenset[int]] = {}  # The largest set of them that was up at the same time.
        self._widest: dict[Within, int] = {}
        self.free_times = FreeTimes(now)
        self._other_times = FreeTimes(now)

    def on_node(self, node: int) -> Sequence[Device]:
        """Return the accelerators of a node that get works, in order of ids."""
        return self._by_node.get(node, ())

    def num_pools(self, within: Within) -> int:
        """Return how many pools among these have accelerators that are up."""
        return len(self._pools) if within is None else len(self.pools_within(within))

    def pools_within(self, within: Within) -> list[frozenset[int]]:
        """Return the accelerators that are up of each pool that is among these."""
        return _among(self._pools, within)

    def share(self, theirs: Within, ours: Within) -> float:
        """Return the share of the accelerators among `theirs` that are among `ours`, of those that are up."""
        if theirs == ours or ours is None:
            return 1.0
        up = [one.device_id for one in self.ordered if may_run(theirs, one.device_id)]
        return sum(may_run(ours, device_id) for device_id in up) / max(1, len(up))

    def widest_now(self, within: Within) -> int:
        """Return the largest number of accelerators of one pool, among these, that are up."""
        return max(map(len, self.pools_within(within)), default=0)

    def widest(self, within: Within) -> int:
        """Return the largest number of accelerators of one pool, among these, that were up at the same time."""
        widest = self._widest.get(within)
        if widest is None:
            widest = self._widest[within] = max(map(len, _among(self._most, within)), default=0)
        return widest

    def add(self, device: Device) -> None:
        device_id = device.device_id
        kind = device.kind
        assert device_id not in self.by_id, f"device {device_id} has joined before"
        self.by_id[device_id] = device
        if kind is DeviceKind.CPU:
            self.slots = tuple(sorted((*self.slots, device), key=_id))
            self._other_times.add(device)
            return
        self.free_times.add(device)
        index = bisect_left(self.ordered, device_id, key=_id)
        self.ordered = (*self.ordered[:index], device, *self.ordered[index:])
        self._by_node[device.node] = tuple(sorted((*self.on_node(device.node), device), key=_id))
        self._set_pool(device.pool, self._pools.get(device.pool, frozenset()) | {device_id})

    def remove(self, device_id: int) -> Device:
        device = self.by_id.pop(device_id)
        if device.is_cordoned:
            self._other_times.remove(device)
        else:
            self._take_out(device)
        return device

    def cordon(self, device_id: int) -> Device:
        """Note that a device gets no further works."""
        device = self.by_id[device_id]
        assert not device.is_cordoned, f"device {device_id} was cordoned before"
        self._take_out(device)
        self._other_times.add(device)
        device.is_cordoned = True
        return device

    def _take_out(self, device: Device) -> None:
        if device.kind is DeviceKind.CPU:
            self.slots = tuple(one for one in self.slots if one is not device)
            self._other_times.remove(device)
            return
        self.free_times.remove(device)
        index = bisect_left(self.ordered, device.device_id, key=_id)
        self.ordered = self.ordered[:index] + self.ordered[index + 1 :]
        self._by_node[device.node] = tuple(one for one in self.on_node(device.node) if one is not device)
        self._set_pool(device.pool, self._pools[device.pool] - {device.device_id})

    def regroup(self, pool_of: Callable[[Device], int], *, for_good: bool = True) -> None:
        """Sort the accelerators into pools again, if one belongs to another pool now.

        Unless `for_good`, what `widest` has found still counts.
        """
        if all(device.pool == pool_of(device) for device in self.ordered):
            return
        devices, self.ordered = self.ordered, ()
        self._pools.clear()
        if for_good:
            self._most.clear()
            self._widest.clear()
        for device in devices:
            device.pool = pool_of(device)
            self._set_pool(device.pool, self._pools.get(device.pool, frozenset()) | {device.device_id})
            self.ordered = (*self.ordered, device)

    def _set_pool(self, pool: int, ids: frozenset[int]) -> None:
        self._pools[pool] = ids
        if len(ids) > len(self._most.get(pool, ())):
            self._most[pool] = ids
            self._widest.clear()
        if not ids:
            del self._pools[pool]

    @property
    def num_changes(self) -> int:
        """Number that grows whenever works or loads of a device change, and whenever devices do."""
        return self.free_times.num_changes + self._other_times.num_changes

    @property
    def is_fixed(self) -> bool:
        """True if the times of free devices and of ends of works stay when nothing but the clock changes."""
        return self.free_times.is_fixed and self._other_times.is_fixed

    def carries(self, device_id: int, work: Work) -> bool:
        """Return whether a device still has this work; a device that was lost and joined again does not have it."""
        return device_id in self.by_id and self.by_id[device_id].has(work)

    def is_carried(self, work: Work) -> bool:
        """Return whether any device of a work still has it."""
        return any(self.carries(device_id, work) for device_id in work.devices)

    def end_ns(self, work: Work) -> int:
        """Return the predicted end of a work on the last of its devices; 0 if none of them has it."""
        return max(
            [self.by_id[device_id].end_ns(work) for device_id in work.devices if device_id in self.by_id], default=0
        )


def _among(pools: Mapping[int, frozenset[int]], within: Within) -> list[frozenset[int]]:
    """Return the pools among these devices. All devices of a pool are among them, or none."""
    return [ids for ids in pools.values() if within is None or not within.isdisjoint(ids)]


def _id(device: Device) -> int:
    return device.device_id
