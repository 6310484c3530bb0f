"""Which devices a simulation has, and on which nodes: accelerators first, then CPU slots."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.stage import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Accelerators 0 to `num_devices` - 1 fill nodes in order; the CPU slots of each node have the ids after these."""

    num_devices: int
    devices_per_node: int
    slots_per_node: int = 0

    @property
    def ids(self) -> range:
        """All devices."""
        return range(self.num_devices + -(-self.num_devices // self.devices_per_node) * self.slots_per_node)

    def kind(self, device_id: int) -> DeviceKind:
        return DeviceKind.ACCELERATOR if device_id < self.num_devices else DeviceKind.CPU

    def node(self, device_id: int) -> int:
        if device_id < self.num_devices:
            return device_id // self.devices_per_node
        return (device_id - self.num_devices) // self.slots_per_node

    def beside(self, device_id: int) -> list[int]:
        """All devices of the node of this one."""
        return [other for other in self.ids if self.node(other) == self.node(device_id)]
