"""Configuration of a server over several nodes."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.model import ModelSource
from tilework.core.pools import unknown_device
from tilework.core.work import Group
from tilework.runtime.local_config import LocalConfig


class BadNodes(ValueError):
    """Nodes that are not possible; the message names the setting, its value and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesConfig:
    """`num_nodes` places for nodes, each with the workers that `each` configures; `sources` are paths on every node.

    Devices of a model are numbered through all nodes. Without `weights_bytes` each node has the models that it serves
    from the start, so a model must have a device on each node: otherwise that node would not know it.

    A server starts when `least_nodes` of the places are taken, 0 for all; the others may be taken later.

    Agents connect to `host` and `port` (0: any that is free), and must know the `token`. A node that sends nothing for
    `silence_s` is lost; it is pinged every `ping_s`. When all nodes are lost, open requests wait `absent_s` for one. A
    blob must come from another node within `fetch_s`. Each state is on `state_copies` nodes, as soon as it has been
    copied there: with 1 the requests of a lost node go back to the states that other nodes have of them.

    Raises:
        BadNodes: a value is not possible.
    """

    num_nodes: int
    each: LocalConfig
    host: str = "127.0.0.1"
    port: int = 0
    token: bytes
    ping_s: float = 0.2
    silence_s: float = 10.0
    absent_s: float = 60.0
    fetch_s: float = 10.0
    state_copies: int = 1
    least_nodes: int = 0

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise BadNodes(f"nodes = {self.num_nodes} is not possible; give a number of at least 1")
        if not 0 <= self.least_nodes <= self.num_nodes:
            raise BadNodes(
                f"least nodes = {self.least_nodes} is not possible; give 1 to {self.num_nodes}, the number of nodes"
            )
        if not 1 <= self.state_copies <= self.num_nodes:
            raise BadNodes(
                f"state copies = {self.state_copies} is not possible; give 1 to {self.num_nodes}, the number of nodes"
            )
        if not self.token:
            raise BadNodes(
                f"agents may connect to {self.host} without a token; set TILEWORK_CLUSTER_TOKEN here and on all nodes"
            )
        for one in self.each.sources:
            if isinstance(one, ModelSource) and one.devices is not None:
                self._check_devices(one.name or one.path, one.devices)

    def _check_devices(self, model: str, devices: Group) -> None:
        num = self.num_nodes * self.num_devices_each
        if (unknown := unknown_device(devices, num)) is not None:
            raise BadNodes(
                f"devices of {model} has {unknown}, and {self.num_nodes} nodes have {num} together, from 0; "
                "leave it out"
            )
        lacking = set(range(self.num_nodes)).difference(one // self.num_devices_each for one in devices)
        if lacking and self.each.weights_bytes is None:
            raise BadNodes(
                f"devices = {list(devices)} of {model} has none of node {min(lacking)}, so that node would not know "
                "the model; name one of each node, or give --weights-memory, so that devices load only what they serve"
            )

    @property
    def num_devices_each(self) -> int:
        """Number of accelerators of each node: its cells."""
        return self.each.num_workers // self.each.cell_size

    @property
    def num_first(self) -> int:
        """Number of nodes that a start waits for."""
        return self.least_nodes or self.num_nodes
