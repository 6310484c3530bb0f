"""Blocks on the GPU x time plane, against models that try everything."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tilework.admission.list_schedule import Levels, levels_after, place
from tilework.core.interfaces import Ahead, Block, Demand

TIMES = st.integers(0, 60)
NODE = st.lists(TIMES, min_size=1, max_size=5).map(sorted)
NODES = st.lists(NODE, min_size=1, max_size=3)
BLOCKS = st.builds(Demand, st.integers(1, 6), st.integers(0, 30))


def placed(levels: Levels, block: Demand, ready_ns: int) -> tuple[int, Levels]:
    """The end of a block and the devices after it, by looking at every group of devices of every node.

    Of the groups that can begin first it takes the one that leaves the most room: whose devices idled least before.
    """
    best: tuple[tuple[bool, int, int, int, int], int, tuple[int, ...]] | None = None
    for node, free_ns in enumerate(levels):
        width = min(block.width, len(free_ns))
        for group in combinations(range(len(free_ns)), width):
            free_at = max(free_ns[device_id] for device_id in group)
            start_ns = max(free_at, ready_ns)
            idle_ns = sum(start_ns - free_ns[device_id] for device_id in group)
            # A node is chosen by when its devices are free; the group in it by where the block begins.
            node_free_ns = sorted(free_ns)[width - 1]
            rank = (width < block.width, node_free_ns, node, start_ns, idle_ns)
            if best is None or rank < best[0]:
                best = rank, node, group
    assert best is not None
    (_, _, _, start_ns, _), node, group = best
    after = [list(free_ns) for free_ns in levels]
    for device_id in group:
        after[node][device_id] = start_ns + block.run_ns
    return start_ns + block.run_ns, [sorted(free_ns) for free_ns in after]


@given(levels=NODES, blocks=st.lists(st.tuples(BLOCKS, TIMES), max_size=8))
def test_a_block_begins_as_early_as_it_can_and_leaves_the_most_room(
    levels: Levels, blocks: list[tuple[Demand, int]]
) -> None:
    """Several nodes, blocks wider than a node, blocks that are not ready when devices are."""
    for block, ready_ns in blocks:
        expected = placed(levels, block, ready_ns)
        assert (place(levels, block, ready_ns), levels) == expected


def test_of_the_free_devices_those_that_became_free_last_are_taken() -> None:
    levels = [[0, 10, 20, 90]]
    assert place(levels, Demand(2, 5), ready_ns=30) == 35
    assert levels == [[0, 35, 35, 90]], "the one that is free at 0 is left for somebody who can use it"


def test_a_block_goes_to_the_node_where_it_can_begin_first() -> None:
    levels = [[0, 50, 50], [20, 20], [10]]
    assert place(levels, Demand(2, 5)) == 25
    assert levels == [[0, 50, 50], [25, 25], [10]]
    assert place(levels, Demand(3, 5)) == 55, "only the first node is wide enough"
    assert place(levels, Demand(9, 5)) == 15, "no node is: it takes all of the one that is free first"


@given(
    free_ns=st.lists(TIMES, min_size=1, max_size=6), ahead=st.lists(BLOCKS, max_size=10), last=BLOCKS, ready_ns=TIMES
)
def test_a_finish_is_that_of_the_last_of_blocks_placed_in_order(
    free_ns: list[int], ahead: list[Demand], last: Demand, ready_ns: int
) -> None:
    levels = [sorted(free_ns)]
    for block in ahead:
        _, levels = placed(levels, block, 0)
    end_ns, _ = placed(levels, last, ready_ns)
    assert place(levels_after(free_ns, (), Ahead(0, ahead)), last, ready_ns) == end_ns


# Many blocks: pouring.


def test_the_rests_of_running_jobs_wait_for_their_works() -> None:
    """The rest is ready at 9 and takes the device that is free last by then; the last takes the other at once."""
    rest = Block(0, 9, Demand(1, 5))
    assert place(levels_after([0, 7], (rest,), Ahead(0, [])), Demand(1, 3)) == 3
    assert place(levels_after([0, 7], (rest,), Ahead(0, [Demand(1, 20)])), Demand(1, 3)) == 17


def test_pouring_fills_the_lowest_first() -> None:
    last = Demand(1, 0)
    assert place(levels_after([0, 1000], (), Ahead(200, [])), last) == 200
    assert place(levels_after([0, 100], (), Ahead(300, [])), last) == 200
    assert place(levels_after([0, 100], (), Ahead(300, [Demand(2, 5)])), Demand(1, 1)) == 206, (
        "who is known comes after it"
    )


@given(
    free=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    ahead=st.lists(st.integers(1, 50), min_size=129, max_size=400),
)
def test_pouring_many_jobs_is_close_to_placing_each(free: list[int], ahead: list[int]) -> None:
    exact = list(free)
    for job_ns in ahead:
        exact[exact.index(min(exact))] += job_ns
    blocks = [Demand(1, job_ns) for job_ns in ahead[-128:]]
    assert abs(place(levels_after(free, (), Ahead(sum(ahead[:-128]), blocks)), Demand(1, 0)) - min(exact)) <= 2 * max(
        ahead
    )
