"""The devices of a layout at one time: which are open, and which group of a pool is free first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tilework.core.policy import DeviceView
from tilework.core.work import Group
from tilework.policy.placement.roles import PlacementType
from tilework.policy.published.tridentserve.layout import Pool, PoolLayout
from tilework.policy.toolkit.buddy_allocator import Allocator
from tilework.policy.toolkit.open_devices import OpenDevices


@dataclass(slots=True)
class DeviceAllocator:
    """Open devices are given out by pool, each once. `closed` ones, as during a downtime, are not given out.

    Groups for auxiliary stages need not be open: a stage is queued on those that are free first. A device that a
    request keeps for its steps is not among them (`keep`).
    """

    up: OpenDevices
    layout: PoolLayout
    closed: Collection[int] = ()
    _queued_ns: dict[int, int] = field(
        init=False, default_factory=dict
    )  # Times at which devices that got a stage are free.
    _open: dict[Pool, Allocator] = field(init=False)
    _kept: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        found: dict[Pool, dict[int, list[int]]] = {}
        for device in self.up.open():
            pool = self.layout.pool_of(device.device_id)
            if pool is not None and device.device_id not in self.closed:
                found.setdefault(pool, {}).setdefault(device.pool, []).append(device.device_id)
        self._open = {pool: Allocator(rows.values()) for pool, rows in found.items()}

    def _free_ns(self, device_id: int) -> int:
        queued_ns = self._queued_ns.get(device_id)
        return self.up.by_id[device_id].free_ns if queued_ns is None else queued_ns

    @property
    def is_full(self) -> bool:
        """True if no device is open."""
        return not any(allocator.num_free() for allocator in self._open.values())

    def room(self) -> Mapping[Pool, int]:
        """Return the number of open devices of primaries, by pool, most roles first: the fewest requests fit there."""
        pools = [pool for pool, one in self._open.items() if pool.kind.is_primary and one.num_free()]
        pools.sort(key=lambda pool: (pool.part, tuple(PlacementType).index(pool.kind)))
        return {pool: self._open[pool].num_free() for pool in pools}

    def widest(self) -> Mapping[Pool, int]:
        """Return the most open devices that a pool has on one node."""
        return {pool: one.widest() for pool, one in self._open.items()}

    def take(self, pool: Pool, width: int, preferred: Group = ()) -> Group | None:
        """Take open devices of one node; None if no node has enough."""
        allocator = self._open.get(pool)
        return None if allocator is None else allocator.take(width, preferred)

    def take_whole(self, group: Group) -> bool:
        """Take these devices if all are open."""
        if any(not self._has(device_id) for device_id in group):
            return False
        self.take_some(group, len(group))
        return True

    def take_some(self, devices: Sequence[int], most: int) -> None:
        """Take open devices among these, `most` at most."""
        for device_id in [one for one in devices if self._has(one)][:most]:
            self._allocator(device_id).take_some((device_id,), 1)

    def num_open(self, devices: Sequence[int]) -> int:
        return sum(self._has(device_id) for device_id in devices)

    def give(self, group: Group) -> None:
        """Make devices of one pool open again."""
        self._allocator(group[0]).give(group)

    def keep(self, group: Group) -> None:
        """Note that a request keeps these devices until its steps are done."""
        self._kept.update(group)

    def earliest(self, pool: Pool, width: int, is_kept: Callable[[DeviceView], bool]) -> Group | None:
        """Return the devices of one node that are all free first; None if no node has enough that are not kept.

        `is_kept` says of a device that was not noted whether a request keeps it.
        """
        best: tuple[int, Group] | None = None
        for row in self.layout.nodes(pool):
            up = [one for one in row if one in self.up.by_id and one not in self.closed and one not in self._kept]
            usable = sorted((self._free_ns(one), one) for one in up if not is_kept(self.up.by_id[one]))
            if len(usable) >= width:
                found = usable[width - 1][0], tuple(sorted(one for _, one in usable[:width]))
                best = found if best is None else min(best, found)
        return None if best is None else best[1]

    def queue(self, group: Group, ready_ns: int, run_ns: int) -> int:
        """Note a stage that runs on these devices when they are free, and not before `ready_ns`; returns its end."""
        begin_ns = max([ready_ns, *map(self._free_ns, group)])
        self._queued_ns.update(dict.fromkeys(group, begin_ns + run_ns))
        return begin_ns + run_ns

    def _allocator(self, device_id: int) -> Allocator:
        pool = self.layout.pool_of(device_id)
        assert pool is not None, f"device {device_id} has no pool"
        return self._open[pool]

    def _has(self, device_id: int) -> bool:
        """Return whether a device is open and was not taken."""
        pool = self.layout.pool_of(device_id)
        return pool is not None and pool in self._open and self._open[pool].num_free_of((device_id,)) == 1
