"""The numbers of devices that lie on several nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNumbers:
    """Accelerators of node 0 come first, then those of node 1, and so on; then the CPU slots in the same order.

    On its node a device is called as if there were no other: accelerators from 0 on, then the CPU slots.
    """

    num_nodes: int
    num_workers: int
    num_slots: int

    @property
    def num_accelerators(self) -> int:
        return self.num_nodes * self.num_workers

    def node(self, device_id: int) -> int:
        if device_id < self.num_accelerators:
            return device_id // self.num_workers
        return (device_id - self.num_accelerators) // self.num_slots

    def on_node(self, device_id: int) -> int:
        """What a device is called on its node."""
        if device_id < self.num_accelerators:
            return device_id % self.num_workers
        return self.num_workers + (device_id - self.num_accelerators) % self.num_slots

    def of(self, node: int, on_node: int) -> int:
        """The number of what is called so on a node."""
        if on_node < self.num_workers:
            return node * self.num_workers + on_node
        return self.num_accelerators + node * self.num_slots + on_node - self.num_workers

    def all_of(self, node: int) -> tuple[int, ...]:
        """All devices of a node."""
        return tuple(self.of(node, one) for one in range(self.num_workers + self.num_slots))
