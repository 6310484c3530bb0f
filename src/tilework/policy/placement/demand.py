"""The demand of the requests of a class on a placement, and how busy they keep its types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tilework.policy.placement.feasible import FitsAt, virtual_replica
from tilework.policy.placement.roles import PlacementType, Role, VirtualReplica
from tilework.policy.placement.split import Rates

By = Literal["device_time", "requests"]
"""Measure that budgets follow: the time that requests keep devices busy, or their number."""

Mix = Mapping[VirtualReplica, float]
"""The share of each V*, 1 in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassDemand:
    """The requests of one class.

    Attributes:
        fits: where it fits (`feasible.fits_at`).
        count: how many there were, or their share of a declared mix.
        device_ns: the time of one request on all its devices together, at the optimal degree, of each role.
    """

    fits: FitsAt
    count: float
    device_ns: Mapping[Role, int]

    def weight(self, by: By) -> float:
        """Return their number, or their device time, at least a nanosecond for each."""
        return self.count * (max(1, sum(self.device_ns.values())) if by == "device_time" else 1)


def grouped(demands: Sequence[ClassDemand], widest: int) -> dict[VirtualReplica, list[ClassDemand]]:
    """Return the classes that have requests by their V*, in order, on nodes of at most `widest` devices.

    Those that have none are left out.
    """
    found: dict[VirtualReplica, list[ClassDemand]] = {replica: [] for replica in VirtualReplica}
    for demand in demands:
        replica = virtual_replica(demand.fits, widest)
        if replica is not None and demand.count > 0:
            found[replica].append(demand)
    return {replica: classes for replica, classes in found.items() if classes}


def mix_of(
    groups: Mapping[VirtualReplica, Sequence[ClassDemand]], by: By = "device_time"
) -> dict[VirtualReplica, float]:
    """Return the share of each V*; empty without requests."""
    weights = {replica: sum(demand.weight(by) for demand in classes) for replica, classes in groups.items()}
    total = sum(weights.values())
    return {replica: weight / total for replica, weight in weights.items()}


def busy_ns(demands: Sequence[ClassDemand], kind: PlacementType, rates: Rates) -> float:
    """Return how long these requests keep devices of a type busy, at its rate, in 1 / s, or else as profiled.

    At least a nanosecond for each.
    """
    rate = rates.get(kind, 0)
    num = sum(demand.count for demand in demands)
    if rate > 0:
        return 1e9 * num / rate
    profiled = sum(demand.count * sum(demand.device_ns.get(role, 0) for role in kind.roles) for demand in demands)
    return max(profiled, num)


def rates_of(replica: VirtualReplica, demands: Sequence[ClassDemand], measured: Rates) -> dict[PlacementType, float]:
    """Return the number of these requests that a device of each type of the replica serves per second that it is busy.

    A type that was not measured has the rate of the profile, 1 / (mean busy time per request).
    """
    num = sum(demand.count for demand in demands)
    return {kind: 1e9 * num / busy_ns(demands, kind, measured) for kind in replica.types}
