"""A placement: the type of each device.

For a model that exceeds one device, the devices are those of a cost table in cells (`cost.table.in_cells`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilework.policy.placement.roles import PlacementType

Nodes = Mapping[int, Sequence[int]]
"""The devices of each node, ascending."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement type of each device. Equal if devices and types are."""

    types: tuple[tuple[int, PlacementType], ...]
    _of: dict[int, PlacementType] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", tuple(sorted(self.types)))
        object.__setattr__(self, "_of", dict(self.types))
        assert len(self._of) == len(self.types), "a device has two types"

    def of(self, device_id: int) -> PlacementType | None:
        """Return the type of a device; None if it has none."""
        return self._of.get(device_id)

    def counts(self) -> dict[PlacementType, int]:
        """Return how many devices each type has, without types that have none."""
        found = Counter(kind for _, kind in self.types)
        return {kind: found[kind] for kind in PlacementType if found[kind]}

    def __str__(self) -> str:
        return counts_text(self.counts())


def counts_text(counts: Mapping[PlacementType, int]) -> str:
    """Return counts in words, such as "96 EDC, 24 ED, 8 C"."""
    return ", ".join(f"{counts[kind]} {kind}" for kind in PlacementType if counts.get(kind)) or "nothing"


def widest(nodes: Nodes) -> int:
    """Return the most devices of a node; 0 without nodes."""
    return max(map(len, nodes.values()), default=0)


def colocated(nodes: Nodes) -> Placement:
    """Return the placement with all roles on each device."""
    return Placement(tuple((device_id, PlacementType.EDC) for row in nodes.values() for device_id in row))
