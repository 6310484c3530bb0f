"""The layout: the pipelines that each device is for, and the stages of theirs that it is to hold.

A *part* is the devices of one pipeline, or of all pipelines that share devices. A *pool* is the devices of one
placement type in a part: they stand for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tilework.core.component import LEAST_RECENTLY_USED, Component, DropOrder
from tilework.core.policy import CostModel
from tilework.core.work import Group
from tilework.policy.placement.feasible import FitsAt
from tilework.policy.placement.placement import Nodes, Placement
from tilework.policy.placement.roles import PlacementType, Role, VirtualReplica, role_of

SHARED = ""
"""The part of all pipelines that have none of their own."""


class Pool(NamedTuple):
    """The devices of one type in one part."""

    part: str
    kind: PlacementType

    def __str__(self) -> str:
        return f"{self.part} {self.kind}".strip()


class PoolLayout:
    """The pool of each device. Read-only."""

    def __init__(self, rows: Nodes, pools: Mapping[int, Pool]) -> None:
        """`rows` are all devices, `pools` those of them that have one."""
        self.rows = rows
        self._pools = pools
        self._parts = {pool.part for pool in pools.values()}
        self._by_pool: dict[Pool, list[Group]] = {}
        for row in rows.values():
            found: dict[Pool, list[int]] = {}
            for device_id in row:
                if (pool := pools.get(device_id)) is not None:
                    found.setdefault(pool, []).append(device_id)
            for pool, ids in found.items():
                self._by_pool.setdefault(pool, []).append(tuple(ids))
        self._widest = {pool: max(map(len, groups)) for pool, groups in self._by_pool.items()}
        self._order_of: dict[Pool, DropOrder] = {}

    @classmethod
    def colocated(cls, rows: Nodes) -> PoolLayout:
        """Return the layout with all stages of all pipelines on each device."""
        pool = Pool(SHARED, PlacementType.EDC)
        return cls(rows, {device_id: pool for row in rows.values() for device_id in row})

    @property
    def is_colocated(self) -> bool:
        return self._by_pool.keys() <= {Pool(SHARED, PlacementType.EDC)}

    @property
    def parts(self) -> frozenset[str]:
        return frozenset(self._parts)

    def part_of(self, pipeline: str) -> str:
        return pipeline if pipeline in self._parts else SHARED

    def pool_of(self, device_id: int) -> Pool | None:
        """Return the pool of a device; None if it has none."""
        return self._pools.get(device_id)

    def nodes(self, pool: Pool) -> Sequence[Group]:
        """Return the devices of a pool, node by node."""
        return self._by_pool.get(pool, ())

    def widest(self, pool: Pool) -> int:
        """Return the most devices that a pool has on one node."""
        return self._widest.get(pool, 0)

    def replicas(self, pipeline: str, fits: FitsAt) -> tuple[VirtualReplica, ...]:
        """Return the virtual replicas on which a request class can run: of each type enough devices on one node."""
        part = self.part_of(pipeline)
        wide = {kind: self.widest(Pool(part, kind)) for kind in fits}
        return tuple(
            one for one in VirtualReplica if all(kind in fits and fits[kind][0] <= wide[kind] for kind in one.types)
        )

    def holds(self, group: Iterable[int], pipeline: str, role: Role, fits: FitsAt) -> bool:
        """Return whether a group is to hold the stages of a role, and has the memory for a class at its width."""
        ids = tuple(group)
        part = self.part_of(pipeline)
        pools = {self._pools.get(device_id) for device_id in ids}
        return bool(ids) and all(
            pool is not None
            and pool.part == part
            and role in pool.kind.roles
            and pool.kind in fits
            and len(ids) >= fits[pool.kind][0]
            for pool in pools
        )

    def placement_of(self, part: str) -> Placement:
        """Return the placement of a part."""
        own = [(device_id, pool.kind) for device_id, pool in self._pools.items() if pool.part == part]
        return Placement(tuple(own))

    def changed(self, before: PoolLayout) -> list[int]:
        """Return the devices of both layouts whose pool is another one."""
        return [one for one, pool in self._pools.items() if before.pool_of(one) not in (None, pool)]

    def groups(self) -> tuple[tuple[Group, str], ...]:
        """Return the devices of each node and pool, with the type of the pool, and its part if there are several."""
        named = [(group, self.name_of(pool)) for pool, groups in self._by_pool.items() for group in groups]
        return tuple(sorted(named))

    def name_of(self, pool: Pool) -> str:
        """Return the type of a pool, and its part if there are several."""
        return pool.kind.value if len(self._parts) == 1 else str(pool)

    def drop_order(self, device_id: int, costs: CostModel) -> DropOrder:
        """Return what a device drops first: weights of parts and of roles that it is not to hold."""
        pool = self._pools.get(device_id)
        if pool is None or self.is_colocated:
            return LEAST_RECENTLY_USED
        found = self._order_of.get(pool)
        if found is None:
            found = self._order_of[pool] = DropOrder(device=_strangers(pool, self._parts - {SHARED}, costs))
        return found


def _strangers(pool: Pool, pipelines: Iterable[str], costs: CostModel) -> tuple[Component, ...]:
    """Return the components of pipelines with parts of their own that a pool is not for, in a fixed order."""
    wanted, others = set[Component](), dict[Component, None]()
    for pipeline in sorted(pipelines):
        graph = costs.graph(pipeline)
        for stage in graph.stages:
            is_own = pipeline == pool.part and role_of(graph, stage) in pool.kind.roles
            if is_own:
                wanted.update(costs.weights.components(stage))
            else:
                others.update(dict.fromkeys(costs.weights.components(stage)))
    return tuple(one for one in others if one not in wanted)
