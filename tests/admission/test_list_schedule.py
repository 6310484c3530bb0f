"""List scheduling, against models that try everything."""

from __future__ import annotations

from itertools import combinations, permutations
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tilework.admission.list_schedule import FreeTimes, end_of_next, first_slot, place
from tilework.core.block import Demand

TIMES = st.integers(0, 60)
NODE = st.lists(TIMES, min_size=1, max_size=5).map(sorted)
BLOCKS = st.tuples(st.integers(1, 6), st.integers(0, 30)).map(lambda pair: Demand(*pair))


def placed(free_ns: FreeTimes, block: Demand, ready_ns: int) -> tuple[int, FreeTimes]:
    """The end of a block and the devices after it, by trying every group of devices.

    Of the groups that can begin first it takes the one whose devices were idle for the least time before.
    """
    best: tuple[tuple[int, int], tuple[int, ...]] | None = None
    for group in combinations(range(len(free_ns)), min(block.width, len(free_ns))):
        start_ns = max([ready_ns, *(free_ns[device_id] for device_id in group)])
        rank = start_ns, sum(start_ns - free_ns[device_id] for device_id in group)
        if best is None or rank < best[0]:
            best = rank, group
    assert best is not None
    (start_ns, _), group = best
    after = list(free_ns)
    for device_id in group:
        after[device_id] = start_ns + block.run_ns
    return start_ns + block.run_ns, sorted(after)


@given(free_ns=NODE, blocks=st.lists(st.tuples(BLOCKS, TIMES), max_size=8))
def test_a_block_begins_as_early_as_it_can_and_leaves_the_most_room(
    free_ns: FreeTimes, blocks: list[tuple[Demand, int]]
) -> None:
    """Also blocks that are wider than the node, or not ready when devices are."""
    for block, ready_ns in blocks:
        expected = placed(free_ns, block, ready_ns)
        assert (place(free_ns, block, ready_ns), free_ns) == expected


def test_of_the_free_devices_those_that_became_free_last_are_taken() -> None:
    free_ns = [0, 10, 20, 90]
    assert place(free_ns, Demand(2, 5), ready_ns=30) == 35
    assert free_ns == [0, 35, 35, 90], "the device that is free at 0 is left for a block that can use it"


def test_a_placed_block_takes_the_first_slot() -> None:
    random = Random(4)
    for _ in range(300):
        free_ns = sorted(random.randrange(50) for _ in range(random.randrange(1, 9)))
        width, ready_ns = random.randrange(1, len(free_ns) + 1), random.randrange(60)
        start_ns, stop = first_slot(free_ns, width, ready_ns)
        expected = sorted([*free_ns[: stop - width], *free_ns[stop:], *[start_ns + 7] * width])
        assert place(free_ns, Demand(width, 7), ready_ns) == start_ns + 7
        assert free_ns == expected


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    st.integers(1, 5),
    st.integers(0, 40),
)
def test_a_block_takes_its_first_device_for_longer_than_the_others(
    free_ns: list[int], parts_ns: tuple[int, int, int], width: int, ready_ns: int
) -> None:
    """Against all ways to choose the devices: the earliest begin, and the same devices are taken as long."""
    before_ns, _, after_ns = parts_ns
    block = Demand(width, sum(parts_ns), before_ns, after_ns) if width > 1 else Demand(1, sum(parts_ns))
    taken = min(width, len(free_ns))
    starts_ns = [
        max([ready_ns, first, *(other - block.before_ns for other in others)])
        for first, *others in permutations(sorted(free_ns), taken)
    ]
    after = sorted(free_ns)
    assert end_of_next(after, block, ready_ns) == min(starts_ns) + block.run_ns
    assert place(after, block, ready_ns) == min(starts_ns) + block.run_ns
    assert after == sorted(after)
    assert len(after) == len(free_ns)
    assert after.count(min(starts_ns) + block.run_ns) >= 1
    assert after.count(min(starts_ns) + block.run_ns - block.after_ns) >= taken - 1
