"""The layout of devices: pools by role or all stages everywhere, and groups of fixed degrees or for each request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from tilework.core.work import Group
from tilework.policy.placement.pack import pack
from tilework.policy.placement.placement import Nodes, Placement, colocated
from tilework.policy.placement.roles import PlacementType, Role
from tilework.policy.toolkit.buddy_allocator import Allocator
from tilework_lab.policies.trident_baselines.profiles import SeenRequests


def bucket_sizes(shares: Mapping[int, float], num_devices: int) -> dict[int, int]:
    """Return the devices of each degree: its share, to the nearest multiple of the degree; degree 1 gets the rest.

    `shares` are in proportion, those of requests by their optimal degree; degrees are at most `num_devices`. The widest
    is first.

    Source: TridentServe appendix D.2, "B2/B5", with ties down. Departures: each degree that has a share gets at least
    one group, since its requests may fit on no narrower one; and where the multiples are more than all devices,
    the degree with the most devices gives up a group.
    """
    total = sum(shares.values())
    wide = {
        degree: max(1, ceil(num_devices * share / total / degree - 0.5)) * degree
        for degree, share in sorted(shares.items(), reverse=True)
        if share > 0 and degree > 1
    }
    least = 1 if shares.get(1, 0) > 0 else 0
    while wide and sum(wide.values()) + least > num_devices:
        most = max(wide, key=lambda degree: (wide[degree] > degree, wide[degree]))
        wide[most] -= most
        if not wide[most]:
            del wide[most]
    rest = num_devices - sum(wide.values())
    return {**wide, 1: rest} if rest else wide


def cut_groups(sizes: Mapping[int, int], nodes: Iterable[Sequence[int]]) -> dict[int, tuple[Group, ...]]:
    """Cut the groups of each degree, each on one node, the widest first; a degree for which no node has room has none.

    Devices that nodes leave over go to the widest degree that they are enough for, and are idle if there is none.
    """
    allocator = Allocator(nodes)
    found: dict[int, list[Group]] = {}
    for degree in sorted(sizes, reverse=True):
        for _ in range(sizes[degree] // degree):
            if (group := allocator.take(degree)) is not None:
                found.setdefault(degree, []).append(group)
    for degree in sorted(found, reverse=True):
        while (group := allocator.take(degree)) is not None:
            found[degree].append(group)
    return {degree: tuple(groups) for degree, groups in found.items()}


@dataclass(frozen=True, slots=True)
class Line:
    """Devices that serve one queue.

    Attributes:
        kind: the roles whose stages are resident on them.
        groups: the groups that run one request each; or the devices of each node, without a degree.
        degree: how wide the groups are; None if each request gets a group of its own degree.
    """

    kind: PlacementType
    groups: tuple[Group, ...]
    degree: int | None = None

    @property
    def leader(self) -> Role:
        """The role whose optimal degree counts."""
        return Role.D if self.kind.is_primary else self.kind.roles[0]

    @property
    def widest(self) -> int:
        return max(map(len, self.groups))


class Room:
    """The devices of a line that are idle."""

    def __init__(self, line: Line, idle: set[int]) -> None:
        self._groups = None if line.degree is None else [one for one in line.groups if idle.issuperset(one)]
        self._allocator = Allocator([one for one in node if one in idle] for node in line.groups)

    def is_empty(self) -> bool:
        return not (self._allocator.num_free() if self._groups is None else self._groups)

    def take(self, degree: int) -> Group | None:
        """Return a group for a request of this degree; None if there is none."""
        if self._groups is None:
            return self._allocator.take(degree)
        return self._groups.pop(0) if self._groups else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The division of devices into lines.

    Attributes:
        is_pooled: whether each role has devices of its own; else all stages are on each device. So they are where there
            are fewer devices than roles.
        grouping: groups of one degree for all requests, of fixed degrees in buckets, or of a request's own degree.
        degree: the one degree; None: half of the optimal degree of the largest request that was seen, at least 1.
        shares: how many requests have each optimal degree of D, in proportion; None: as seen.
        pools: the size of the pool of each role that requests have, in proportion; None: by the mean times of what was
            seen.
    """

    grouping: Literal["one_degree", "buckets", "per_request"]
    is_pooled: bool = False
    degree: int | None = None
    shares: Mapping[int, float] | None = None
    pools: Mapping[Role, float] | None = None

    def lines(self, nodes: Nodes, seen: SeenRequests) -> tuple[Line, ...]:
        """Return the lines of these devices, each role in at least one. A request must have been seen."""
        num_devices = sum(map(len, nodes.values()))
        mean_ns = seen.mean_ns()
        placement = colocated(nodes)
        if self.is_pooled and num_devices >= len(mean_ns):
            sizes = mean_ns if self.pools is None else {role: self.pools[role] for role in mean_ns}
            placement = disaggregated(nodes, pool_sizes(num_devices, {role: 1 / size for role, size in sizes.items()}))
        found: list[Line] = []
        for kind in placement.counts():
            rows = [[one for one in row if placement.of(one) is kind] for row in nodes.values()]
            found += self._lines_of(Line(kind, tuple([tuple(row) for row in rows if row])), seen)
        return tuple(found)

    def _lines_of(self, pool: Line, seen: SeenRequests) -> Sequence[Line]:
        """Return the lines of a pool."""
        if self.grouping == "per_request":
            return [pool]
        num_devices = sum(map(len, pool.groups))
        if self.grouping == "one_degree":
            degree = self.degree or max(1, seen.largest().degrees[Role.D] // 2)
            sizes = {narrowed(degree, pool.widest): num_devices}
        else:
            shares = self.shares if pool.leader is Role.D and self.shares is not None else seen.shares(pool.leader)
            sizes = bucket_sizes(_narrowed_shares(shares, pool.widest), num_devices)
        groups = cut_groups(sizes, pool.groups)
        return [Line(pool.kind, of_degree, degree) for degree, of_degree in groups.items()]


def narrowed(degree: int, most: int) -> int:
    """Return a degree on nodes that have at most `most` devices for a group: halved until it is no more."""
    while degree > most:
        degree //= 2
    return degree


def _narrowed_shares(shares: Mapping[int, float], most: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for degree, share in shares.items():
        width = narrowed(degree, most)
        found[width] = found.get(width, 0) + share
    return found


def line_of(lines: Sequence[Line], role: Role, degree: int) -> int:
    """Return the index of the line for a request with this optimal degree of a role.

    The line is of this degree, else of the next narrower one, else of the next wider one.
    """
    own = [index for index, line in enumerate(lines) if role in line.kind.roles]
    narrow = [index for index in own if (lines[index].degree or 0) <= degree]
    if narrow:
        return max(narrow, key=lambda index: lines[index].degree or 0)
    return min(own, key=lambda index: lines[index].degree or 0)


def lines_text(lines: Sequence[Line]) -> str:
    """Return how many devices each line has, in words."""
    texts = [
        f"{sum(map(len, line.groups))} {line.kind}" + (f" in groups of {line.degree}" if line.degree else "")
        for line in lines
    ]
    return ", ".join(texts)


def disaggregated(nodes: Nodes, sizes: Mapping[Role, int]) -> Placement:
    """Return a pool of devices for each role: whole nodes with D first, then with E, then with C.

    `sizes` are all devices together, from `pool_sizes` or as published.
    """
    counts = {PlacementType(role.value): num for role, num in sizes.items()}
    placement = pack(counts, nodes, blocks={}, units={})
    assert placement is not None, "single devices fit on any nodes"
    return placement


def pool_sizes(
    num_devices: int, rates: Mapping[Role, float], weights: Mapping[Role, float] | None = None
) -> dict[Role, int]:
    """Return the size of each pool: N (w / mu) / sum(w / mu), rounded, at least 1; the largest takes up the rounding.

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
