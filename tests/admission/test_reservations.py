"""Which requests get a reservation. `test_reservation_guard` is about keeping reservations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import combinations, product
from random import Random
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import FEW_POLICIES, PIPELINE, only, promise_mix, request, simulate, table
from reserved import View
from stages import DECODE, DIFFUSE, ENCODE
from tilework.admission.contract import Backlog
from tilework.admission.reservation_book import ReservationBook
from tilework.admission.reservation_timeline import DeviceTimes, Nodes, Places, choose_group, run_in_order
from tilework.admission.reservations import Reservations
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Accept, Action, Reject
from tilework.core.block import Block, Demand
from tilework.core.cost_row import CostRow
from tilework.core.events import Event, Submitted
from tilework.core.request import OnMiss, RefusalCode, Request, Status
from tilework.core.time import NS_PER_MS, NS_PER_S, START_MARGINS
from tilework.core.work import Group
from tilework.cost.table import CostTable
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation

NOW_NS = 1000 * NS_PER_MS
TIMES = st.integers(1000, 3000).map(lambda at_ms: at_ms * NS_PER_MS)
DEMANDS = st.tuples(st.integers(1, 3), st.integers(1, 800)).map(lambda pair: Demand(pair[0], pair[1] * NS_PER_MS))
NODES = st.sampled_from(([[0]], [[0, 1, 2]], [[0], [1]], [[0, 1], [2, 3]], [[0, 1, 2], [3]]))


@dataclass(frozen=True)
class Schedule:
    """When devices are free, and the reservations on them, at `NOW_NS`."""

    free_ns: DeviceTimes
    nodes: Nodes
    blocks: list[Block]

    def reservations(self, now_ns: int = NOW_NS) -> Reservations:
        book = ReservationBook()
        book.follow_devices(cast(Backlog, View(self.free_ns, self.nodes, self.blocks)))
        return Reservations(book, now_ns)

    def ends_ns(self, blocks: Sequence[Block], anew: bool = False) -> list[int]:
        return run_in_order(dict(self.free_ns), Places(self.nodes), blocks, anew)[1]

    def with_one(self, index: int, newcomer: Block) -> list[Block]:
        return [*self.blocks[:index], newcomer, *self.blocks[index:]]

    def groups(self, width: int) -> Iterator[Group]:
        """All groups on which a block of this width could run."""
        width = min(width, max(map(len, self.nodes)))
        return (group for node in self.nodes for group in combinations(node, width))


def is_in_time(blocks: Sequence[Block], ends_ns: Sequence[int]) -> bool:
    return all(
        START_MARGINS.admission.due_ns(end, NOW_NS) <= block.due_ns for block, end in zip(blocks, ends_ns, strict=True)
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Blocks in order of their deadlines, on any groups, all in time, many without any slack."""
    nodes = draw(NODES)
    schedule = Schedule({device_id: draw(TIMES) for node in nodes for device_id in node}, nodes, [])
    free_ns, due_ns = dict(schedule.free_ns), 0
    for demand in draw(st.lists(DEMANDS, max_size=5)):
        group = draw(st.sampled_from(list(schedule.groups(demand.width))))
        block = Block(0, draw(st.just(0) | TIMES), demand, group)
        (end_ns,) = run_in_order(free_ns, Places(nodes), [block])[1]
        due_ns = max(
            due_ns,
            START_MARGINS.admission.due_ns(end_ns, NOW_NS) + draw(st.sampled_from((0, 0, 200, 1000))) * NS_PER_MS,
        )
        schedule.blocks.append(replace(block, due_ns=due_ns))
    return schedule


