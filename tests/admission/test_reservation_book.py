"""The book of reservations, against going through all of them anew for each answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import cast
from unittest.mock import Mock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reserved import View
from tilework.admission import feasibility
from tilework.admission.contract import Backlog
from tilework.admission.effect_tree import EffectTree, Key
from tilework.admission.effects import time_of
from tilework.admission.reservation_book import ReservationBook
from tilework.admission.reservation_timeline import (
    DeviceTimes,
    Nodes,
    Places,
    begin_ns,
    choose_group,
    latest_ends,
    nodes_within,
    run_in_order,
)
from tilework.admission.reservations import Reservations, SearchBudget
from tilework.core.block import Block, Demand
from tilework.core.pools import Within
from tilework.core.time import NEVER_NS, NS_PER_MS, NS_PER_S, START_MARGINS, Margin, Margins

SEEDS = st.integers(0, 1 << 32)
NODES: tuple[Nodes, ...] = ([[0]], [[0, 1, 2]], [[0, 1], [2, 3]], [[0, 1, 2, 3], [4], [5, 6, 7]], [[0], [1]])

SMALL_MARGINS = Margins(Margin(fixed_ns=10 * NS_PER_MS, permille=10), Margin(fixed_ns=5 * NS_PER_MS, permille=5))


@dataclass(frozen=True)
class Straightforward:
    """The answers by going through all reservations, in order of their deadlines."""

    free_ns: DeviceTimes
    places: Places
    blocks: Sequence[Block]
    now_ns: int
    margins: Margins = START_MARGINS

    def around(self, index: int) -> tuple[DeviceTimes, DeviceTimes]:
        """When devices are free after the blocks before this place, and until when the others can spare them."""
        free_ns = dict(self.free_ns)
        run_in_order(free_ns, self.places, self.blocks[:index])
        return free_ns, self.spared_ns(index, self.margins.admission)

    def spared_ns(self, index: int, margin: Margin) -> DeviceTimes:
        spared_ns, later = dict.fromkeys(self.free_ns, NEVER_NS), self.blocks[index:]
        latest_ends(spared_ns, later, margin.latest_all_ns([one.due_ns for one in later], self.now_ns))
        return spared_ns

    def place(self, due_ns: int, demand: Demand, within: Within) -> Block | None:
        index = sum(block.due_ns <= due_ns for block in self.blocks)
        free_ns, spared_ns = self.around(index)
        chosen = choose_group(free_ns, self.places, demand, self.now_ns, spared_ns, within)
        if chosen is not None:
            end_ns = begin_ns(Block(0, self.now_ns, demand, *chosen), free_ns) + demand.run_ns
            if self.margins.admission.due_ns(end_ns, self.now_ns) <= due_ns:
                return Block(due_ns, 0, demand, *chosen, within=within)
        return None


class Traffic:
    """Random reservations that come, change and end, on devices whose times change, while time passes."""

    def __init__(self, rng: Random, nodes: Nodes, *, has_slots: bool, horizon_ms: int) -> None:
        self.rng, self.nodes, self.horizon_ms = rng, nodes, horizon_ms
        self.device_ids = [one for node in nodes for one in node]
        self.slots = [100, 101] if has_slots else []
        self.now_ns = NS_PER_S
        self.free_ns = {one: self.now_ns + self._ms(300) for one in (*self.device_ids, *self.slots)}
        self.view = View(self.free_ns, nodes)
        self.book = ReservationBook()
        self._next_id = 0

    def _ms(self, most: int) -> int:
        return self.rng.randint(0, most) * NS_PER_MS

    def demand(self) -> Demand:
        width, run_ns = self.rng.choice((1, 1, 2, 4)), self._ms(400)
        flat = Demand(width, run_ns)
        kind = self.rng.random()
        if kind < 0.5:
            return flat
        if self.slots and kind < 0.75:
            return flat._replace(slot=(run_ns // 3, run_ns // 2))
        return flat._replace(before_ns=run_ns // 4, after_ns=run_ns // 5)

    def within(self) -> Within:
        """All devices, or those of one pool."""
        return self.rng.choice((None, None, frozenset(self.rng.choice(self.nodes))))

    def block(self, key: Key) -> Block:
        """A reservation on some group, or rarely on none yet. It may be of a job with works."""
        demand, within = self.demand(), self.within()
        node = self.rng.choice(nodes_within(self.nodes, within))
        group = tuple(self.rng.sample(list(node), min(demand.width, len(node))))
        slot = self.rng.choice(self.slots) if demand.slot is not None and self.slots else None
        ready_ns = self.now_ns + self._ms(500) if self.rng.random() < 0.1 else 0
        return Block(key[0], ready_ns, demand, group, slot, within=within)

    def key(self) -> Key:
        self._next_id += 1
        return self.now_ns + self._ms(self.horizon_ms), self._next_id

    def step(self) -> None:
        """Let one thing happen."""
        keys, kind = sorted(self.view.blocks), self.rng.random()
        if kind < 0.6 or not keys:
            key = self.key()
            self.view.put(key, self.block(key))
        elif kind < 0.75:
            self.view.end(self.rng.choice(keys))
        elif kind < 0.85:
            key = self.rng.choice(keys)
            self.view.put(key, self.block(key))
        elif kind < 0.88:
            self.view.margins = self.rng.choice((START_MARGINS, SMALL_MARGINS))
        elif kind < 0.95:
            self.view.be_free(self.rng.choice(list(self.free_ns)), self.now_ns + self._ms(800))
        else:
            self.now_ns += self._ms(100)

    def both(self) -> tuple[Reservations, Straightforward]:
        view = self.view
        self.book.follow_devices(cast(Backlog, view))
        free_ns = {one.device_id: one.free_ns for one in (*view.devices, *view.slots)}
        places = Places(self.nodes, [one.device_id for one in view.slots])
        plain = Straightforward(free_ns, places, view.reserved(), self.now_ns, view.margins)
        return Reservations(self.book, self.now_ns), plain


@settings(max_examples=20)
@given(SEEDS.map(Random), st.sampled_from(NODES), st.booleans(), st.sampled_from((500, 5000)))
def test_a_request_gets_the_reservation_that_it_would_get_by_going_through_all(
    rng: Random, nodes: Nodes, has_slots: bool, horizon_ms: int
) -> None:
    traffic = Traffic(rng, nodes, has_slots=has_slots, horizon_ms=horizon_ms)
    for _ in range(60):
        traffic.step()
        if rng.random() < 0.3:
            ours, plain = traffic.both()
            due_ns, demand, within = traffic.key()[0], traffic.demand(), traffic.within()
            assert ours.place(due_ns, demand, within) == plain.place(due_ns, demand, within)


@settings(max_examples=10)
@given(SEEDS.map(Random), st.sampled_from(NODES), st.booleans(), st.integers(60, 200))
def test_what_reservations_leave_of_devices_is_the_same_at_every_place(
    rng: Random, nodes: Nodes, has_slots: bool, num_steps: int
) -> None:
    """Enough of them for several leaves; with the margin of the guard, too."""
    traffic = Traffic(rng, nodes, has_slots=has_slots, horizon_ms=60_000)
    for number in range(num_steps):
        traffic.step()
        if number % 25:
            continue
        ours, plain = traffic.both()
        now_ns, keys, guard = traffic.now_ns, sorted(traffic.view.blocks), traffic.view.margins.guard
        for index in rng.sample(range(len(keys) + 1), min(5, len(keys) + 1)):
            key = keys[index] if index < len(keys) else (NEVER_NS, 0)
            assert ours.book.around(key, now_ns) == plain.around(index)
            assert ours.book.spared_ns(key, guard, now_ns) == plain.spared_ns(index, guard)
        dues_ns = guard.latest_all_ns([block.due_ns for block in plain.blocks], now_ns)
        ends_ns = latest_ends(dict.fromkeys(plain.free_ns, NEVER_NS), plain.blocks, dues_ns)
        assert [ours.book.latest_end_ns(key, guard, now_ns) for key in keys] == ends_ns


@settings(max_examples=15)
@given(SEEDS.map(Random), st.sampled_from(NODES), st.booleans())
def test_requests_of_one_call_are_placed_one_after_another(rng: Random, nodes: Nodes, has_slots: bool) -> None:
    """Each is placed beside those before it, without another look at the rest; then all are taken back."""
    traffic = Traffic(rng, nodes, has_slots=has_slots, horizon_ms=3000)
    for _ in range(20):
        traffic.step()
    due_ns, demand = traffic.key()[0], traffic.demand()
    placed: list[Key] = []
    for _ in range(5):
        ours, plain = traffic.both()
        block = ours.place(due_ns, demand)
        assert block == plain.place(due_ns, demand, None)
        if block is not None:
            placed.append((due_ns, traffic.key()[1]))
            traffic.view.put(placed[-1], block)
    for key in placed:
        traffic.view.end(key)
    ours, plain = traffic.both()
    assert ours.place(due_ns, demand) == plain.place(due_ns, demand, None)


def test_devices_that_join_or_are_lost_begin_a_new_book() -> None:
    traffic = Traffic(Random(1), [[0, 1], [2, 3]], has_slots=True, horizon_ms=5000)
    for _ in range(80):
        traffic.step()
    traffic.both()
    for nodes, free_ns in (([[0, 1]], {0: 5, 1: 7}), ([[0], [1], [2, 3]], dict.fromkeys(range(4), 9))):
        traffic.nodes = nodes
        traffic.view.join(free_ns, nodes)
        on_them = [key for key, block in traffic.view.blocks.items() if block.slot is None]
        for key in list(traffic.view.blocks):
            if key not in on_them or not _is_on_a_node(traffic.view.blocks[key], nodes):
                traffic.view.end(key)
        ours, plain = traffic.both()
        assert traffic.view.blocks, "there is something to compare"
        for index, key in enumerate(sorted(traffic.view.blocks)):
            assert ours.book.around(key, traffic.now_ns) == plain.around(index)


def _is_on_a_node(block: Block, nodes: Nodes) -> bool:
    return any(set(block.devices) <= set(node) for node in nodes)


def test_other_margins_hold_at_once_for_a_place_that_was_just_looked_at() -> None:
    block = Block(9 * NS_PER_S, 0, Demand(1, NS_PER_S), (0,))
    book, view = ReservationBook(), View({0: 0}, [[0]], [block])
    for margins in (START_MARGINS, SMALL_MARGINS):
        view.margins = margins
        book.follow_devices(cast(Backlog, view))
        spared_ns = margins.admission.latest_ns(block.due_ns, 0) - block.demand.run_ns
        assert book.around((0, 0), 0)[1] == {0: spared_ns}


def test_a_reservation_without_a_group_gets_one_where_it_can_begin_first() -> None:
    """Until the guard gives it another. In the meantime it takes its time there, as others do."""
    first = Block(9 * NS_PER_S, 0, Demand(2, NS_PER_S))
    book, view = ReservationBook(), View({0: 0, 1: 0}, [[0, 1]], [first])
    book.follow_devices(cast(Backlog, view))
    assert book.around((10 * NS_PER_S, 0), 0)[0] == {0: NS_PER_S, 1: NS_PER_S}
    assert book.unplaced == {(9 * NS_PER_S, 0)}, "the view does not know of it"
    nowhere = replace(first, within=frozenset({7}))
    view.put((9 * NS_PER_S, 0), nowhere)
    book.follow_devices(cast(Backlog, view))
    assert book.around((10 * NS_PER_S, 0), 0)[0] == {0: 0, 1: 0}, "none that may run it is up"


# How much work it takes.


def filled(num: int, num_devices: int) -> tuple[View, ReservationBook, Random]:
    """A book of this number of reservations on nodes of eight devices."""
    rng = Random(1)
    nodes = [list(range(first, first + 8)) for first in range(0, num_devices, 8)]
    view, book = View(dict.fromkeys(range(num_devices), 0), nodes), ReservationBook()
    for number in range(num):
        key = rng.randrange(num) * NS_PER_S + NS_PER_S, number
        width = rng.choice((1, 1, 2, 4))
        group = tuple(sorted(rng.sample(rng.choice(nodes), width)))
        view.put(key, Block(key[0], 0, Demand(width, 1000), group))
    book.follow_devices(cast(Backlog, view))
    for margin in START_MARGINS:
        book.spared_ns((0, 0), margin, 0)
    book.before((NEVER_NS, 0))
    return view, book, rng


@pytest.mark.parametrize("num_devices", [8, 64])
def test_a_promise_takes_little_more_work_when_there_are_four_times_as_many(num_devices: int) -> None:
    """Counted in nodes of the trees: one placed and entered, one refused with its earliest deadline, one that ends."""
    worst: dict[int, int] = {}
    for num in (2000, 8000):
        view, book, rng = filled(num, num_devices)
        visits: list[int] = []
        for number in range(num, num + 20):
            before = book.num_visits
            key = rng.randrange(num) * NS_PER_S + NS_PER_S, number
            block = Reservations(book, 0).place(key[0], Demand(1, 1000))
            assert block is not None
            view.put(key, block)
            book.follow_devices(cast(Backlog, view))
            book.spared_ns((0, 0), START_MARGINS.guard, 0)
            Reservations(book, 0).earliest_ns(Demand(4, num * NS_PER_S), NS_PER_S)
            view.end(key)
            book.follow_devices(cast(Backlog, view))
            visits.append(book.num_visits - before)
        worst[num] = max(visits)
    assert worst[8000] < 2.5 * worst[2000], worst


def test_the_images_of_a_call_take_one_look() -> None:
    """Though each is noted twice: when it comes, and when its reservation is worked out again."""
    view, book, _ = filled(2000, 64)
    due_ns, begun = 500 * NS_PER_S, Mock(wraps=view.begun_reservations)
    visits: list[int] = []
    with patch.object(view, "begun_reservations", begun):
        for number in range(2000, 2010):
            before = book.num_visits
            block = Reservations(book, 0).place(due_ns, Demand(1, 1000))
            assert block is not None
            for _ in range(2):
                view.put((due_ns, number), block)
            book.follow_devices(cast(Backlog, view))
            visits.append(book.num_visits - before)
    assert visits[1:] == [0] * 9
    assert begun.call_count == 0, "no device and no running job has changed"


def test_a_search_for_the_earliest_deadline_keeps_to_its_budget() -> None:
    """With none left it is after all others; in between it is later than the earliest, never earlier."""
    _, book, _ = filled(500, 8)
    demand = Demand(8, 200 * NS_PER_S)
    found: list[int] = []
    for num_places in (0, 3, 24, 1000):
        budget = SearchBudget(num_places)
        found.append(Reservations(book, 0, budget).earliest_ns(demand))
        assert budget.num_places >= -2
        assert Reservations(book, 0).place(found[-1], demand) is not None
    assert found == sorted(found, reverse=True)
    assert found[0] >= book.keys[-1][0]


@pytest.mark.parametrize("step", [1, -1])
def test_the_tree_stays_balanced(step: int) -> None:
    """Also if all come at one end and leave at the other."""
    tree, keys = EffectTree(), [(number, 0) for number in range(3000)][::step]
    for key in keys:
        tree.put(key, Block(key[0], 0, Demand(1, 1), (0,)))
    assert tree._root.height <= 11
    for key in keys[:2900]:
        tree.remove(key)
    assert tree._root.height <= 6
    free_ns = {0: 0}
    tree.pass_before((NEVER_NS, 0), free_ns)
    assert free_ns == {0: 100}


def test_a_tall_tree_knows_the_effect_of_every_part() -> None:
    rng, guard, free_ns = Random(3), START_MARGINS.guard, {one: 7 * one for one in range(4)}
    tree, blocks = EffectTree(), dict[Key, Block]()
    for number in range(600):
        key, width = (rng.randrange(10**6) * NS_PER_MS, number), rng.choice((1, 2, 3))
        run_ns = rng.randint(1, 99)
        demand = rng.choice((Demand(width, run_ns), Demand(width, run_ns, run_ns // 3, run_ns // 4)))
        blocks[key] = Block(key[0], 0, demand, tuple(rng.sample(range(4), width)))
        tree.put(key, blocks[key])
    keys = sorted(blocks)
    ordered = [blocks[key] for key in keys]
    for index in range(0, 600, 23):
        expected, found = dict(free_ns), dict(free_ns)
        run_in_order(expected, [[0, 1, 2, 3]], ordered[:index])
        tree.pass_before(keys[index], found)
        assert found == expected, index
        spared_ns, later = dict.fromkeys(free_ns, NEVER_NS), ordered[index:]
        latest_ends(spared_ns, later, guard.latest_all_ns([block.due_ns for block in later], NS_PER_S))
        marks = tree.bounds_from(keys[index], guard)
        assert {one: time_of(mark, guard, NS_PER_S) for one, mark in marks.items()} == {
            one: ns for one, ns in spared_ns.items() if ns < NEVER_NS
        }


def test_a_job_whose_last_work_ends_late_is_late_though_no_reservation_waits_for_its_device() -> None:
    key, block = (9 * NS_PER_S, 0), Block(9 * NS_PER_S, 0, Demand(1, 0), (0,))
    book = ReservationBook()
    book.follow_devices(cast(Backlog, View({0: 0}, [[0]], [block])))
    margin = START_MARGINS.guard
    for ready_s, is_in_time in ((8, True), (10, False)):
        assert feasibility._is_in_time(book, key, block, ready_s * NS_PER_S, {0: NEVER_NS}, margin, 0) is is_in_time
