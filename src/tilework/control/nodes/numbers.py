"""The numbers of devices that lie on several nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNumbers:
    """Device numbers: accelerators of node 0 first, then those of node 1, and so on; CPU slots likewise after them.

    On its node a device has the number that it would have without other nodes: accelerators from 0 on, then CPU slots.
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
        """Return the number of a device on its node."""
        if device_id < self.num_accelerators:
            return device_id % self.num_workers
        return self.num_workers + (device_id - self.num_accelerators) % self.num_slots

    def of(self, node: int, on_node: int) -> int:
        """Return the number of the device that has this number on a node."""
        if on_node < self.num_workers:
            return node * self.num_workers + on_node
        return self.num_accelerators + node * self.num_slots + on_node - self.num_workers

    def all_of(self, node: int) -> tuple[int, ...]:
        """Return all devices of a node."""
        return tuple(self.of(node, one) for one in range(self.num_workers + self.num_slots))
