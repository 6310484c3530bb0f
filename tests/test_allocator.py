"""The buddy allocator: what it may never do, what it prefers, and decision by decision."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.core.work import Group
from tilework.policy.allocator import Allocator

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
    allocator = Allocator([[gpu for gpu in node if gpu in free] for node in NODES])
    for index, (width, preferred) in enumerate(asked):
        group = allocator.take(width, tuple(sorted(preferred)))
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
    allocator = Allocator([[gpu for gpu in node if gpu in free] for node in NODES])
    assert allocator.take(width, preferred) == group


def test_single_gpus_fill_holes_so_that_wide_groups_survive() -> None:
    allocator = Allocator(NODES)
    groups = [allocator.take(1) for _ in range(4)]
    assert groups == [(0,), (1,), (2,), (3,)]
    assert allocator.take(4) == (4, 5, 6, 7)
    assert allocator.take(8) == (8, 9, 10, 11, 12, 13, 14, 15)
    assert allocator.take(1) is None
