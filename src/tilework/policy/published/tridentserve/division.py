"""A layout for the requests of a window: the devices divided among pipelines, and each part placed.

Theory of operation. A placement is for one set of weights. Pipelines whose requests all have V* = V0 need no placement:
they share one part, where each device is to hold all stages of whatever it runs. Each other pipeline has a part of its
own. Parts get devices in proportion to the device time of their requests, in whole nodes if there is a node for each.

Such a part may have too few devices for a request that all devices together could serve. Then neighbours are divided
instead of nodes. If a class still can run nowhere, classes take turns, in the order of their most urgent request of
which something is left to start: each has devices if all before it can run beside it. The others have none until a
later division, when those before them have nothing left to start. So every request that some placement can serve is
served in the end: its turn comes when the requests that are more urgent are done.

Ours: the paper serves one pipeline at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilework.core.policy import CostModel
from tilework.core.request import Request, RequestClass, cost_key
from tilework.core.shares import apportioned
from tilework.policy.placement.demand import By, ClassDemand, Mix, grouped, mix_of
from tilework.policy.placement.feasible import can_run, virtual_replica
from tilework.policy.placement.orchestrator import plan_placement
from tilework.policy.placement.placement import Nodes, widest
from tilework.policy.placement.roles import PlacementType, VirtualReplica
from tilework.policy.published.tridentserve.layout import SHARED, Pool, PoolLayout
from tilework.policy.published.tridentserve.ways import Profiles

Demands = Mapping[str, Sequence[ClassDemand]]
"""Demands on each part."""

_Placed = tuple[PoolLayout, tuple[str, ...]]
"""A layout, and why."""


@dataclass(frozen=True, slots=True)
class Division:
    """A layout, the mix of each part that has a pipeline of its own, each part's share of the device time, and why."""

    layout: PoolLayout
    mixes: Mapping[str, Mix]
    shares: Mapping[str, float]
    reasons: tuple[str, ...]


def demands_by_part(
    classes: Sequence[tuple[Request, float]], profiles: Profiles, costs: CostModel, wide: int
) -> dict[str, list[ClassDemand]]:
    """Return what these requests, one of each class with its number, ask of each part, on nodes of `wide` devices."""
    found: dict[str, list[ClassDemand]] = {}
    for request, count in classes:
        found.setdefault(request.pipeline, []).append(profiles.of(request, costs).demand(count))
    parts: dict[str, list[ClassDemand]] = {}
    for pipeline, demands in sorted(found.items()):
        replicas = {virtual_replica(demand.fits, wide) for demand in demands}
        parts.setdefault(SHARED if replicas <= {VirtualReplica.V0, None} else pipeline, []).extend(demands)
    return parts


def shares_of(demands: Demands) -> dict[str, float]:
    """Return each part's share of the device time."""
    weights = {part: sum(demand.weight("device_time") for demand in some) for part, some in demands.items()}
    total = sum(weights.values())
    return {part: weight / total for part, weight in weights.items()}


