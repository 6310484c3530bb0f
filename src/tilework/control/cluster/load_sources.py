"""From where devices can load components: other devices, the memory of their node's host, the disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilework.control.cluster.device import Device
from tilework.control.cluster.device_set import DeviceSet
from tilework.core.component import Component, LoadSource, Memory
from tilework.core.graph.stage import Stage
from tilework.core.interfaces import CostModel


class LoadSources:
    """What the host of each node has read, and so the quickest source of each component for each device.

    A host keeps `CostModel.host_bytes` of what its devices have read, and forgets the least recently used of it, unless
    the policy has named others. A load from its memory is a use. What is larger than that is never kept.
    """

    def __init__(self, costs: CostModel, devices: DeviceSet) -> None:
        self._costs = costs
        self._devices = devices
        self._hosts: dict[int, Memory] = {}
        self._known_ns: dict[tuple[int, Stage], int] = {}  # Since what devices or hosts have changed last.

    def kept(self, node: int) -> tuple[Component, ...]:
        """What the host of a node has in memory, the least recently used first."""
        host = self._hosts.get(node)
        return () if host is None else host.components

    def use(self, node: int, components: Iterable[Component], forgets: Sequence[Component] = ()) -> None:
        """Note that a device of the node has read these components, or is told to load them from its host's memory.

        The host forgets `forgets` first, if it must.
        """
        host = self._hosts.get(node) or Memory(self._costs.host_bytes)
        self._hosts[node] = host.with_read(components, forgets)
        self.changed()

    def changed(self) -> None:
        """Note that the components of a device have changed."""
        self._known_ns.clear()

    def of(self, component: Component, device: Device) -> LoadSource:
        """The quickest source that has a component now."""
        available = {LoadSource.DISK}
        host = self._hosts.get(device.node)
        if host is not None and component in host.components:
            available |= {LoadSource.PAGE_CACHE, LoadSource.HOST}
        peers = [one for one in self._devices.ordered if one.node == device.node and one is not device]
        if any(component in peer.memory.components and not (peer.loads_ns or peer.is_loading) for peer in peers):
            available.add(LoadSource.PEER)
        return self._costs.quickest_source(frozenset(available))

    def load_ns(self, device: Device, stage: Stage) -> int:
        """How long the components of a stage that a device lacks take to load from the quickest sources."""
        key = device.device_id, stage
        known_ns = self._known_ns.get(key)
        if known_ns is None:
            have = device.memory.components
            lacking = [one for one in dict.fromkeys(self._costs.components(stage)) if one not in have]
            known_ns = sum([self._costs.load_ns(one.num_bytes, self.of(one, device)) for one in lacking])
            self._known_ns[key] = known_ns
        return known_ns
