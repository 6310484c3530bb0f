"""Configuration of a simulation: its devices, where they are, and what may fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilework.core.graph.stage import DeviceKind
from tilework.core.work import Group
from tilework.sim.faults import Faults


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Simulated devices and their faults.

    - `jitter`: relative standard deviation of each work's duration. 0: exactly its table time, but for what is drawn
      for requests with a cache (see `sim.timing`).
    - `dispatch_ns`: time before every work that is not part of its run, as live devices idle between two works. One
      number or by degree; a degree that is not listed takes that of the nearest narrower one, else of the narrowest.
    - `switch_ns`: added before steps whose devices last ran another job, or this one on another group.
    - `slots_per_node`: CPU slots of each node, if a pipeline has stages for them.
    - `hosts_have_read`: whether hosts have read all components before, as workers do when a server starts. They keep
      what they have room for.
    - `state_copies`: on how many nodes each state is kept, as soon as it has been copied there.
    - `result_ns`: from the end of a request's last work to the answer that its client receives.
    """

    num_devices: int
    seed: int = 0
    jitter: float = 0.0
    dispatch_ns: int | Mapping[int, int] = 0
    switch_ns: int = 0
    slots_per_node: int = 1
    hosts_have_read: bool = False
    state_copies: int = 1
    result_ns: int = 0
    faults: Faults = field(default_factory=Faults)

    def dispatch_ns_at(self, degree: int) -> int:
        """Return the dispatch time of a work on `degree` devices."""
        if isinstance(self.dispatch_ns, int):
            return self.dispatch_ns
        known = self.dispatch_ns.keys()
        nearest = max((one for one in known if one <= degree), default=min(known, default=None))
        return 0 if nearest is None else self.dispatch_ns[nearest]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayout:
    """Accelerators 0 to `num_devices` - 1 fill nodes in order; the CPU slots of each node have the ids after these."""

    num_devices: int
    devices_per_node: int
    slots_per_node: int = 0

    @property
    def num_nodes(self) -> int:
        return -(-self.num_devices // self.devices_per_node)

    @property
    def ids(self) -> range:
        """All devices."""
        return range(self.num_devices + self.num_nodes * self.slots_per_node)

    def kind(self, device_id: int) -> DeviceKind:
        return DeviceKind.ACCELERATOR if device_id < self.num_devices else DeviceKind.CPU

    def node(self, device_id: int) -> int:
        if device_id < self.num_devices:
            return device_id // self.devices_per_node
        return (device_id - self.num_devices) // self.slots_per_node

    def all_of(self, node: int) -> Group:
        """Return all devices of a node."""
        return tuple(one for one in self.ids if self.node(one) == node)
