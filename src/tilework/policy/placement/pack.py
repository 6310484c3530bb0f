"""PackPerMachine: which devices of which nodes get the types that were counted.

Theory of operation. A request's primaries are on one node, and so are the devices of an auxiliary's replica. So nodes
of one type are worth most, and blocks come before single devices:

1. whole nodes with primaries of one type, then with E, then with C;
2. one *block* of each type that has no whole node yet: the devices that its requests need at least, on one node;
3. the rest, auxiliaries in whole units first: on a node that has the type already, else on the first that has room for
   all of it, else where most room is.

With nodes of equal size, a multiple of all units, and T types with remainders, at most T - 1 nodes are mixed. If step 1
leaves no room for the blocks, they are placed first, by trying all ways that differ: `pack` fails only if no way
exists.

Source: TridentServe appendix C.1, "PackPerMachine()". Departures: the blocks, without which a tiny remainder of decode
would lie on two nodes; and where there is a choice, devices that had the type before, since each change loads weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilework.policy.placement.placement import Nodes, Placement
from tilework.policy.placement.roles import PlacementType
from tilework.policy.placement.split import Counts, Units


def pack(
    counts: Mapping[PlacementType, int],
    nodes: Nodes,
    blocks: Units,
    units: Units,
    before: Placement | None = None,
) -> Placement | None:
    """Place `counts` devices of each type, which are all devices of `nodes` together.

    `blocks` is how many devices on one node a type needs at least, `units` how many a replica of it is; 1 where a type
    is missing. Returns None if the blocks of all types do not fit on the nodes.
    """
    assert sum(counts.values()) == sum(len(node) for node in nodes.values()), "counts are not all devices"
    for whole_nodes in (True, False):
        packing = _Packing.of(counts, nodes, before)
        if whole_nodes:
            packing.fill_whole_nodes(units)
        if packing.place_blocks(blocks):
            packing.place_rest(units)
            return packing.placement()
    return None


def can_place(blocks: Mapping[PlacementType, int], nodes: Nodes) -> bool:
    """Return whether blocks of these widths, one of each type, fit on the nodes."""
    return _Packing.of(blocks, nodes, None).place_blocks(blocks)


@dataclass(slots=True)
class _Packing:
    """A placement under construction: how many devices of each type each node has, and what is still to be placed."""

    nodes: list[Sequence[int]]
    before: Placement | None
    left: Counts
    room: list[int]
    placed: list[Counts]
    kept: list[Counts] = field(default_factory=list)
    """Number of devices of each node that had each type before."""

    @staticmethod
    def of(counts: Mapping[PlacementType, int], nodes: Nodes, before: Placement | None) -> _Packing:
        rows = [nodes[node] for node in sorted(nodes)]
        left = {kind: counts[kind] for kind in PlacementType if counts.get(kind)}
        packing = _Packing(rows, before, left, [len(row) for row in rows], [{} for _ in rows])
        packing.kept = [{kind: packing.num_kept(row, kind) for kind in PlacementType} for row in rows]
        return packing

    def num_kept(self, row: Sequence[int], kind: PlacementType) -> int:
        return sum(self.before.of(device_id) is kind for device_id in row) if self.before is not None else 0

    def fill_whole_nodes(self, units: Units) -> None:
        """Give whole nodes to types. Nodes that had most devices of a type before keep it; otherwise both go in order.

        Auxiliaries fill nodes of whole units only.
        """
        pairs = [(kind, index) for kind in self.left for index, room in enumerate(self.room) if room]
        for kind, index in sorted(pairs, key=lambda pair: -self.kept[pair[1]][pair[0]]):
            leftover = 0 if kind.is_primary else self.room[index] % units.get(kind, 1)
            if not self.placed[index] and not leftover and self.left[kind] >= self.room[index]:
                self.put(kind, index, self.room[index])

    def place_blocks(self, blocks: Units) -> bool:
        """Place one block of each type that no node has yet, wide ones first; returns whether all found a node."""
        missing = [
            (blocks.get(kind, 1), kind)
            for kind in self.left
            if all(placed.get(kind, 0) < blocks.get(kind, 1) for placed in self.placed)
        ]
        if any(width > self.left[kind] for width, kind in missing):
            return False
        return self._place_all(sorted(missing, key=lambda block: -block[0]))

    def _place_all(self, missing: Sequence[tuple[int, PlacementType]]) -> bool:
        if not missing:
            return True
        width, kind = missing[0]
        tried = set[int]()
        for index in self._by_preference(kind):
            room = self.room[index]
            if room < width or room in tried:
                continue
            tried.add(room)  # Another node with as much room makes no difference.
            self.put(kind, index, width)
            if self._place_all(missing[1:]):
                return True
            self.put(kind, index, -width)
        return False

    def place_rest(self, units: Units) -> None:
        """Place what is left: auxiliaries first, the widest units first of all; single devices fill the rest."""
        order = sorted(self.left, key=lambda kind: (kind.is_primary, -units.get(kind, 1)))
        for kind in order:
            unit = 1 if kind.is_primary else units.get(kind, 1)
            while (left := self.left[kind]) >= unit and max(self.room) >= unit:
                index = self._by_preference(kind)[0]
                if self.room[index] < unit:
                    index = max(range(len(self.room)), key=self.room.__getitem__)
                num = min(left, self.room[index])
                self.put(kind, index, num - num % unit)
        for kind in order:  # Devices that make up no unit, or found no node with room for one.
            while left := self.left[kind]:
                index = self._by_preference(kind)[0]
                self.put(kind, index, min(left, self.room[index]))

    def _by_preference(self, kind: PlacementType) -> list[int]:
        """Return nodes with room, the best for this type first."""
        left = self.left[kind]
        open_nodes = [index for index, room in enumerate(self.room) if room]
        return sorted(
            open_nodes,
            key=lambda index: (
                kind not in self.placed[index],
                self.room[index] < left,
                -self.room[index] if self.room[index] < left else 0,
                -self.kept[index][kind],
            ),
        )

    def put(self, kind: PlacementType, index: int, num: int) -> None:
        """Place devices of a type on a node; a negative number takes them away again."""
        self.left[kind] -= num
        self.room[index] -= num
        self.placed[index][kind] = self.placed[index].get(kind, 0) + num
        if not self.placed[index][kind]:
            del self.placed[index][kind]

    def placement(self) -> Placement:
        types = [pair for row, placed in zip(self.nodes, self.placed, strict=True) for pair in self._types(row, placed)]
        return Placement(tuple(types))

    def _types(self, row: Sequence[int], placed: Mapping[PlacementType, int]) -> list[tuple[int, PlacementType]]:
        """Return which devices of a node get which type: those that had it before, then in order, primaries first."""
        todo = dict(placed)
        chosen: dict[int, PlacementType] = {}
        for device_id in row:
            kind = None if self.before is None else self.before.of(device_id)
            if kind is not None and todo.get(kind):
                chosen[device_id] = kind
                todo[kind] -= 1
        rest = [kind for kind in PlacementType for _ in range(todo.get(kind, 0))]
        chosen.update(zip((device_id for device_id in row if device_id not in chosen), rest, strict=True))
        return list(chosen.items())
