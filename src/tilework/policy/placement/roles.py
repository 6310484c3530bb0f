"""Roles of stages, the placement types that are sets of roles, and the virtual replicas that cover all roles.

Theory of operation. Whatever a pipeline's stages are called, those with steps take most of the time. What comes before
them prepares their inputs (role E, encode), what comes after makes the result of their outputs (C, decode), and they
are role D, with all that runs between them. A device holds the stages of some roles: its *placement type*. Types with D
are *primaries*: D is the bottleneck, so a request follows its D. The others are *auxiliaries*, which relieve a primary
of memory. EC is no type: sharing a device with E or C makes neither D faster nor its traffic less.

A request runs on a *virtual replica*: a primary, and an auxiliary for each role that the primary lacks. In the order
V0, V1, V2, V3 the replicas send ever more between devices: nothing, the condition (E to D), the latent (D to C), both.

Source: TridentServe §6.1, "Definition of Placement and Placement Type", and its table 3. Its order of the two middle
ones rests on a condition that is smaller than the latent. In bytes that is wrong for FLUX below about 2,900 px (4.2 MB
against 0.5 MB at 1024 px). Both take less than 2 ms. The order is kept: it is one of how much weight leaves the
primary.
"""

from __future__ import annotations

from enum import Enum, StrEnum

from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import DeviceKind, Stage


class Role(StrEnum):
    """The place of a stage in its pipeline: before the steps (E), the steps and all between (D), after them (C)."""

    E = "E"
    D = "D"
    C = "C"


def role_of(graph: Graph, stage: Stage) -> Role | None:
    """Return the role of a stage of this graph; None if it runs on a CPU slot, which holds no weights on a device.

    All stages of a pipeline without steps are D. Raises KeyError for a stage of another graph.
    """
    if graph.stage(stage.name).kind is DeviceKind.CPU:
        return None
    names = [one.name for one in graph.stages]
    stepped = [names.index(one.name) for one in graph.stepped] or [0, len(names) - 1]
    index = names.index(stage.name)
    return Role.E if index < stepped[0] else Role.C if index > stepped[-1] else Role.D


class PlacementType(StrEnum):
    """The roles whose stages are resident on a device, in the paper's order: P0 to P3, then A0 and A1."""

    EDC = "EDC"
    DC = "DC"
    ED = "ED"
    D = "D"
    E = "E"
    C = "C"

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(Role(letter) for letter in self.value)

    @property
    def is_primary(self) -> bool:
        return Role.D in self.roles


class VirtualReplica(Enum):
    """A primary with the auxiliaries that it lacks, in the order of what goes between their devices.

    `types` are all of them, the primary first.
    """

    V0 = (PlacementType.EDC,)
    V1 = (PlacementType.DC, PlacementType.E)
    V2 = (PlacementType.ED, PlacementType.C)
    V3 = (PlacementType.D, PlacementType.E, PlacementType.C)

    def __init__(self, *types: PlacementType) -> None:
        self.types = types
        self.primary, *auxiliaries = types
        self.auxiliaries = tuple(auxiliaries)

    def __str__(self) -> str:
        return self.name
