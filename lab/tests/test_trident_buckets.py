"""How many devices TridentServe's baselines give to each degree and role."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import shipped
from placements import even_nodes, nodes_of
from policy.published.l20_requests import TABLES, D, notes, of_size
from tilework.cost.table_costs import TableCosts
from tilework.policy.placement.placement import Nodes
from tilework.policy.placement.roles import PlacementType, Role
from tilework_lab.policies.trident_baselines.baselines import pooled_buckets
from tilework_lab.policies.trident_baselines.layout import Layout, Line, bucket_sizes, cut_groups, line_of
from tilework_lab.policies.trident_baselines.profiles import SeenRequests

EDC = PlacementType.EDC


def published_buckets(name: str, mix: str) -> dict[int, int]:
    sizes = zip((8, 4, 2, 1), notes(name)["static_baselines"]["bucket_gpus_degree_8_4_2_1"][mix], strict=True)
    return {degree: num for degree, num in sizes if num}


def published_pools(name: str) -> dict[Role, int]:
    return dict(zip(Role, notes(name)["static_baselines"]["stage_gpus_encode_diffuse_decode"], strict=True))


@cache
def seen(name: str, mix: str) -> SeenRequests:
    """A mix as seen by a policy: of 10,000 requests."""
    found, costs = SeenRequests(), TableCosts(shipped(name))
    for size, share in notes(name)["mixes"][mix].items():
        asked = of_size(name, size)
        for _ in range(round(10_000 * share)):
            found.note(asked, costs)
    return found


def widths(lines: Iterable[Line]) -> dict[tuple[str, int | None], int]:
    """The devices of each line."""
    return {(line.kind.value, line.degree): sum(map(len, line.groups)) for line in lines}


# How many devices each degree gets.


@pytest.mark.parametrize("mix", ["light", "medium", "heavy"])
@pytest.mark.parametrize("name", TABLES)
def test_the_buckets_of_table_6(name: str, mix: str) -> None:
    """By the paper's optimal degree of each size."""
    shares: dict[int, float] = {}
    for size, share in notes(name)["mixes"][mix].items():
        degree = notes(name)["degree_of_size"][size]
        shares[degree] = shares.get(degree, 0) + share
    assert bucket_sizes(shares, 128) == published_buckets(name, mix)


@pytest.mark.parametrize(
    ("shares", "num_devices", "sizes"),
    [
        ({8: 1.0, 1: 1.0}, 24, {8: 8, 1: 16}),  # 1.5 groups: ties go down.
        ({8: 1.0, 1: 99.0}, 24, {8: 8, 1: 16}),  # At least one group.
        ({4: 1.0, 2: 1.0}, 6, {4: 4, 2: 2}),
        ({4: 3.0, 2: 3.0, 1: 1.0}, 8, {4: 4, 2: 2, 1: 2}),
        ({4: 1.0, 2: 1.0, 1: 1.0}, 4, {2: 2, 1: 2}),  # Too few devices for one group each: the widest has none.
        ({4: 1.0}, 6, {4: 4, 1: 2}),
        ({1: 1.0}, 3, {1: 3}),
    ],
)
def test_buckets_are_multiples_and_degree_1_has_the_rest(
    shares: dict[int, float], num_devices: int, sizes: dict[int, int]
) -> None:
    assert bucket_sizes(shares, num_devices) == sizes


@given(st.dictionaries(st.sampled_from((1, 2, 4, 8)), st.floats(0.001, 1), min_size=1), st.integers(1, 100), st.data())
def test_buckets_are_all_devices(shares: dict[int, float], num_devices: int, data: st.DataObject) -> None:
    sizes = bucket_sizes(shares, num_devices)
    assert sum(sizes.values()) == num_devices
    assert all(num > 0 and num % degree == 0 for degree, num in sizes.items())
    if num_devices >= sum(shares):
        assert shares.keys() <= sizes.keys()
    nodes = nodes_of(data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=12)))
    num_devices = sum(map(len, nodes.values()))
    cut = cut_groups(bucket_sizes(shares, num_devices), nodes.values())
    devices = [device for of_degree in cut.values() for group in of_degree for device in group]
    assert len(devices) == len(set(devices)) <= num_devices
    node_of = {one: node for node, row in nodes.items() for one in row}
    for degree, of_degree in cut.items():
        assert all(len(group) == degree and len({node_of[one] for one in group}) == 1 for group in of_degree)