@given(schedule=schedules(), demand=DEMANDS, due_ns=TIMES)
def test_a_request_gets_a_reservation_if_all_are_in_time_on_some_group(
    schedule: Schedule, demand: Demand, due_ns: int
) -> None:
    index = sum(block.due_ns <= due_ns for block in schedule.blocks)
    on_groups = [
        schedule.with_one(index, Block(due_ns, NOW_NS, demand, group)) for group in schedule.groups(demand.width)
    ]
    block = schedule.reservations().place(due_ns, demand)
    assert (block is not None) == any(is_in_time(blocks, schedule.ends_ns(blocks)) for blocks in on_groups)
    if block is not None:
        assert (block.due_ns, block.demand, block.devices in schedule.groups(demand.width)) == (due_ns, demand, True)
        blocks = schedule.with_one(index, replace(block, ready_ns=NOW_NS))
        assert is_in_time(blocks, schedule.ends_ns(blocks)), "on the group that it gets"


@given(schedule=schedules(), demand=DEMANDS, at_least_ns=st.just(0) | TIMES)
def test_the_earliest_deadline_is_one_with_which_a_request_gets_a_reservation(
    schedule: Schedule, demand: Demand, at_least_ns: int
) -> None:
    """Even if some earlier deadlines would be accepted, but not all later ones."""
    reservations = schedule.reservations()
    due_ns = reservations.earliest_ns(demand, at_least_ns)
    assert due_ns >= at_least_ns
    assert reservations.place(due_ns, demand) is not None


@given(schedule=schedules(), demand=DEMANDS)
def test_no_earlier_deadline_is_possible_while_other_groups_stay(schedule: Schedule, demand: Demand) -> None:
    """Each place in the order is tried with the earliest deadline that would put a new request there."""
    found = []
    for index, group in product(range(len(schedule.blocks) + 1), schedule.groups(demand.width)):
        blocks = schedule.with_one(index, Block(0, NOW_NS, demand, group))
        ends_ns = schedule.ends_ns(blocks)
        after_ns = schedule.blocks[index - 1].due_ns if index else 0
        due_ns = max(after_ns, START_MARGINS.admission.due_ns(ends_ns[index], NOW_NS))
        blocks[index] = replace(blocks[index], due_ns=due_ns)
        is_its_place = index == len(schedule.blocks) or due_ns < schedule.blocks[index].due_ns
        if is_its_place and is_in_time(blocks, ends_ns):
            found.append(due_ns)
    assert schedule.reservations().earliest_ns(demand) == min(found)


@pytest.mark.parametrize("count", [200, 300])
def test_of_many_reservations_none_is_made_late_by_a_nanosecond(count: int) -> None:
    """Many reservations are cached in parts; each block is tried with a nanosecond less slack than a request takes."""
    rng, num_refused = Random(1), 0
    for _ in range(60):
        schedule = many(rng, count)
        index, demand = rng.randrange(count), Demand(rng.randint(1, 2), rng.randint(1, 400) * NS_PER_MS)
        due_ns = schedule.blocks[index].due_ns
        index = sum(block.due_ns <= due_ns for block in schedule.blocks)
        on_groups = [
            schedule.with_one(index, Block(due_ns, NOW_NS, demand, group)) for group in schedule.groups(demand.width)
        ]
        there_is_room = any(is_in_time(blocks, schedule.ends_ns(blocks)) for blocks in on_groups)
        reservations = schedule.reservations(NOW_NS)
        assert (reservations.place(due_ns, demand) is not None) == there_is_room
        earliest_ns = reservations.earliest_ns(demand, due_ns)
        assert reservations.place(earliest_ns, demand) is not None
        num_refused += not there_is_room
    assert 5 < num_refused < 55


