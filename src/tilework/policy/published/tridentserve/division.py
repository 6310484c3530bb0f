"""A layout for the requests of a window: the devices divided among pipelines, and each part placed.

Theory of operation. A placement is for one set of weights. Pipelines whose requests all have V* = V0 need no placement:
they share one part, where each device is to hold all stages of whatever it runs. Each other pipeline has a part of its
own. Parts get devices in proportion to the device time of their requests, in whole nodes if there is a node for each.

Ours: the paper serves one pipeline at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilework.core.interfaces import CostModel
from tilework.core.request import Request
from tilework.core.shares import apportioned
from tilework.policy.placement.demand import By, ClassDemand, Mix, grouped, mix_of
from tilework.policy.placement.feasible import virtual_replica
from tilework.policy.placement.orchestrator import plan_placement
from tilework.policy.placement.placement import Nodes, widest
from tilework.policy.placement.roles import PlacementType, VirtualReplica
from tilework.policy.published.tridentserve.layout import SHARED, Layout, Pool
from tilework.policy.published.tridentserve.ways import Profiles

Demands = Mapping[str, Sequence[ClassDemand]]
"""What is asked of each part."""


@dataclass(frozen=True, slots=True)
class Division:
    """A layout, the mix of each part that has a pipeline of its own, each part's share of the device time, and why."""

    layout: Layout
    mixes: Mapping[str, Mix]
    shares: Mapping[str, float]
    reasons: tuple[str, ...]


def demands_by_part(
    classes: Sequence[tuple[Request, float]], profiles: Profiles, costs: CostModel, wide: int
) -> dict[str, list[ClassDemand]]:
    """What these requests, one of each class with its number, ask of each part, on nodes of `wide` devices."""
    found: dict[str, list[ClassDemand]] = {}
    for request, count in classes:
        found.setdefault(request.pipeline, []).append(profiles.of(request, costs).demand(count))
    parts: dict[str, list[ClassDemand]] = {}
    for pipeline, demands in sorted(found.items()):
        replicas = {virtual_replica(demand.fits, wide) for demand in demands}
        parts.setdefault(SHARED if replicas <= {VirtualReplica.V0, None} else pipeline, []).extend(demands)
    return parts


def shares_of(demands: Demands) -> dict[str, float]:
    """Each part's share of the device time."""
    weights = {part: sum(demand.weight("device_time") for demand in some) for part, some in demands.items()}
    total = sum(weights.values())
    return {part: weight / total for part, weight in weights.items()}


def mixes_of(demands: Demands, wide: int, by: By) -> dict[str, Mix]:
    """The mix of each part with a pipeline of its own."""
    return {part: mix_of(grouped(some, wide), by) for part, some in demands.items() if part != SHARED}


def divide(demands: Demands, rows: Nodes, before: Layout, by: By) -> Division:
    """The layout for these demands. Where there is a choice, devices keep their types."""
    wide = widest(rows)
    shares, mixes = shares_of(demands), mixes_of(demands, wide, by)
    if demands.keys() <= {SHARED}:
        why = "all stages of each request fit on one device" if demands else "no request is known"
        return Division(Layout.colocated(rows), mixes, shares, (why,))
    pools: dict[int, Pool] = {}
    reasons: tuple[str, ...] = ()
    for part, own in _divided(shares, rows).items():
        prefix = f"{part}: " if len(shares) > 1 else ""
        if part == SHARED or not own:
            pools |= {one: Pool(part, PlacementType.EDC) for row in own.values() for one in row}
            continue
        plan = plan_placement(demands[part], own, by=by, before=before.placement_of(part))
        reasons += tuple(prefix + reason for reason in plan.reasons)
        pools |= {device_id: Pool(part, kind) for device_id, kind in plan.placement.types}
    return Division(Layout(rows, pools), mixes, shares, reasons)


def _divided(shares: Mapping[str, float], rows: Nodes) -> dict[str, Nodes]:
    """The devices of each part: whole nodes if there is one for each, else neighbours, at least one if there is."""
    if len(shares) == 1:
        return dict.fromkeys(shares, rows)
    if len(rows) >= len(shares):
        nodes, found = iter(sorted(rows)), dict[str, Nodes]()
        for part, num in _at_least_one(shares, len(rows)).items():
            found[part] = {node: rows[node] for node in [next(nodes) for _ in range(num)]}
        return found
    placed = iter([(node, one) for node in sorted(rows) for one in rows[node]])
    slices: dict[str, dict[int, list[int]]] = {}
    for part, num in _at_least_one(shares, sum(map(len, rows.values()))).items():
        own = slices.setdefault(part, {})
        for node, one in [next(placed) for _ in range(num)]:
            own.setdefault(node, []).append(one)
    return {**slices}


def _at_least_one(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """`total` in proportion to the shares, at least 1 for each if that is possible; the largest give."""
    counts = apportioned(shares, total)
    for part in counts:
        if not counts[part] and max(counts.values()) > 1:
            counts[max(counts, key=counts.__getitem__)] -= 1
            counts[part] += 1
    return counts