def test_nodes_that_leave_devices_over() -> None:
    """Two nodes of six: the buckets ask for three groups of four, and only two fit. What is left suits degree 2."""
    assert cut_groups({4: 8, 2: 2, 1: 2}, [range(6), range(6, 12)]) == {
        4: ((0, 1, 2, 3), (8, 9, 10, 11)),
        2: ((4, 5),),
        1: ((6,), (7,)),
    }
    assert cut_groups({4: 12, 2: 2}, [range(7), range(7, 14)]) == {
        4: ((0, 1, 2, 3), (8, 9, 10, 11)),
        2: ((4, 5), (12, 13)),
    }
    assert cut_groups({4: 12}, [range(6), range(6, 12)]) == {4: ((0, 1, 2, 3), (8, 9, 10, 11))}


def test_a_request_without_a_bucket_goes_to_the_next_narrower_one_else_to_the_next_wider() -> None:
    lines = [Line(EDC, ((0, 1, 2, 3),), 4), Line(EDC, ((4, 5),), 2)]
    assert [line_of(lines, D, degree) for degree in (8, 4, 2, 1)] == [0, 0, 1, 1]


# What devices are for.


def lines_by(layout: Layout, name: str, mix: str = "medium", nodes: Nodes | None = None) -> tuple[Line, ...]:
    return layout.lines(nodes or even_nodes(16), seen(name, mix))


@pytest.mark.parametrize("name", TABLES)
def test_one_degree_is_half_of_the_optimum_of_the_largest(name: str) -> None:
    """The rule gives 1 for SD3, whose largest size has an optimum of 2 by our costs; the paper says 2."""
    by_rule = {"sd3medium_l20": 1}.get(name, 4)
    assert widths(lines_by(Layout(grouping="one_degree"), name)) == {("EDC", by_rule): 128}
    published = notes(name)["static_baselines"]["B1_degree"]
    assert widths(lines_by(Layout(grouping="one_degree", degree=published), name)) == {("EDC", published): 128}


@pytest.mark.parametrize("name", TABLES[1:])
def test_buckets_by_what_was_seen_are_those_of_table_6(name: str) -> None:
    sizes = {("EDC", degree): num for degree, num in published_buckets(name, "medium").items()}
    assert widths(lines_by(Layout(grouping="buckets"), name)) == sizes


def test_pools_are_as_published_for_flux() -> None:
    """Table 7 says 6, 96 and 26; the rule of the appendix gives 1, 101 and 26 by our costs."""
    pooled = partial(Layout, grouping="per_request", is_pooled=True)
    assert widths(lines_by(pooled(), "flux1_l20")) == {("D", None): 101, ("E", None): 1, ("C", None): 26}
    given = pooled(pools=published_pools("flux1_l20"))
    assert widths(lines_by(given, "flux1_l20")) == {("D", None): 96, ("E", None): 6, ("C", None): 26}


def test_pools_that_are_not_all_devices_are_proportions() -> None:
    """Table 7 says 4, 102 and 18 of 128 for CogVideoX1.5."""
    layout = Layout(grouping="per_request", is_pooled=True, pools=published_pools("cogvideox15_l20"))
    assert widths(lines_by(layout, "cogvideox15_l20")) == {("D", None): 105, ("E", None): 4, ("C", None): 19}


def test_each_pool_has_buckets_of_its_own() -> None:
    """Of FLUX's decodes, a quarter has an optimal degree of 2. The shares of D are given."""
    shares = published_buckets("flux1_l20", "medium")
    layout = pooled_buckets(shares, published_pools("flux1_l20")).layout
    assert widths(lines_by(layout, "flux1_l20")) == {
        ("D", 8): 8,
        ("D", 4): 12,
        ("D", 2): 20,
        ("D", 1): 56,
        ("E", 1): 6,
        ("C", 2): 6,
        ("C", 1): 20,
    }


def test_groups_are_within_nodes() -> None:
    """A degree that no node is wide enough for is halved."""
    lines = lines_by(Layout(grouping="buckets"), "flux1_l20", nodes=nodes_of((4,) * 8))
    assert [line.degree for line in lines] == [4, 2, 1]
    assert all(group[0] // 4 == group[-1] // 4 for line in lines for group in line.groups)


def test_fewer_devices_than_roles_have_all_stages() -> None:
    lines = lines_by(Layout(grouping="per_request", is_pooled=True), "flux1_l20", nodes=nodes_of((2,)))
    assert widths(lines) == {("EDC", None): 2}
