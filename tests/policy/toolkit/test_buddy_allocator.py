"""The buddy allocator: what it may never do, what it prefers, and decision by decision."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.core.work import Group
from tilework.policy.toolkit.buddy_allocator import Allocator

NODES = ((0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14, 15))


def is_aligned(group: Group) -> bool:
    return group[0] % len(group) == 0 and group == tuple(range(group[0], group[0] + len(group)))


def has_aligned(free: set[int], width: int) -> bool:
    blocks = (set(range(first, first + width)) for first in range(0, 16, width))
    return any(block <= free and any(block <= set(node) for node in NODES) for block in blocks)


@given(
    free=st.sets(st.integers(0, 15)),
    asked=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.sets(st.integers(0, 15), max_size=8)), max_size=12),
    returned=st.sets(st.integers(0, 11)),
)
def test_whatever_is_asked_for(free: set[int], asked: list[tuple[int, set[int]]], returned: set[int]) -> None:
    """Free GPUs of one node, exactly as many as asked for, whenever some node has them; aligned if possible."""
    allocator = Allocator([[device_id for device_id in node if device_id in free] for node in NODES])
    for index, (width, preferred) in enumerate(asked):
        anew = Allocator([[device_id for device_id in node if device_id in free] for node in NODES])
        group = allocator.take(width, tuple(sorted(preferred)))
        assert group == anew.take(width, tuple(sorted(preferred))), "what was there before makes no difference"
        assert (group is not None) == any(len(free & set(node)) >= width for node in NODES)
        if group is None:
            continue
        assert len(group) == width
        assert list(group) == sorted(set(group) & free), "GPUs that are free, each once, in order"
        assert any(set(group) <= set(node) for node in NODES)
        stays = preferred == set(group)
        assert stays or width == 3 or is_aligned(group) or not has_aligned(free, width)
        if len(preferred) == width and preferred <= free and any(preferred <= set(node) for node in NODES):
            assert stays
        free = free - set(group)
        if index in returned:
            allocator.give(group)
            free = free | set(group)
        assert allocator.num_free() == len(free)


def legal(free: set[int], width: int) -> list[Group]:
    """Every group that there is."""
    return [
        group for node in NODES for group in combinations([device_id for device_id in node if device_id in free], width)
    ]


def hole(group: Group, free: set[int]) -> int:
    """How wide the free aligned block is that an aligned group is cut from."""
    width = len(group)
    while width < 8 and set(range(first := group[0] - group[0] % (2 * width), first + 2 * width)) <= free:
        width *= 2
    return width


@given(
    free=st.sets(st.integers(0, 15)),
    width=st.sampled_from([1, 2, 3, 4, 5, 8]),
    preferred=st.sets(st.integers(0, 15), max_size=8),
)
def test_the_choice_is_the_best_of_all_groups(free: set[int], width: int, preferred: set[int]) -> None:
    """As `take` ranks them: none keeps more of the former devices, but aligned ones go before all others."""
    every = legal(free, width)
    group = Allocator([[device_id for device_id in node if device_id in free] for node in NODES]).take(
        width, tuple(sorted(preferred))
    )
    if group is None or group == tuple(sorted(preferred)):
        assert (group in every) == (group is not None)
        assert bool(every) == (group is not None)
        return
    assert tuple(sorted(preferred)) not in every

    def kept(one: Group) -> int:
        return len(preferred.intersection(one))

    aligned = [one for one in every if width & (width - 1) == 0 and is_aligned(one)]
    if aligned:
        assert group == min(aligned, key=lambda one: (-kept(one), hole(one, free), one))
        return
    room = {one: len(free.intersection(next(node for node in NODES if one[0] in node))) for one in every}
    assert (kept(group), -room[group]) == max((kept(one), -room[one]) for one in every)


@given(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=20))
def test_every_group_is_aligned_until_one_is_given_back(widths: list[int]) -> None:
    """Cut from the smallest hole, groups leave holes of different sizes: where there is room, a block is whole."""
    allocator, taken = Allocator(NODES), list[int]()
    for width in widths:
        widest = allocator.widest()
        group = allocator.take(width)
        assert (group is not None) == (widest >= width)
        if group is not None:
            assert is_aligned(group)
            taken += group
    assert len(taken) == len(set(taken)) == 16 - allocator.num_free(), "none is given twice"


@given(free=st.sets(st.integers(0, 15)), most=st.integers(0, 9), node=st.sampled_from(NODES))
def test_devices_that_are_held_are_some_of_those_asked_for(free: set[int], most: int, node: Group) -> None:
    allocator = Allocator([[device_id for device_id in one if device_id in free] for one in NODES])
    here, all_free = len(free & set(node)), len(free)
    assert allocator.num_free_of(node) == here
    allocator.take_some(node, most)
    assert allocator.num_free_of(node) == here - min(here, most)
    assert allocator.num_free() == all_free - min(here, most)
    lowest = sorted(free & set(node))[:most]
    left = [group[0] for _ in range(16) if (group := allocator.take(1)) is not None]
    assert sorted(left) == sorted(free - set(lowest))


@pytest.mark.parametrize(
    ("free", "width", "preferred", "group"),
    [
        (range(8), 2, (), (0, 1)),
        (range(8), 2, (3, 6), (3, 6)),  # Where it is, aligned or not.
        (range(8), 2, (5,), (4, 5)),  # It grows around itself,
        (range(8), 1, (4, 5, 6, 7), (4,)),  # and shrinks within itself.
        ([0, 2, 3, 4, 5, 6, 7], 1, (), (0,)),  # The smallest hole that fits.
        ([1, 2, 3, 4, 5, 6, 7], 2, (), (2, 3)),
        ([0, 1, 2, 3, 6, 7], 2, (), (6, 7)),  # Four stay together.
        ([1, 2, 3, 4, 5, 6, 7], 2, (6, 7, 0), (6, 7)),
        ([0, 1, 2, 4, 5, 6], 4, (), (0, 1, 2, 6)),  # No aligned block: small holes first, whole pairs last.
        ([0, 1, 2, 4, 5, 6], 4, (4, 5, 6), (2, 4, 5, 6)),
        ([1, 2, 8, 9, 10], 3, (), (8, 9, 10)),
        ([1, 2, 3, 8, 9, 10, 11], 3, (), (1, 2, 3)),  # The node with the fewest free GPUs.
        ([0, 1, 8, 9], 4, (), None),  # Never over two nodes.
    ],
)
def test_choices(free: Sequence[int], width: int, preferred: Group, group: Group | None) -> None:
    allocator = Allocator([[device_id for device_id in node if device_id in free] for node in NODES])
    assert allocator.take(width, preferred) == group


def test_former_devices_that_are_taken_do_not_count() -> None:
    allocator = Allocator([range(8), (8, 9, 10)])
    assert allocator.take(1, (0,)) == (0,)
    assert allocator.take(3, (0,)) == (8, 9, 10), "the node with the fewest free GPUs"


def test_single_devices_fill_holes_so_that_wide_groups_survive() -> None:
    allocator = Allocator(NODES)
    groups = [allocator.take(1) for _ in range(4)]
    assert groups == [(0,), (1,), (2,), (3,)]
    assert allocator.take(4) == (4, 5, 6, 7)
    assert allocator.take(8) == (8, 9, 10, 11, 12, 13, 14, 15)
    assert allocator.take(1) is None
