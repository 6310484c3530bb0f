"""Profiles of request classes: those of the shipped tables against what their files say, and small ones by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from builders import PIPELINE, request, row, shipped, table
from placements import C, D, E, flux_footprint, video_footprint
from stages import DECODE, DIFFUSE, ENCODE, at_start
from tilework.core.component import Component
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_S
from tilework.cost.shipped import shipped_path
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.policy.placement.feasible import Footprint, fits_at, virtual_replica
from tilework.policy.placement.launch import Launch
from tilework.policy.placement.profile import ClassProfile, class_profile
from tilework.policy.placement.roles import PlacementType, VirtualReplica

TABLES = ("sd3medium_l20", "flux1_l20", "cogvideox15_l20", "hunyuanvideo_l20")


def asked(costs: CostTable, size: str, **more: Any) -> Request:
    one = replace(request("a", steps=costs.steps or 10), pipeline=costs.rows[0].pipeline, shape=Shape.parse(size))
    return replace(one, **more)


def profiled(costs: CostTable, size: str, **more: Any) -> ClassProfile:
    return class_profile(asked(costs, size, **more), TableCosts(costs), costs.memory_bytes)


@pytest.mark.parametrize("name", TABLES)
def test_the_shipped_tables_fit_where_their_files_say(name: str) -> None:
    """Each size by its V*, its latency, and the least degree on each type."""
    path, costs = shipped_path(name), shipped(name)
    assert path is not None
    checks = json.loads(path.read_text("utf-8"))["checks"]
    for size, replica in checks["virtual_replica"].items():
        profile = profiled(costs, size)
        assert str(virtual_replica(profile.fits)) == replica, size
        least = {kind: profile.fits[kind][0] if kind in profile.fits else None for kind in PlacementType}
        assert {kind.value: least[kind] for kind in PlacementType} == checks["least_degree_by_placement"][size]
        assert profile.latency_ns / NS_PER_S == pytest.approx(checks["best_latency_s"][size], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("flux1_l20", "3072x3072", flux_footprint(3072)),
        ("flux1_l20", "4096x4096", flux_footprint(4096)),
        ("hunyuanvideo_l20", "1280x720x129", video_footprint(720, 129)),
    ],
)
def test_a_footprint_has_the_weights_and_activations_of_the_table(name: str, size: str, expected: Footprint) -> None:
    """A decode runs on two devices of a wider group, so it takes there what it takes on two."""
    found = profiled(shipped(name), size).footprint
    assert found.weights == pytest.approx(expected.weights, rel=1e-3)
    assert found.usable_bytes == expected.usable_bytes
    diffuse, decode = dict(expected.activations[D]), dict(expected.activations[C])
    assert found.activations[D] == pytest.approx(diffuse, rel=5e-3)
    assert found.activations[C] == pytest.approx(decode | {4: decode[2], 8: decode[2]}, rel=5e-3)
    assert (found.optimal[E], found.optimal[C]) == (1, 2)


def test_device_time_is_that_of_all_devices_at_optimal_degrees() -> None:
    """4096 px: 4 steps of 5.66 s on 8 devices, and 6.76 s of decode on 2."""
    profile = profiled(shipped("flux1_l20"), "4096x4096")
    seconds = {role: one_ns / NS_PER_S for role, one_ns in profile.device_ns.items()}
    assert seconds == pytest.approx({E: 0.12, D: 4 * 8 * 5.66, C: 2 * 6.7647}, rel=1e-3)
    demand = profile.demand(3.0)
    assert (demand.count, demand.fits, demand.device_ns) == (3.0, profile.fits, profile.device_ns)


def test_an_exact_request_has_one_device_for_each_stage() -> None:
    profile = profiled(shipped("flux1_l20"), "4096x4096", exact=True)
    assert set(profile.fits.values()) == {(1,)}
    assert profile.device_ns == profile.run_ns


def test_without_weights_or_limits_all_stages_fit_on_each_device() -> None:
    costs = table(degrees=(1, 2, 4))
    profile = class_profile(request("a"), TableCosts(costs), None)
    assert virtual_replica(profile.fits) is VirtualReplica.V0
    assert profile.fits[PlacementType.EDC] == (1, 2, 4)
    large = class_profile(asked(shipped("flux1_l20"), "4096x4096"), TableCosts(shipped("flux1_l20")), None)
    assert virtual_replica(large.fits) is VirtualReplica.V0


def test_a_component_of_two_stages_of_a_role_counts_once() -> None:
    graph = shipped("flux1_l20").graph("flux.1")
    twice = replace(graph.specs[0], name="again", inputs=("prompt",), outputs=("more",))
    steps = replace(graph.specs[1], inputs=("conditioning", "more"))
    graph = replace(graph, pipeline=PIPELINE, specs=(graph.specs[0], twice, steps, graph.specs[2]))
    costs = CostTable(
        hardware="toy",
        rows=tuple(row(128 * 128, 0.1, stage=one) for one in (ENCODE, "again", DIFFUSE, DECODE)),
        graphs={PIPELINE: graph},
        components={PIPELINE: {"encode": Component("text", 7), "diffuse": Component("dit", 20)}},
        load_bytes_per_s={},
    )
    profile = class_profile(request("a"), TableCosts(costs), 30)
    assert profile.footprint.weights == {E: 7, D: 20, C: 0}
    assert fits_at(profile.footprint) == profile.fits


def test_a_launch_can_start_a_chunk_of_steps() -> None:
    """Steps of 0.1 s: three in 0.35 s, and one in no time at all."""
    one, costs = request("a", steps=4), TableCosts(table())
    for chunk_ns, num_steps in ((NS_PER_S * 35 // 100, 3), (0, 1), (NS_PER_S, 4)):
        launch = Launch((0,), one, at_start(one).advanced(1), costs, "why")
        launch.run(D, (3,), chunk_ns=chunk_ns)
        assert [(start.stage.name, start.num_steps) for start in launch.starts] == [(DIFFUSE, num_steps)]
        assert launch.role is (C if num_steps == 4 else D)
