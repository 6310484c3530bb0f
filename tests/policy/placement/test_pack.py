"""Packing onto nodes: whole nodes, blocks on one node, few mixed nodes, and devices that keep their type."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placements import even_nodes, nodes_of, on_a_node
from tilework.policy.placement.pack import can_place, pack
from tilework.policy.placement.placement import Nodes, Placement
from tilework.policy.placement.roles import PlacementType

EDC, DC, ED, D, E, C = PlacementType
WIDTHS = st.dictionaries(st.sampled_from(PlacementType), st.sampled_from((1, 2, 4)))
BLOCKS = st.dictionaries(st.sampled_from(PlacementType), st.integers(1, 4))


def texts(placement: Placement | None, nodes: Nodes) -> list[str]:
    """The types of each node's devices, in order."""
    assert placement is not None
    return [" ".join(str(placement.of(device_id)) for device_id in row) for row in nodes.values()]


@st.composite
def counted(draw: st.DrawFn, total: int) -> dict[PlacementType, int]:
    kinds = draw(st.lists(st.sampled_from(PlacementType), min_size=1, unique=True))
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=len(kinds) - 1, max_size=len(kinds) - 1)))
    return {
        kind: end - begin for kind, begin, end in zip(kinds, [0, *cuts], [*cuts, total], strict=True) if end > begin
    }


@given(counted(40), WIDTHS)
def test_at_most_one_mixed_node_less_than_types_with_a_remainder(
    counts: dict[PlacementType, int], units: dict[PlacementType, int]
) -> None:
    nodes = even_nodes(5)
    placement = pack(counts, nodes, {}, units)
    assert placement is not None
    assert placement.counts() == counts
    mixed = sum(len([num for num in row.values() if num]) > 1 for row in on_a_node(placement, nodes))
    remainders = sum(num % 8 > 0 for num in counts.values())
    assert mixed <= max(0, remainders - 1)


@settings(max_examples=300)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), BLOCKS, st.data())
def test_blocks_lie_on_one_node_whenever_they_can(
    sizes: list[int], blocks: dict[PlacementType, int], data: st.DataObject
) -> None:
    nodes, counts = nodes_of(sizes), data.draw(counted(sum(sizes)))
    widths = {kind: blocks.get(kind, 1) for kind in counts}
    ways = product(range(len(sizes)), repeat=len(widths))
    rooms = [
        [sum(w for w, at in zip(widths.values(), way, strict=True) if at == n) for n in range(len(sizes))]
        for way in ways
    ]
    exists = any(all(used <= size for used, size in zip(room, sizes, strict=True)) for room in rooms)
    exists &= all(counts[kind] >= width for kind, width in widths.items())
    placement = pack(counts, nodes, blocks, {})
    assert (placement is not None) == exists
    if placement is not None:
        assert placement.counts() == counts
        rows = on_a_node(placement, nodes)
        assert all(any(row[kind] >= width for row in rows) for kind, width in widths.items())
        assert can_place(widths, nodes)