def mixes_of(demands: Demands, wide: int, by: By) -> dict[str, Mix]:
    """Return the mix of each part with a pipeline of its own."""
    return {part: mix_of(grouped(some, wide), by) for part, some in demands.items() if part != SHARED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Divider:
    """Divides the devices of the layout `before` by what requests need. Where there is a choice, they keep their types.

    Requests are one of each class, with its number. All methods raise UnknownCost.
    """

    profiles: Profiles
    costs: CostModel
    before: PoolLayout
    by: By

    @property
    def _wide(self) -> int:
        return widest(self.before.rows)

    def divide(self, known: Sequence[tuple[Request, float]], turns: Sequence[RequestClass]) -> Division:
        """Return the layout for these requests.

        `turns` are the classes of which something is left to start, the most urgent first.
        """
        demands = self._demands(known)
        layout, reasons = self._serving(known) or self._in_turns(known, turns) or next(self._layouts(demands))
        return Division(layout, mixes_of(demands, self._wide, self.by), shares_of(demands), reasons)

    def _demands(self, known: Sequence[tuple[Request, float]]) -> Demands:
        return demands_by_part(known, self.profiles, self.costs, self._wide)

    def _in_turns(self, known: Sequence[tuple[Request, float]], turns: Sequence[RequestClass]) -> _Placed | None:
        """Return the layout for as many classes as it can serve together, the most urgent first; None without classes.

        Classes of a pipeline that need the same devices have their turn together.
        """
        turn = {key: index for index, key in enumerate(turns)}
        alike: dict[object, list[tuple[Request, float]]] = {}
        for request, count in sorted(known, key=lambda one: turn.get(cost_key(one[0]), len(turn))):
            fits = self.profiles.of(request, self.costs).fits
            if virtual_replica(fits, self._wide) is not None:
                least = tuple((kind, degrees[0]) for kind, degrees in fits.items())
                alike.setdefault((request.pipeline, least), []).append((request, count))
        served: list[tuple[Request, float]] = []
        found = None
        for some in alike.values():
            if (placed := self._serving([*served, *some])) is not None:
                served = [*served, *some]
                found = placed
        if found is None:
            return None
        num = sum(count for _, count in known) - sum(count for _, count in served)
        return found[0], (*found[1], f"{num:g} requests wait for their turn: devices are too few for all at once")

    def _serving(self, known: Sequence[tuple[Request, float]]) -> _Placed | None:
        """Return a layout on which each of these classes that fits on the nodes can run; None if none was found."""
        fits = [(request.pipeline, self.profiles.of(request, self.costs).fits) for request, _ in known]
        wanted = [(pipeline, some) for pipeline, some in fits if virtual_replica(some, self._wide) is not None]
        for placed in self._layouts(self._demands(known)):
            if all(placed[0].replicas(pipeline, some) for pipeline, some in wanted):
                return placed
        return None

    def _layouts(self, demands: Demands) -> Iterator[_Placed]:
        """Yield the layouts to try for these demands, each with its reasons: at least one."""
        rows = self.before.rows
        if demands.keys() <= {SHARED}:
            why = "all stages of each request fit on one device" if demands else "no request is known"
            yield PoolLayout.colocated(rows), (why,)
            return
        for division in _divided(demands, rows):
            pools: dict[int, Pool] = {}
            reasons: tuple[str, ...] = ()
            for part, own in division.items():
                prefix = f"{part}: " if len(demands) > 1 else ""
                if part == SHARED or not own:
                    pools |= {one: Pool(part, PlacementType.EDC) for row in own.values() for one in row}
                    continue
                plan = plan_placement(demands[part], own, by=self.by, before=self.before.placement_of(part))
                reasons += tuple(prefix + reason for reason in plan.reasons)
                pools |= {device_id: Pool(part, kind) for device_id, kind in plan.placement.types}
            yield PoolLayout(rows, pools), reasons


def _divided(demands: Demands, rows: Nodes) -> Iterator[dict[str, Nodes]]:
    """Yield the devices of each part: whole nodes if there are enough; then neighbours, at least what a class needs."""
    shares = shares_of(demands)
    if len(shares) == 1:
        yield dict.fromkeys(shares, rows)
        return
    if len(rows) >= len(shares):
        nodes = iter(sorted(rows))
        found: dict[str, Nodes] = {}
        for part, num in _at_least(dict.fromkeys(shares, 1), shares, len(rows)).items():
            found[part] = {node: rows[node] for node in [next(nodes) for _ in range(num)]}
        yield found
    placed = iter([(node, one) for node in sorted(rows) for one in rows[node]])
    slices: dict[str, dict[int, list[int]]] = {}
    least = {part: max(map(_least_devices, some)) for part, some in demands.items()}
    for part, num in _at_least(least, shares, sum(map(len, rows.values()))).items():
        own = slices.setdefault(part, {})
        for node, one in [next(placed) for _ in range(num)]:
            own.setdefault(node, []).append(one)
    yield {**slices}


def _least_devices(demand: ClassDemand) -> int:
    """Return the fewest devices on which a class can run; 1 if it fits on no placement."""
    able = [replica for replica in VirtualReplica if can_run(demand.fits, replica)]
    return min([sum(demand.fits[kind][0] for kind in replica.types) for replica in able], default=1)


def _at_least(least: Mapping[str, int], shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Divide `total` by the shares, `least` for each while others have more; those with most to spare give."""
    counts = apportioned(shares, total)
    for part in counts:
        while counts[part] < least[part]:
            giver = max(counts, key=lambda other: counts[other] - least[other])
            if counts[giver] <= least[giver]:
                break
            counts[giver] -= 1
            counts[part] += 1
    return counts
