"""The loads of a device before it can run a job, and the components that its node has."""

from __future__ import annotations

from tilework.core.component import Component
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind
from tilework.core.policy import ClusterView


def loads_ns(view: ClusterView, device_id: int, left: Cursor) -> int:
    """Return the time of all loads for the remaining stages, as if what is loaded for one stayed for the others."""
    if not view.needs_loads:
        return 0
    stages = [stage for stage, _ in left.pieces if stage.kind is DeviceKind.ACCELERATOR]
    load_ns = view.sources.load_ns
    return sum([load_ns(device_id, stage) for stage in stages])


def at_node(view: ClusterView, node: int) -> tuple[Component, ...]:
    """Return the components that a node's host has, and that its devices have or load: it may have them by then."""
    found = dict.fromkeys(view.sources.kept(node))
    for device in view.on_node(node):
        found.update(dict.fromkeys(device.memory.components))
    return tuple(found)
