"""The devices that serve a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.core.interfaces import DeviceView
from tilework.core.pools import Within


def serving(devices: Sequence[DeviceView], within: Within) -> Sequence[DeviceView]:
    """Those of these devices that are `within`."""
    return devices if within is None else [device for device in devices if device.device_id in within]
