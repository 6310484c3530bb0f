"""Reservations on their groups, against models that try everything, and why groups are kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tilework.admission.reservation_timeline import (
    DeviceTimes,
    Nodes,
    Places,
    begin_ns,
    choose_group,
    latest_ends,
    run_in_order,
)
from tilework.core.block import Block, Demand
from tilework.core.time import NEVER_NS

TIMES = st.integers(0, 40)
NODES = st.sampled_from(([[0]], [[0, 1, 2]], [[0], [1]], [[0, 1], [2, 3]], [[3], [0, 1, 2]]))
SLOTS = (8, 9)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    """Half of them take all their devices from begin to end; the others may need a CPU slot, too."""
    width, run_ns = draw(st.integers(1, 4)), draw(st.integers(0, 20))
    if draw(st.booleans()):
        return Demand(width, run_ns)
    first, last, *slot = sorted(draw(st.lists(st.integers(0, run_ns), min_size=2, max_size=2))) + sorted(
        draw(st.lists(st.integers(0, run_ns), min_size=2, max_size=2))
    )
    is_wide, needs_slot = width > 1, draw(st.booleans())
    return Demand(
        width,
        run_ns,
        first if is_wide else 0,
        run_ns - last if is_wide else 0,
        (slot[0], slot[1]) if needs_slot else None,
    )


def after(demand: Demand, done_ns: int) -> Demand:
    """What is left of a demand when it has run for so long."""
    run_ns, slot = demand.run_ns - done_ns, demand.slot
    if slot is not None:
        slot = (max(0, slot[0] - done_ns), slot[1] - done_ns) if slot[1] > done_ns else None
    if run_ns <= demand.after_ns:
        return Demand(1, run_ns, slot=slot)
    return Demand(demand.width, run_ns, max(0, demand.before_ns - done_ns), demand.after_ns, slot)


DEMANDS = demands()


@st.composite
def reserved(draw: st.DrawFn) -> tuple[DeviceTimes, Nodes, list[Block]]:
    """When devices are free, the nodes, and blocks with groups."""
    nodes = draw(NODES)
    groups = st.sampled_from([group for node in nodes for width in (1, 2, 3) for group in combinations(node, width)])
    blocks = st.builds(Block, st.just(0), TIMES, DEMANDS, groups, st.sampled_from(SLOTS))
    devices = [*(device_id for node in nodes for device_id in node), *SLOTS]
    return {device_id: draw(TIMES) for device_id in devices}, nodes, draw(st.lists(blocks, max_size=6))


@given(reserved(), DEMANDS, TIMES, st.none() | st.lists(TIMES, min_size=10, max_size=10))
def test_a_group_is_chosen_on_which_a_block_begins_first_and_leaves_the_most_room(
    schedule: tuple[DeviceTimes, Nodes, list[Block]], demand: Demand, ready_ns: int, spared: list[int] | None
) -> None:
    free_ns, nodes, _ = schedule
    spared_ns = None if spared is None else {device_id: spared[device_id] for device_id in free_ns}
    width = min(demand.width, max(map(len, nodes)))
    blocks = [
        (rank, Block(0, ready_ns, demand, (first, *(one for one in group if one != first)), slot))
        for rank, node in enumerate(nodes)
        for group in combinations(node, width)
        for first in group
        for slot in (SLOTS if demand.slot else [None])
    ]

    def rate(rank: int, block: Block) -> tuple[int, int, int]:
        """When it begins, and for how long its devices idle before; that is defined for flat demands only."""
        start_ns = begin_ns(block, free_ns)
        idle_ns = sum(start_ns - free_ns[device_id] for device_id in block.devices) if demand.is_flat else 0
        return start_ns, rank, idle_ns

    def is_spared(block: Block) -> bool:
        start_ns = begin_ns(block, free_ns)
        return spared_ns is None or all(start_ns + until <= spared_ns[one] for one, _, until in block.windows())

    found = [rate(rank, block) for rank, block in blocks if is_spared(block)]
    chosen = choose_group(free_ns, Places(nodes, SLOTS), demand, ready_ns, spared_ns)
    assert (chosen is not None) == bool(found)
    if chosen is not None:
        block = Block(0, ready_ns, demand, *chosen)
        (rank,) = {rank for rank, node in enumerate(nodes) if set(block.devices) <= set(node)}
        assert is_spared(block)
        assert len(set(block.devices)) == width
        assert rate(rank, block) == min(found)


@given(reserved(), st.data())
def test_earlier_times_and_less_work_make_no_block_end_later(
    schedule: tuple[DeviceTimes, Nodes, list[Block]], data: st.DataObject
) -> None:
    """Devices that are free earlier; jobs that are ready earlier, have less left or are gone."""
    free_ns, nodes, blocks = schedule
    _, ends_ns = run_in_order(dict(free_ns), Places(nodes, SLOTS), blocks)
    sooner = {device_id: data.draw(st.integers(0, at_ns)) for device_id, at_ns in free_ns.items()}
    kept = [data.draw(st.booleans()) for _ in blocks]
    better = [
        replace(
            block,
            ready_ns=data.draw(st.integers(0, block.ready_ns)),
            demand=after(block.demand, data.draw(st.integers(0, block.demand.run_ns))),
        )
        for block, is_kept in zip(blocks, kept, strict=True)
        if is_kept
    ]
    _, better_ns = run_in_order(sooner, Places(nodes, SLOTS), better)
    before_ns = [end_ns for end_ns, is_kept in zip(ends_ns, kept, strict=True) if is_kept]
    assert all(new <= old for new, old in zip(better_ns, before_ns, strict=True))


@given(reserved(), st.integers(0, 15), st.data())
def test_a_delay_delays_no_block_by_more(
    schedule: tuple[DeviceTimes, Nodes, list[Block]], delay_ns: int, data: st.DataObject
) -> None:
    free_ns, nodes, blocks = schedule
    _, ends_ns = run_in_order(dict(free_ns), Places(nodes, SLOTS), blocks)
    delays = st.integers(0, delay_ns)
    later = {device_id: at_ns + data.draw(delays) for device_id, at_ns in free_ns.items()}
    waiting = [replace(block, ready_ns=block.ready_ns + data.draw(delays)) for block in blocks]
    _, later_ns = run_in_order(later, Places(nodes, SLOTS), waiting)
    assert all(old <= new <= old + delay_ns for new, old in zip(later_ns, ends_ns, strict=True))


def test_placing_blocks_anew_has_neither_property() -> None:
    """Each block is placed where it can begin first: a device free at 1 instead of 5 makes the last block late.

    On one node as on several: the wide block then begins earlier, and leaves less room to the other.
    """
    for nodes, times in (([[0, 1, 2]], (0, 5, 5)), ([[0, 1], [2, 3]], (0, 6, 5, 5))):
        free_ns = dict(enumerate(times))
        wide, narrow = Block(0, 0, Demand(2, 10)), Block(0, 0, Demand(1, 12))
        kept, before_ns = run_in_order(dict(free_ns), Places(nodes), [wide, narrow], anew=True)
        assert before_ns == [15, 12]
        _, anew_ns = run_in_order({**free_ns, 1: 1}, Places(nodes), [wide, narrow], anew=True)
        assert anew_ns == [11, 17]
        assert run_in_order({**free_ns, 1: 1}, Places(nodes), kept)[1] == [15, 12]


@given(reserved(), st.lists(st.integers(0, 120), min_size=6, max_size=6))
def test_all_blocks_are_in_time_exactly_if_devices_are_free_by_the_latest_times(
    schedule: tuple[DeviceTimes, Nodes, list[Block]], dues_ns: list[int]
) -> None:
    free_ns, nodes, blocks = schedule
    dues_ns = dues_ns[: len(blocks)]
    spared_ns = dict.fromkeys(free_ns, NEVER_NS)
    latest = latest_ends(spared_ns, blocks, dues_ns)
    _, ends_ns = run_in_order(dict(free_ns), Places(nodes, SLOTS), blocks)
    are_in_time = all(end_ns <= due_ns for end_ns, due_ns in zip(ends_ns, dues_ns, strict=True))
    are_ready = all(
        block.ready_ns + block.demand.run_ns <= end_ns for block, end_ns in zip(blocks, latest, strict=True)
    )
    assert are_in_time == (are_ready and all(at_ns <= spared_ns[device_id] for device_id, at_ns in free_ns.items()))


def test_a_block_that_takes_no_time_needs_no_device() -> None:
    free_ns = {0: 7}
    assert run_in_order(free_ns, Places([[0]]), [Block(0, 90, Demand(1, 0), (0,)), Block(0, 0, Demand(1, 2), (0,))])[
        1
    ] == [
        90,
        9,
    ]


def test_a_block_lies_within_the_devices_that_may_run_it() -> None:
    """Devices 0 and 1 are one pool, device 2 another, which is free first."""
    free_ns, nodes = {0: 5, 1: 5, 2: 0}, [[0, 1], [2]]
    assert choose_group(free_ns, Places(nodes), Demand(1, 10), 0) == ((2,), None)
    assert choose_group(free_ns, Places(nodes), Demand(2, 10), 0, within=frozenset((2,))) == ((2,), None), (
        "as wide as there is"
    )
    assert choose_group(free_ns, Places(nodes), Demand(2, 10, 2, 3), 0, within=frozenset((0, 1))) == ((1, 0), None)
    assert choose_group(free_ns, Places(nodes), Demand(1, 10), 0, within=frozenset((7,))) is None


def test_a_block_without_a_device_that_may_run_it_delays_no_other() -> None:
    lost, other = Block(100, 0, Demand(1, 10), within=frozenset((7,))), Block(100, 0, Demand(1, 10), (0,))
    blocks, ends_ns = run_in_order({0: 5}, Places([[0]]), [lost, other], anew=True)
    assert [block.devices for block in blocks] == [(), (0,)]
    assert ends_ns == [10, 15]
