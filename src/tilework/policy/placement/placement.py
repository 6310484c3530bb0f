"""A placement: the type of each device. Devices that hold a model only together are one cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilework.core.work import Group
from tilework.policy.placement.roles import PlacementType

Cell = Group
"""What is placed as one: a device, or the devices of a node that hold a model together. The lowest id is first."""

Nodes = Mapping[int, Sequence[Cell]]
"""The cells of each node, in order. Where a function counts, it counts cells: a degree of 4 is 4 cells."""


def cells(devices_by_node: Mapping[int, Sequence[int]], size: int = 1) -> dict[int, tuple[Cell, ...]]:
    """The cells of `size` neighbouring devices each. What is left of a node is in no cell.

    `size` is the smallest number of devices on which the largest component of a model fits.

    Source: TridentServe §2.2 and §7, "treating multiple devices as one"; its appendix E.2 is missing in our text.
    """
    assert size >= 1, "a cell has at least one device"
    found = {}
    for node, devices in sorted(devices_by_node.items()):
        ids = sorted(devices)
        found[node] = tuple(tuple(ids[first : first + size]) for first in range(0, len(ids) - size + 1, size))
    return found


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement type of each cell. Equal if cells and types are; `of` gives the type of any device of a cell."""

    types: tuple[tuple[Cell, PlacementType], ...]
    _of: dict[int, PlacementType] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", tuple(sorted(self.types)))
        object.__setattr__(self, "_of", {device: kind for cell, kind in self.types for device in cell})
        assert len(self._of) == sum(len(cell) for cell, _ in self.types), "a device is in two cells"

    def of(self, device_id: int) -> PlacementType | None:
        """The type of a device; None if it is in no cell."""
        return self._of.get(device_id)

    def cells(self, kind: PlacementType) -> tuple[Cell, ...]:
        """The cells of a type, in order."""
        return tuple(cell for cell, its in self.types if its is kind)

    def counts(self) -> dict[PlacementType, int]:
        """How many cells each type has, without types that have none."""
        found = Counter(kind for _, kind in self.types)
        return {kind: found[kind] for kind in PlacementType if found[kind]}

    def __str__(self) -> str:
        return counts_text(self.counts()) + self._size_text()

    def _size_text(self) -> str:
        size = max((len(cell) for cell, _ in self.types), default=1)
        return f", in cells of {size} devices" if size > 1 else ""


def counts_text(counts: Mapping[PlacementType, int]) -> str:
    """Counts in words, such as "96 EDC, 24 ED, 8 C"."""
    return ", ".join(f"{counts[kind]} {kind}" for kind in PlacementType if counts.get(kind)) or "nothing"


def widest(nodes: Iterable[Sequence[Cell]]) -> int:
    """The most cells of a node; 0 without nodes."""
    return max((len(cells) for cells in nodes), default=0)
