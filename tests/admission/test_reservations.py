"""Reservations: who may be given one. `test_guard` is about keeping them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import combinations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import POLICIES, only, promise_mix, table
from tilework.admission.reservation_timeline import Nodes, Times, choose, follow
from tilework.admission.reservations import Reservations
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Accept, Action, Reject
from tilework.core.events import Event, Submitted
from tilework.core.interfaces import Block, Demand
from tilework.core.request import RefusalCode, Request
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.core.work import Group
from tilework.policy.toolkit.margin import ADMISSION_MARGIN, GUARD_MARGIN
from tilework.sim.simulation import SimConfig, Simulation

NOW_NS = 1000 * NS_PER_MS
TIMES = st.integers(1000, 3000).map(lambda at_ms: at_ms * NS_PER_MS)
DEMANDS = st.builds(Demand, st.integers(1, 3), st.integers(1, 800).map(lambda run_ms: run_ms * NS_PER_MS))
NODES = st.sampled_from(([[0]], [[0, 1, 2]], [[0], [1]], [[0, 1], [2, 3]], [[0, 1, 2], [3]]))


@dataclass(frozen=True)
class Plane:
    """Devices that come free, and what is promised on them, at `NOW_NS`."""

    levels: Times
    nodes: Nodes
    blocks: list[Block]

    def promises(self, now_ns: int = NOW_NS) -> Reservations:
        return Reservations(dict(self.levels), self.nodes, self.blocks, now_ns)

    def ends_ns(self, blocks: Sequence[Block], anew: bool = False) -> list[int]:
        return follow(dict(self.levels), self.nodes, blocks, anew)[1]

    def with_one(self, index: int, newcomer: Block) -> list[Block]:
        return [*self.blocks[:index], newcomer, *self.blocks[index:]]

    def groups(self, width: int) -> Iterator[Group]:
        """All on which a block of this width could run."""
        width = min(width, max(map(len, self.nodes)))
        return (group for node in self.nodes for group in combinations(node, width))


def is_in_time(blocks: Sequence[Block], ends_ns: Sequence[int]) -> bool:
    return all(ADMISSION_MARGIN.due_ns(end, NOW_NS) <= block.due_ns for block, end in zip(blocks, ends_ns, strict=True))


@st.composite
def planes(draw: st.DrawFn) -> Plane:
    """Blocks in order of their deadlines, at any homes, all in time, many only just."""
    nodes = draw(NODES)
    plane = Plane({device_id: draw(TIMES) for node in nodes for device_id in node}, nodes, [])
    levels, due_ns = dict(plane.levels), 0
    for demand in draw(st.lists(DEMANDS, max_size=5)):
        home = draw(st.sampled_from(list(plane.groups(demand.width))))
        block = Block(0, draw(st.just(0) | TIMES), demand, home)
        (end_ns,) = follow(levels, nodes, [block])[1]
        due_ns = max(
            due_ns, ADMISSION_MARGIN.due_ns(end_ns, NOW_NS) + draw(st.sampled_from((0, 0, 200, 1000))) * NS_PER_MS
        )
        plane.blocks.append(replace(block, due_ns=due_ns))
    return plane


@given(plane=planes(), demand=DEMANDS, due_ns=TIMES)
def test_a_newcomer_is_let_in_if_all_are_in_time_wherever_it_goes_or_if_all_are_placed_anew(
    plane: Plane, demand: Demand, due_ns: int
) -> None:
    index = sum(block.due_ns <= due_ns for block in plane.blocks)
    at_home = [plane.with_one(index, Block(due_ns, NOW_NS, demand, group)) for group in plane.groups(demand.width)]
    anew = plane.with_one(index, Block(due_ns, NOW_NS, demand))
    there_is_room = any(is_in_time(blocks, plane.ends_ns(blocks)) for blocks in at_home)
    block = plane.promises().place(due_ns, demand)
    assert (block is not None) == (there_is_room or is_in_time(anew, plane.ends_ns(anew, anew=True)))
    if block is not None:
        assert (block.due_ns, block.demand, block.devices in plane.groups(demand.width)) == (due_ns, demand, True)
        if there_is_room:
            blocks = plane.with_one(index, replace(block, ready_ns=NOW_NS))
            assert is_in_time(blocks, plane.ends_ns(blocks)), "at the home that it is given"


@given(plane=planes(), demand=DEMANDS, at_least_ns=st.just(0) | TIMES)
def test_the_earliest_deadline_is_one_with_which_a_newcomer_is_let_in(
    plane: Plane, demand: Demand, at_least_ns: int
) -> None:
    """Also where earlier deadlines would do, but no later ones up to that."""
    promises = plane.promises()
    due_ns = promises.earliest_ns(demand, at_least_ns)
    assert due_ns >= at_least_ns
    assert promises.place(due_ns, demand) is not None


@given(plane=planes(), demand=DEMANDS)
def test_no_earlier_deadline_would_do_while_homes_stay(plane: Plane, demand: Demand) -> None:
    """Each place in the order is tried, each with the earliest deadline that would put a newcomer there."""
    found = []
    for index, group in product(range(len(plane.blocks) + 1), plane.groups(demand.width)):
        blocks = plane.with_one(index, Block(0, NOW_NS, demand, group))
        ends_ns = plane.ends_ns(blocks)
        after_ns = plane.blocks[index - 1].due_ns if index else 0
        due_ns = max(after_ns, ADMISSION_MARGIN.due_ns(ends_ns[index], NOW_NS))
        blocks[index] = replace(blocks[index], due_ns=due_ns)
        is_its_place = index == len(plane.blocks) or due_ns < plane.blocks[index].due_ns
        if is_its_place and is_in_time(blocks, ends_ns):
            found.append(due_ns)
    assert plane.promises().earliest_ns(demand) == min(found)


@pytest.mark.parametrize("count", [200, 300])
def test_of_many_promises_none_is_made_late_by_a_nanosecond(count: int) -> None:
    """Many are looked at in parts; each is tried with a nanosecond less to spare than a newcomer takes."""
    rng, num_refused = Random(1), 0
    for _ in range(60):
        plane = crowd(rng, count)
        index, demand = rng.randrange(count), Demand(rng.randint(1, 2), rng.randint(1, 400) * NS_PER_MS)
        due_ns = plane.blocks[index].due_ns
        index = sum(block.due_ns <= due_ns for block in plane.blocks)
        at_home = [plane.with_one(index, Block(due_ns, NOW_NS, demand, group)) for group in plane.groups(demand.width)]
        there_is_room = any(is_in_time(blocks, plane.ends_ns(blocks)) for blocks in at_home)
        anew = plane.with_one(index, Block(due_ns, NOW_NS, demand))
        moves = count <= 256 and is_in_time(anew, plane.ends_ns(anew, anew=True))
        promises = plane.promises(NOW_NS)
        assert (promises.place(due_ns, demand) is not None) == (there_is_room or moves)
        earliest_ns = promises.earliest_ns(demand, due_ns)
        assert promises.place(earliest_ns, demand) is not None
        num_refused += not there_is_room
    assert 5 < num_refused < 55


def crowd(rng: Random, count: int) -> Plane:
    """Many promises on four devices of two nodes; what they have to spare is just enough for some newcomers."""
    plane = Plane({device_id: rng.randint(1000, 1600) * NS_PER_MS for device_id in range(4)}, [[0, 1], [2, 3]], [])
    levels = dict(plane.levels)
    spare_ns = rng.randint(0, 400) * NS_PER_MS
    for _ in range(count):
        demand = Demand(rng.choice((1, 1, 2)), rng.randint(1, 400) * NS_PER_MS)
        home = choose(levels, plane.nodes, demand, 0)
        assert home is not None
        (end_ns,) = follow(levels, plane.nodes, [Block(0, 0, demand, home)])[1]
        due_ns = ADMISSION_MARGIN.due_ns(end_ns + spare_ns, NOW_NS) - rng.randint(0, 1)
        plane.blocks.append(Block(due_ns, 0, demand, home))
    plane.blocks.sort(key=lambda block: block.due_ns)
    return plane


def test_margins_leave_and_demand_the_same() -> None:
    for margin in (ADMISSION_MARGIN, GUARD_MARGIN):
        for end_ns in (NOW_NS, NOW_NS + 1, NOW_NS + 123_456_789, NOW_NS + 99 * NS_PER_S):
            due_ns = margin.due_ns(end_ns, NOW_NS)
            assert margin.latest_ns(due_ns, NOW_NS) == end_ns
            assert margin.latest_ns(due_ns - 1, NOW_NS) < end_ns


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    rate=st.floats(1, 6),
    share=st.sampled_from((0.3, 1.0)),
    devices_per_node=st.sampled_from((2, 3)),
)
def test_whoever_asks_again_with_the_deadline_that_it_was_offered_is_let_in(
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
