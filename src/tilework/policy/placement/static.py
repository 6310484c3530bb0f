"""Placements that do not follow the requests: all stages on each device, and a pool of devices for each role.

Source: the baselines of TridentServe §8.1 and appendix D.2: B1 to B4 are colocated, B5 and B6 disaggregated.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilework.policy.placement.pack import pack
from tilework.policy.placement.placement import Nodes, Placement
from tilework.policy.placement.roles import PlacementType, Role


def colocated(nodes: Nodes) -> Placement:
    """All roles on each device."""
    return Placement(tuple((device_id, PlacementType.EDC) for row in nodes.values() for device_id in row))


def disaggregated(nodes: Nodes, sizes: Mapping[Role, int]) -> Placement:
    """A pool of devices for each role: whole nodes with D first, then with E, then with C.

    `sizes` are all devices together, from `pool_sizes` or as published.
    """
    counts = {PlacementType(role.value): num for role, num in sizes.items()}
    placement = pack(counts, nodes, blocks={}, units={})
    assert placement is not None, "single devices fit on any nodes"
    return placement


def pool_sizes(
    num_devices: int, rates: Mapping[Role, float], weights: Mapping[Role, float] | None = None
) -> dict[Role, int]:
    """The size of each pool: N (w / mu) / sum(w / mu), rounded, at least 1; the largest takes up what rounding leaves.

    `rates` is mu, how many requests per second a pool's device serves. The published sizes are met if mu is 1 / mean
    latency at the optimal degree, not 1 / device time. `weights` is w, 1 where none is given.

    Source: TridentServe appendix D.2, "Stage-cluster sizing".
    """
    assert num_devices >= len(rates), f"{num_devices} devices are too few for {len(rates)} pools"
    parts = {role: (weights or {}).get(role, 1.0) / rate for role, rate in rates.items()}
    total = sum(parts.values())
    sizes = {role: max(1, round(num_devices * part / total)) for role, part in parts.items()}
    while over := sum(sizes.values()) - num_devices:  # More than once only where many pools of less than 1 become 1.
        largest = max(sizes, key=sizes.__getitem__)
        sizes[largest] -= min(over, sizes[largest] - 1)
    return sizes
