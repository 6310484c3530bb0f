"""Sources from which devices can load components: other devices, the memory of their node's host, the disk."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tilework.control.cluster.device import Device
from tilework.control.cluster.device_set import DeviceSet
from tilework.core.component import HOST_SOURCES, Component, LoadSource, Memory
from tilework.core.graph.stage import Stage
from tilework.core.request import Bounded
from tilework.core.weights import WeightCosts

_FROM_HOST = frozenset({LoadSource.DISK, LoadSource.HOST})


@dataclass(frozen=True, slots=True)
class HostRead:
    """A read ahead of need by a host, until `end_ns` as predicted; the host forgets `forgets` first for it."""

    components: tuple[Component, ...]
    forgets: tuple[Component, ...]
    end_ns: int


class LoadSources:
    """Components that the host of each node has read, and the quickest source of a component for a device.

    A host keeps `WeightCosts.host_bytes` of what was read there, and forgets the least recently used components, unless
    the policy has named others. A load from its memory is a use. A component larger than that memory is never kept. One
    that is being read ahead of need counts as kept, after a wait. One that reads from the disk will make the host
    forget, before a load that is planned now may have begun, does not count any more.
    """

    def __init__(self, weights: WeightCosts, devices: DeviceSet) -> None:
        self._weights = weights
        self._devices = devices
        self._hosts: dict[int, Memory] = {}
        self._reads: dict[int, HostRead] = {}
        self.unreadable: set[Component] = set()
        self._known_ns: dict[int, Bounded[tuple[int, Stage], int]] = {}  # By node; dropped when its components change.

    def kept(self, node: int) -> tuple[Component, ...]:
        """Return the components in the memory of a node's host, the least recently used first."""
        host = self._hosts.get(node)
        return () if host is None else host.components

    def use(self, node: int, components: Iterable[Component], forgets: Sequence[Component] = ()) -> None:
        """Note that a device of the node has read these components, or is told to load them from its host's memory.

        If the host needs room, it forgets `forgets` first. It does not keep components that no pipeline needs any more.
        """
        host = self._hosts.get(node) or Memory(self._weights.host_bytes)
        known = self._weights.all
        self._hosts[node] = host.with_read([one for one in components if one in known], forgets)
        self.changed(node)

    def forget(self, gone: Collection[Component]) -> None:
        """Note that hosts drop these components, which no pipeline needs any more."""
        self._hosts = {node: host.without(gone) for node, host in self._hosts.items()}
        self.unreadable.difference_update(gone)
        self.changed()

    # Reads ahead of need.

    def may_read(self, node: int) -> bool:
        """Return whether a host may read now. Not where the disk is as quick: devices would wait for nothing."""
        is_quicker = self._weights.quickest_source(_FROM_HOST) is not LoadSource.DISK
        return is_quicker and node not in self._reads

    def begin_read(self, node: int, read: HostRead) -> None:
        self._reads[node] = read
        self.changed(node)

    def end_read(self, node: int, *, is_kept: bool) -> None:
        """End the read of a node; the host then has the components if it could keep them."""
        read = self._reads.pop(node)
        if is_kept:
            self.use(node, read.components, read.forgets)
        else:
            self.unreadable.update(one for one in read.components if one in self._weights.all)
            self.changed(node)

    def is_being_read(self, node: int, component: Component) -> bool:
        """Return whether the host of a node is reading this ahead of need."""
        read = self._reads.get(node)
        return read is not None and component in read.components

    def wait_ns(self, device: Device, wanted: Iterable[Component]) -> int:
        """Return how long a device, after its works, waits for its host to read the wanted components that it lacks."""
        read = self._reads.get(device.node)
        if read is None or all(one in device.memory.components or one not in read.components for one in wanted):
            return 0
        return max(0, read.end_ns - device.idle_ns)

    def changed(self, node: int | None = None) -> None:
        """Note a change of the components or loads of a node's devices; None: of any node, or of the time of loads."""
        if node is None:
            self._known_ns.clear()
        else:
            self._known_ns.pop(node, None)

    def of(self, component: Component, device: Device) -> LoadSource:
        """Return the quickest source that has a component now, or as soon as the host has read it."""
        available = {LoadSource.DISK}
        if self._will_be_kept(device.node, component) or self.is_being_read(device.node, component):
            available |= {LoadSource.PAGE_CACHE, LoadSource.HOST}
        peers = [one for one in self._devices.on_node(device.node) if one is not device]
        if any(component in peer.memory.components and not peer.lacks_something for peer in peers):
            available.add(LoadSource.PEER)
        return self._weights.quickest_source(frozenset(available))

    def _will_be_kept(self, node: int, component: Component) -> bool:
        """Return whether a host has a component, and still has it when all that is being read there has been read."""
        host = self._hosts.get(node)
        if host is None or component not in host.components:
            return False
        if host.total_bytes is None:
            return True
        for device in self._devices.on_node(node):
            for load in device.loads.values():
                if load.source is LoadSource.DISK and not load.is_there:
                    host = host.with_read(load.components, load.forgets)
        if (read := self._reads.get(node)) is not None:
            host = host.with_read(read.components, read.forgets)
        return component in host.components

    def may_forget(self, node: int, order: Iterable[Component]) -> tuple[Component, ...]:
        """Return those of these components, in order, that no device is about to load from the memory of its host."""
        loads = [load for device in self._devices.on_node(node) for load in device.loads.values() if not load.is_there]
        planned = {one for load in loads if load.source in HOST_SOURCES for one in load.components}
        return tuple(one for one in order if one not in planned)

    def load_ns(self, device_id: int, stage: Stage) -> int:
        """Return how long a device loads before it can run a stage.

        It loads the components that it lacks, from the quickest sources, and ends the loads of them that it has begun.
        """
        device = self._devices.by_id[device_id]
        known = self._known_ns.setdefault(device.node, Bounded())
        key = (device_id, stage)
        known_ns = known.get(key)
        wanted = self._weights.components(stage)
        if known_ns is None:
            have = device.memory.components
            lacking = [one for one in dict.fromkeys(wanted) if one not in have]
            known_ns = sum([self._weights.load_ns(one.num_bytes, self.of(one, device)) for one in lacking])
            known[key] = known_ns
        if device.loads:
            known_ns += device.ahead_ns(wanted)
        return known_ns + self.wait_ns(device, wanted) if self._reads else known_ns
