"""Pools of devices by role, of the baselines of TridentServe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placements import even_nodes
from tilework.policy.placement.roles import Role
from tilework_lab.policies.trident_baselines.layout import disaggregated, pool_sizes

E, D, C = Role


def test_disaggregated_fills_whole_nodes_with_one_role() -> None:
    nodes = even_nodes(16)
    placement = disaggregated(nodes, {E: 6, D: 96, C: 26})
    assert str(placement) == "96 D, 6 E, 26 C"
    mixed = [node for node, row in nodes.items() if len({placement.of(device_id) for device_id in row}) > 1]
    assert len(mixed) == 1


@pytest.mark.parametrize(
    ("mean_s", "sizes"),
    [
        ((0.12, 8.249, 2.089), (1, 101, 26)),  # FLUX, medium. Published: 6, 96, 26.
        ((0.2, 32.744, 4.098), (1, 113, 14)),  # HunyuanVideo, medium. Published: 4, 112, 12.
    ],
)
def test_pools_by_mean_latency(mean_s: tuple[float, ...], sizes: tuple[int, ...]) -> None:
    rates = {role: 1 / mean for role, mean in zip(Role, mean_s, strict=True)}
    assert pool_sizes(128, rates) == dict(zip(Role, sizes, strict=True))


def test_a_weight_makes_a_pool_larger() -> None:
    assert pool_sizes(12, {E: 1.0, D: 1.0}, {E: 2.0}) == {E: 8, D: 4}


@given(st.integers(3, 200), st.fixed_dictionaries(dict.fromkeys(Role, st.floats(0.001, 1000))))
def test_pools_are_all_devices_and_none_is_empty(num: int, rates: dict[Role, float]) -> None:
    sizes = pool_sizes(num, rates)
    assert sum(sizes.values()) == num
    assert min(sizes.values()) >= 1
    assert str(disaggregated(even_nodes(num, 1), sizes)).count(",") == 2
