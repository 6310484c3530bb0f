"""A placement for few devices: the fewest on which every request class can run, and the rest where most is to do.

Theory of operation. On few devices the virtual replicas that the classes would choose do not fit beside each other. A
device with fewer stages has more memory left, so what can run on V0 can run on any replica, and V3 can run all. So
classes share: where V2 is there, V0 needs no devices of its own, and V3 can stand for V1 and V2. All ways are tried:
for each type no block, or one of a width that some class needs. Of those that serve all classes and fit on the nodes
the one with the fewest devices is kept, and of these the one whose requests run on the earliest replicas. Each further
device goes to the type that has most to do per device.

Source: TridentServe appendix C.1 says only that tiny budgets prioritise feasibility over proportion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from tilework.policy.placement.demand import ClassDemand, busy_ns
from tilework.policy.placement.pack import can_place, pack
from tilework.policy.placement.placement import Nodes, Placement, widest
from tilework.policy.placement.roles import PlacementType, VirtualReplica
from tilework.policy.placement.split import Counts, Rates

Assigned = Mapping[VirtualReplica, Sequence[ClassDemand]]
"""The classes by the replica on which they run."""


def smallest_placement(
    demands: Sequence[ClassDemand], nodes: Nodes, rates: Rates, before: Placement | None
) -> tuple[Placement, Assigned]:
    """Return the placement, and which classes run on which replica.

    `demands` is not empty, and `can_share` the nodes.
    """
    found = _smallest_blocks(demands, nodes)
    assert found is not None, "the classes cannot all run on these nodes"
    blocks, assigned = found
    loads = {
        kind: sum(busy_ns(classes, kind, rates) for replica, classes in assigned.items() if kind in replica.types)
        for kind in blocks
    }
    counts = dict(blocks)
    for _ in range(sum(len(node) for node in nodes.values()) - sum(blocks.values())):
        counts[max(counts, key=lambda kind: loads[kind] / counts[kind])] += 1
    placement = pack(counts, nodes, blocks, blocks, before)
    assert placement is not None, "blocks that fit can be placed"
    return placement, assigned


def can_share(demands: Sequence[ClassDemand], nodes: Nodes) -> bool:
    """Return whether all these classes can run on the nodes, each on some virtual replica."""
    unlike = {tuple((kind, degrees[0]) for kind, degrees in demand.fits.items()): demand for demand in demands}
    return _smallest_blocks(tuple(unlike.values()), nodes) is not None


def _smallest_blocks(demands: Sequence[ClassDemand], nodes: Nodes) -> tuple[Counts, Assigned] | None:
    wide = widest(nodes)
    widths = [
        sorted({0, *(demand.fits[kind][0] for demand in demands if kind in demand.fits)}) for kind in PlacementType
    ]
    ways = product(*[[width for width in some if width <= wide] for some in widths])
    candidates = []
    for way in ways:
        blocks = {kind: width for kind, width in zip(PlacementType, way, strict=True) if width}
        assigned = _assign(demands, blocks)
        if assigned is not None:
            order = [index for index, replica in enumerate(VirtualReplica) for _ in assigned.get(replica, ())]
            candidates.append((sum(way), order, way, blocks, assigned))
    for _, _, _, blocks, assigned in sorted(candidates, key=lambda candidate: candidate[:3]):
        if can_place(blocks, nodes):
            return blocks, assigned
    return None


def _assign(demands: Sequence[ClassDemand], blocks: Counts) -> Assigned | None:
    """Assign classes to the first replica with blocks that are wide enough; None if one has none, or a block no use."""
    assigned: dict[VirtualReplica, list[ClassDemand]] = {}
    for demand in demands:
        for replica in VirtualReplica:
            if all(kind in demand.fits and demand.fits[kind][0] <= blocks.get(kind, 0) for kind in replica.types):
                assigned.setdefault(replica, []).append(demand)
                break
        else:
            return None
    used = {kind for replica in assigned for kind in replica.types}
    return assigned if used == blocks.keys() else None
