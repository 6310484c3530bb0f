"""The placement types that a request class fits on, at which degrees, and its virtual replica V*.

Theory of operation. Stages of a device run one after another, so a device needs the weights of all its stages plus the
largest activation of one of them. Activations depend on the degree, so memory does: HunyuanVideo's 720p x 65 fits on
EDC from degree 4 on. A group of primaries runs D at its degree; other stages of the same group run on a subset of it,
at their optimal degree or less. An auxiliary runs its one stage at the optimal degree or less.

V* is the first virtual replica of V0, V1, V2, V3 of which the class fits on every type.

Source: TridentServe §6.1, "Single-Request Solution". The degree at which it evaluates memory is not said. Here D may
use any degree that was profiled: whether a degree is efficient is for dispatch to decide (its constraint C0). C is held
to its optimal degree, so that FLUX at 4096 px, which would fit on DC with C at degree 4, has V2 as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilework.policy.placement.pack import can_place
from tilework.policy.placement.placement import Nodes
from tilework.policy.placement.roles import PlacementType, Role, VirtualReplica

FitsAt = Mapping[PlacementType, Sequence[int]]
"""The degrees at which a request class fits on each placement type, ascending; without types on which it never fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory that one request class takes, on each device of a group, in bytes.

    Attributes:
        weights: the weights of each role's stages.
        activations: of each role the largest activation at each degree that was profiled. A role that a pipeline does
            not have is missing here, and takes nothing.
        optimal: the highest degree that is efficient, of each role; 1 where a role is missing. Not used for D.
        usable_bytes: what a device has for weights and activations.
    """

    weights: Mapping[Role, int]
    activations: Mapping[Role, Mapping[int, int]]
    optimal: Mapping[Role, int]
    usable_bytes: int

    @property
    def room_bytes(self) -> int:
        """Bytes for activations on a device that holds the stages of all roles; negative if it cannot hold them."""
        return self.usable_bytes - sum(self.weights.values())


def fits_at(footprint: Footprint) -> dict[PlacementType, tuple[int, ...]]:
    """Return the degrees at which the class fits on each type: those of D on primaries, of E or C on auxiliaries.

    An auxiliary's degrees go up to its optimal one: the last is the unit to give it, the first the least.
    """
    found = {kind: tuple(_degrees(footprint, kind)) for kind in PlacementType}
    return {kind: degrees for kind, degrees in found.items() if degrees}


def _degrees(footprint: Footprint, kind: PlacementType) -> list[int]:
    room = footprint.usable_bytes - sum(footprint.weights.get(role, 0) for role in kind.roles)
    leader = Role.D if kind.is_primary else kind.roles[0]
    profiled = footprint.activations.get(leader, {1: 0})
    most = max(profiled) if kind.is_primary else footprint.optimal.get(leader, 1)
    others = [role for role in kind.roles if role is not leader]
    return [
        degree
        for degree, num_bytes in sorted(profiled.items())
        if degree <= most
        and num_bytes <= room
        and all(_fits_within(footprint, role, min(degree, footprint.optimal.get(role, 1)), room) for role in others)
    ]


def _fits_within(footprint: Footprint, role: Role, most: int, room: int) -> bool:
    """Return whether the role's largest activation fits into `room` at some degree up to `most`."""
    profiled = footprint.activations.get(role, {1: 0})
    return any(degree <= most and num_bytes <= room for degree, num_bytes in profiled.items())


def virtual_replica(fits: FitsAt, widest: int | None = None) -> VirtualReplica | None:
    """Return V*: the first virtual replica with a fitting degree on each of its types; None if there is none.

    `widest` is the most devices of a node, if no wider group can be made.
    """
    return next((one for one in VirtualReplica if can_run(fits, one, widest)), None)


def is_placeable(fits: FitsAt, nodes: Nodes) -> bool:
    """Return whether nodes are enough for the class by itself: for a block of each type of some virtual replica."""
    return any(
        can_run(fits, one) and can_place({kind: fits[kind][0] for kind in one.types}, nodes) for one in VirtualReplica
    )


def can_run(fits: FitsAt, replica: VirtualReplica, widest: int | None = None) -> bool:
    """Return whether a class fits on every type of a virtual replica, on no more than `widest` devices each."""
    return all(any(widest is None or degree <= widest for degree in fits.get(kind, ())) for kind in replica.types)