@given(counted(24), counted(24), WIDTHS)
def test_whole_nodes_keep_their_type_where_there_is_a_choice(
    counts: dict[PlacementType, int], former: dict[PlacementType, int], units: dict[PlacementType, int]
) -> None:
    nodes = even_nodes(3)
    before = pack(former, nodes, {}, {})
    after = pack(counts, nodes, {}, units, before)
    assert after == pack(counts, nodes, {}, units, before), "the same twice"
    assert before is not None
    assert after is not None
    pairs = list(zip(on_a_node(before, nodes), on_a_node(after, nodes), strict=True))
    for kind in PlacementType:
        kept = sum(row[kind] == new[kind] == 8 for row, new in pairs)
        assert kept == min(former.get(kind, 0) // 8, counts.get(kind, 0) // 8)


@pytest.mark.parametrize(
    ("counts", "units", "shown"),
    [
        ({EDC: 4, ED: 4}, {}, ["EDC EDC EDC EDC", "ED ED ED ED"]),
        ({E: 4, D: 4}, {}, ["D D D D", "E E E E"]),  # Primaries first.
        ({EDC: 5, ED: 2, C: 1}, {}, ["EDC EDC EDC EDC", "EDC ED ED C"]),
        ({ED: 3, C: 5}, {C: 2}, ["C C C C", "ED ED ED C"]),
        ({EDC: 3, ED: 3, C: 2}, {C: 2}, ["ED ED C C", "EDC EDC EDC ED"]),  # Both devices of a decode on one node.
    ],
)
def test_packing_by_hand(
    counts: Mapping[PlacementType, int], units: Mapping[PlacementType, int], shown: list[str]
) -> None:
    nodes = even_nodes(2, 4)
    assert texts(pack(counts, nodes, units, units), nodes) == shown


def test_a_changed_plan_leaves_other_nodes_as_they_are() -> None:
    """Without the former placement, one type less on the first nodes would move all that follow."""
    nodes = even_nodes(6, 4)
    before = pack({EDC: 12, DC: 8, ED: 4}, nodes, {}, {})
    after = pack({EDC: 8, DC: 8, ED: 8}, nodes, {}, {}, before)
    assert before is not None
    assert after is not None
    changed = [node for node, row in nodes.items() if any(before.of(one) != after.of(one) for one in row)]
    assert changed == [2]


def test_devices_of_a_mixed_node_keep_their_type() -> None:
    nodes = even_nodes(1, 4)
    before = pack({EDC: 2, ED: 1, C: 1}, nodes, {}, {})
    assert texts(before, nodes) == ["EDC EDC ED C"]
    assert texts(pack({EDC: 1, ED: 2, C: 1}, nodes, {}, {}, before), nodes) == ["EDC ED ED C"]
    assert texts(pack({EDC: 1, DC: 1, ED: 2}, nodes, {}, {}, before), nodes) == ["EDC DC ED ED"]
    assert texts(pack({DC: 3, EDC: 1}, nodes, {}, {}, Placement(((nodes[0][3], EDC),))), nodes) == ["DC DC DC EDC"]


def test_whole_nodes_give_way_to_blocks() -> None:
    nodes = nodes_of((4, 3))
    assert texts(pack({EDC: 4, ED: 3}, nodes, {ED: 3}, {}), nodes) == ["EDC EDC EDC EDC", "ED ED ED"]
    assert texts(pack({EDC: 3, ED: 4}, nodes, {ED: 3}, {}), nodes) == ["ED ED ED ED", "EDC EDC EDC"]
    nodes = nodes_of((4, 3))
    assert texts(pack({EDC: 4, ED: 2, C: 1}, nodes, {EDC: 1, ED: 2}, {}), nodes) == ["EDC EDC EDC EDC", "ED ED C"]
    nodes = nodes_of((3, 2))
    assert texts(pack({EDC: 3, C: 2}, nodes, {EDC: 2, C: 2}, {}), nodes) == ["EDC EDC EDC", "C C"]
    nodes = nodes_of((2, 4))
    assert texts(pack({EDC: 2, ED: 2, C: 2}, nodes, {ED: 2, C: 2}, {}), nodes) == ["EDC EDC", "ED ED C C"]


def test_the_first_node_with_room_may_be_the_wrong_one() -> None:
    """3 and 2 must share the wider node, though 3 fits on the other."""
    counts = {EDC: 3, DC: 2, ED: 2, C: 2}
    nodes = nodes_of((4, 5))
    assert texts(pack(counts, nodes, counts, {}), nodes) == ["DC DC ED ED", "EDC EDC EDC C C"]


def test_units_go_before_single_devices_and_before_whole_nodes() -> None:
    """A node of three would have a device of C that makes up no pair."""
    nodes = even_nodes(3, 3)
    assert texts(pack({EDC: 5, C: 4}, nodes, {C: 2}, {C: 2}), nodes) == ["EDC EDC EDC", "EDC C C", "EDC C C"]


def test_blocks_that_do_not_fit() -> None:
    assert pack({ED: 3, C: 3}, nodes_of((3, 3)), {ED: 2, C: 3}, {}) is not None
    assert pack({EDC: 2, ED: 2, C: 2}, nodes_of((3, 3)), {EDC: 2, ED: 2, C: 2}, {}) is None
