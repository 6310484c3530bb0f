"""Homes of promised jobs, against models that try everything, and why they are kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tilework.admission.reservation_timeline import NEVER, Nodes, Times, choose, follow, latest_ends
from tilework.core.interfaces import Block, Demand

TIMES = st.integers(0, 40)
NODES = st.sampled_from(([[0]], [[0, 1, 2]], [[0], [1]], [[0, 1], [2, 3]], [[3], [0, 1, 2]]))
DEMANDS = st.builds(Demand, st.integers(1, 4), st.integers(0, 20))


@st.composite
def housed(draw: st.DrawFn) -> tuple[Times, Nodes, list[Block]]:
    """When devices are free, and blocks with homes."""
    nodes = draw(NODES)
    homes = st.sampled_from([home for node in nodes for width in (1, 2, 3) for home in combinations(node, width)])
    blocks = st.builds(Block, st.just(0), TIMES, DEMANDS, homes)
    return {device_id: draw(TIMES) for node in nodes for device_id in node}, nodes, draw(st.lists(blocks, max_size=6))


@given(housed(), DEMANDS, TIMES, st.none() | st.lists(TIMES, min_size=4, max_size=4))
def test_the_devices_are_chosen_that_let_a_block_begin_first_and_leave_the_most_room(
    what_if: tuple[Times, Nodes, list[Block]], demand: Demand, ready_ns: int, spared: list[int] | None
) -> None:
    levels, nodes, _ = what_if
    latest_ns = None if spared is None else {device_id: spared[device_id] for device_id in levels}
    width = min(demand.width, max(map(len, nodes)))
    found = [
        (start_ns, rank, sum(start_ns - levels[device_id] for device_id in home))
        for rank, node in enumerate(nodes)
        for home in combinations(node, width)
        for start_ns in [max([ready_ns, *(levels[device_id] for device_id in home)])]
        if latest_ns is None or all(start_ns + demand.run_ns <= latest_ns[device_id] for device_id in home)
    ]
    home = choose(levels, nodes, demand, ready_ns, latest_ns)
    assert (home is not None) == bool(found)
    if home is not None:
        start_ns = max([ready_ns, *(levels[device_id] for device_id in home)])
        (rank,) = {rank for rank, node in enumerate(nodes) if set(home) <= set(node)}
        assert (start_ns, rank, sum(start_ns - levels[device_id] for device_id in home)) == min(found)


@given(housed(), st.data())
def test_what_goes_well_lets_nobody_end_later(what_if: tuple[Times, Nodes, list[Block]], data: st.DataObject) -> None:
    """Devices that are free earlier; jobs that are ready earlier, have less left or are gone."""
    levels, nodes, blocks = what_if
    _, ends_ns = follow(dict(levels), nodes, blocks)
    sooner = {device_id: data.draw(st.integers(0, level_ns)) for device_id, level_ns in levels.items()}
    kept = [data.draw(st.booleans()) for _ in blocks]
    better = [
        replace(
            block,
            ready_ns=data.draw(st.integers(0, block.ready_ns)),
            demand=replace(block.demand, run_ns=data.draw(st.integers(0, block.demand.run_ns))),
        )
        for block, is_kept in zip(blocks, kept, strict=True)
        if is_kept
    ]
    _, better_ns = follow(sooner, nodes, better)
    before_ns = [end_ns for end_ns, is_kept in zip(ends_ns, kept, strict=True) if is_kept]
    assert all(new <= old for new, old in zip(better_ns, before_ns, strict=True))


@given(housed(), st.integers(0, 15), st.data())
def test_a_delay_delays_nobody_by_more(
    what_if: tuple[Times, Nodes, list[Block]], delay_ns: int, data: st.DataObject
) -> None:
    levels, nodes, blocks = what_if
    _, ends_ns = follow(dict(levels), nodes, blocks)
    delays = st.integers(0, delay_ns)
    later = {device_id: level_ns + data.draw(delays) for device_id, level_ns in levels.items()}
    waiting = [replace(block, ready_ns=block.ready_ns + data.draw(delays)) for block in blocks]
    _, later_ns = follow(later, nodes, waiting)
    assert all(old <= new <= old + delay_ns for new, old in zip(later_ns, ends_ns, strict=True))


def test_placing_anew_is_not_like_that() -> None:
    """Each where it can begin first: a device that is free at 1 and not at 5 makes the last one late.

    On one node as on several: the wide block then begins earlier, and leaves less to the other.
    """
    for nodes, free_ns in (([[0, 1, 2]], (0, 5, 5)), ([[0, 1], [2, 3]], (0, 6, 5, 5))):
        levels = dict(enumerate(free_ns))
        wide, narrow = Block(0, 0, Demand(2, 10)), Block(0, 0, Demand(1, 12))
        homes, before_ns = follow(dict(levels), nodes, [wide, narrow], anew=True)
        assert before_ns == [15, 12]
        _, anew_ns = follow({**levels, 1: 1}, nodes, [wide, narrow], anew=True)
        assert anew_ns == [11, 17]
        kept = [replace(wide, devices=homes[0]), replace(narrow, devices=homes[1])]
        assert follow({**levels, 1: 1}, nodes, kept)[1] == [15, 12]


@given(housed(), st.lists(st.integers(0, 120), min_size=6, max_size=6))
def test_all_are_in_time_exactly_if_devices_come_by_the_latest_times(
    what_if: tuple[Times, Nodes, list[Block]], dues_ns: list[int]
) -> None:
    levels, nodes, blocks = what_if
    dues_ns = dues_ns[: len(blocks)]
    latest_ns = dict.fromkeys(levels, NEVER)
    latest = latest_ends(latest_ns, blocks, dues_ns)
    _, ends_ns = follow(dict(levels), nodes, blocks)
    are_in_time = all(end_ns <= due_ns for end_ns, due_ns in zip(ends_ns, dues_ns, strict=True))
    are_ready = all(
        block.ready_ns + block.demand.run_ns <= end_ns for block, end_ns in zip(blocks, latest, strict=True)
    )
    assert are_in_time == (
        are_ready and all(level_ns <= latest_ns[device_id] for device_id, level_ns in levels.items())
    )


def test_who_has_nothing_left_needs_no_device() -> None:
    levels = {0: 7}
    assert follow(levels, [[0]], [Block(0, 90, Demand(1, 0), (0,)), Block(0, 0, Demand(1, 2), (0,))])[1] == [90, 9]
