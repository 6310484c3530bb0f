"""Roles of stages in graphs of all kinds, placement types, virtual replicas and placements."""

from __future__ import annotations

import pytest

from placements import even_nodes, nodes_of
from stages import STAGES, stage_of
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import DeviceKind, StageSpec, StepShare
from tilework.policy.placement.placement import Placement, colocated
from tilework.policy.placement.roles import PlacementType, Role, VirtualReplica, role_of

EDC, DC, ED, D, E, C = PlacementType


def chain(*stages: tuple[str, StepShare | None, DeviceKind]) -> Graph:
    """Stages one after another."""
    specs = [
        StageSpec(name=name, inputs=(f"{index}",), outputs=(f"{index + 1}",), steps=steps, device_kind=kind)
        for index, (name, steps, kind) in enumerate(stages)
    ]
    return Graph("any", tuple(specs))


ON, CPU, STEPS = DeviceKind.ACCELERATOR, DeviceKind.CPU, StepShare()


@pytest.mark.parametrize(
    ("graph", "roles"),
    [
        (chain(("a", None, ON), ("b", STEPS, ON), ("c", None, ON)), "EDC"),
        (chain(("a", None, ON), ("b", None, ON), ("c", STEPS, ON)), "EED"),
        (chain(("a", STEPS, ON), ("b", None, ON), ("c", STEPS, ON), ("d", None, ON), ("e", None, ON)), "DDDCC"),
        (chain(("a", None, CPU), ("b", STEPS, ON), ("c", None, CPU), ("d", None, ON)), "-D-C"),
        (chain(("a", None, ON), ("b", None, ON)), "DD"),
    ],
)
def test_the_role_follows_from_the_place_among_the_steps(graph: Graph, roles: str) -> None:
    assert "".join(role_of(graph, stage) or "-" for stage in graph.stages) == roles


def test_the_shipped_graph_has_all_three_roles() -> None:
    graph = latent_diffusion("flux")
    assert [role_of(graph, stage_of("flux", name)) for name in STAGES] == list(Role)


def test_a_stage_of_another_graph_has_no_role_here() -> None:
    with pytest.raises(KeyError):
        role_of(chain(("a", STEPS, ON)), stage_of("flux", STAGES[0]))


def test_each_virtual_replica_covers_all_roles_once() -> None:
    for replica in VirtualReplica:
        roles = [role for kind in replica.types for role in kind.roles]
        assert sorted(roles) == sorted(Role)
        assert [kind for kind in replica.types if kind.is_primary] == [replica.primary]
    assert [replica.types for replica in VirtualReplica] == [(EDC,), (DC, E), (ED, C), (D, E, C)]


def test_a_placement_in_words() -> None:
    nodes = even_nodes(2, 4)
    types = [EDC] * 4 + [ED, ED, C, C]
    placement = Placement(tuple(zip([*nodes[0], *nodes[1]], types, strict=True)))
    assert str(placement) == "4 EDC, 2 ED, 2 C"
    assert [placement.of(one) for one in (4, 6, 7, 9)] == [ED, C, C, None]
    assert placement == Placement(tuple(reversed(placement.types)))
    assert hash(placement) == hash(Placement(tuple(reversed(placement.types))))


def test_colocated() -> None:
    assert str(colocated(nodes_of((3, 2)))) == "5 EDC"