def many(rng: Random, count: int) -> Schedule:
    """Many reservations on four devices of two nodes, with just enough to spare for some new requests."""
    schedule = Schedule(
        {device_id: rng.randint(1000, 1600) * NS_PER_MS for device_id in range(4)}, [[0, 1], [2, 3]], []
    )
    free_ns = dict(schedule.free_ns)
    spare_ns = rng.randint(0, 400) * NS_PER_MS
    for _ in range(count):
        demand = Demand(rng.choice((1, 1, 2)), rng.randint(1, 400) * NS_PER_MS)
        chosen = choose_group(free_ns, Places(schedule.nodes), demand, 0)
        assert chosen is not None
        (end_ns,) = run_in_order(free_ns, Places(schedule.nodes), [Block(0, 0, demand, *chosen)])[1]
        due_ns = START_MARGINS.admission.due_ns(end_ns + spare_ns, NOW_NS) - rng.randint(0, 1)
        schedule.blocks.append(Block(due_ns, 0, demand, *chosen))
    schedule.blocks.sort(key=lambda block: block.due_ns)
    return schedule


def test_a_margin_gives_the_earliest_deadline_and_the_latest_end_of_each_other() -> None:
    for margin in START_MARGINS:
        for end_ns in (NOW_NS, NOW_NS + 1, NOW_NS + 123_456_789, NOW_NS + 99 * NS_PER_S):
            due_ns = margin.due_ns(end_ns, NOW_NS)
            assert margin.latest_ns(due_ns, NOW_NS) == end_ns
            assert margin.latest_ns(due_ns - 1, NOW_NS) < end_ns


@pytest.mark.parametrize("policy", FEW_POLICIES)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    rate=st.floats(1, 6),
    share=st.sampled_from((0.3, 1.0)),
    devices_per_node=st.sampled_from((2, 3)),
)
def test_a_refused_request_is_accepted_with_the_earliest_deadline_of_its_refusal(
    policy: str, seed: int, rate: float, share: float, devices_per_node: int
) -> None:
    costs = replace(table(degrees=(1, 2)), devices_per_node=devices_per_node)
    simulation = Simulation(ControllerConfig(policy=policy), costs, SimConfig(num_devices=3, seed=seed))

    def ask_again(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        for refused in only(Reject, actions):
            assert isinstance(event, Submitted)
            assert refused.code is RefusalCode.DEADLINE
            again = replace(event.request, uid="again", deadline_ns=refused.earliest_ns)
            answers = deepcopy(simulation.controller).handle(Submitted(again), now_ns)
            assert only(Accept, answers), (event.request, refused, only(Reject, answers))
            ask_again_together(event.request, now_ns)

    def ask_again_together(request: Request, now_ns: int) -> None:
        control = deepcopy(simulation.controller)
        trio = [replace(request, uid=f"again {index}") for index in range(3)]
        refused = only(Reject, control.handle(three(trio), now_ns))[0]
        later = [replace(one, deadline_ns=refused.earliest_ns) for one in trio]
        answers = control.handle(three(later), now_ns)
        assert len(only(Accept, answers)) == 3, (request, refused, only(Reject, answers))

    def three(requests: Sequence[Request]) -> Submitted:
        return Submitted(requests[0], tuple(requests[1:]))

    simulation.run(promise_mix(20, rate, seed, share), observe=ask_again)


@pytest.mark.parametrize("policy", ["tilework", "tetriserve"])
def test_the_steps_of_a_promised_request_use_devices_that_another_no_longer_needs_while_it_is_decoded(
    policy: str,
) -> None:
    """Both need two of three devices for 5 s of steps, then one for 4 s. In turn, the second would end after 18 s."""
    seconds = {(ENCODE, 1): 0.0, (DIFFUSE, 2): 0.5, (DECODE, 1): 4.0}
    rows = [
        CostRow(pipeline=PIPELINE, stage=stage, height=128, width=128, degree=degree, seconds=value)
        for (stage, degree), value in seconds.items()
    ]
    first, second = (
        request(uid, steps=10, slo_s=slo_s, on_miss=OnMiss.REJECT) for uid, slo_s in (("a", 11), ("b", 16))
    )
    trace = simulate([first, second], policy, num_devices=3, costs=CostTable(hardware="made up", rows=tuple(rows)))
    assert [(ending.status, ending.on_time) for ending in trace.endings] == [(Status.DONE, True)] * 2, trace.endings
