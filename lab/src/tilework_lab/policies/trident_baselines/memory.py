"""Whether a request fits onto devices that keep all weights of their stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilework.core.interfaces import DeviceView
from tilework.policy.placement.feasible import Footprint
from tilework.policy.placement.roles import Role

_BYTES_PER_GB = 1e9


def usable_bytes(devices: Iterable[DeviceView]) -> int | None:
    """The memory of the smallest device; None if none has a limit."""
    return min((size for one in devices if (size := one.memory.total_bytes) is not None), default=None)


def needed_bytes(footprint: Footprint, roles: Sequence[Role], degree: int) -> int:
    """What a device of a group of this degree needs: the weights of these roles, and the largest activation of one.

    Each role runs on as much of the group as it was profiled for.
    """
    weights = sum(footprint.weights.get(role, 0) for role in roles)
    return weights + max(_activation_bytes(footprint, role, degree) for role in roles)


def _activation_bytes(footprint: Footprint, role: Role, degree: int) -> int:
    profiled = footprint.activations.get(role, {1: 0})
    return profiled[max((one for one in profiled if one <= degree), default=min(profiled))]


def shortage(footprint: Footprint, roles: Sequence[Role], degree: int) -> str | None:
    """Why a request cannot be served at this degree, in words; None if it can."""
    needed = needed_bytes(footprint, roles, degree)
    if needed <= footprint.usable_bytes:
        return None
    weights = sum(footprint.weights.get(role, 0) for role in roles)
    return (
        f"it needs {needed / _BYTES_PER_GB:.1f} GB on each device at degree {degree}, of which the weights of "
        f"{'+'.join(roles)} are {weights / _BYTES_PER_GB:.1f} GB, and a device has "
        f"{footprint.usable_bytes / _BYTES_PER_GB:.1f} GB"
    )
