"""How long a device would load before it can run a job."""

from __future__ import annotations

from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind
from tilework.core.interfaces import ClusterView


def loads_ns(view: ClusterView, device_id: int, left: Cursor) -> int:
    """The loads of the stages that are left on this device, as if what it loads for one stayed for the others."""
    if not view.needs_loads:
        return 0
    stages = [stage for stage, _ in left.pieces if stage.kind is DeviceKind.ACCELERATOR]
    return sum([view.load_ns(device_id, stage) for stage in stages])
