"""Promises: who may be given one. `test_guard` is about keeping them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from builders import only, promise_mix, table
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Accept, Action, Reject
from tilework.core.events import Event, Submitted
from tilework.core.interfaces import Block, Demand
from tilework.core.request import RefusalCode, Request
from tilework.core.time import NS_PER_MS
from tilework.policy.plane import Levels, place
from tilework.policy.promises import ADMISSION_MARGIN, Promises
from tilework.policy.registry import policy_names
from tilework.sim.simulation import SimConfig, Simulation

NOW_NS = 1000 * NS_PER_MS
TIMES = st.integers(1000, 3000).map(lambda at_ms: at_ms * NS_PER_MS)
DEMANDS = st.builds(Demand, st.integers(1, 3), st.integers(1, 800).map(lambda run_ms: run_ms * NS_PER_MS))
LEVELS = st.lists(st.lists(TIMES, min_size=1, max_size=3).map(sorted), min_size=1, max_size=2)


@st.composite
def promised_blocks(draw: st.DrawFn, levels: Levels, readies: st.SearchStrategy[int]) -> list[Block]:
    """Blocks in order of their deadlines, most of which can be met, many only just."""
    free_ns, blocks, due_ns = [list(node) for node in levels], list[Block](), 0
    for demand in draw(st.lists(DEMANDS, max_size=5)):
        ready_ns = draw(readies)
        least_ns = ADMISSION_MARGIN.due_ns(place(free_ns, demand, ready_ns), NOW_NS)
        due_ns = max(due_ns, least_ns + draw(st.sampled_from((-1, 0, 0, 200, 1000))) * NS_PER_MS)
        blocks.append(Block(due_ns, ready_ns, demand))
    return blocks


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Levels, list[Block]]:
    levels = draw(LEVELS)
    return levels, draw(promised_blocks(levels, st.just(0) | TIMES))


def end_at(levels: Levels, blocks: Sequence[Block], index: int, demand: Demand) -> tuple[int, bool]:
    """When a newcomer at this place in the order ends, and whether those behind it are in time."""
    free_ns = [list(node) for node in levels]
    for block in blocks[:index]:
        place(free_ns, block.demand, block.ready_ns)
    end_ns = place(free_ns, demand, NOW_NS)
    behind = [(place(free_ns, block.demand, block.ready_ns), block.due_ns) for block in blocks[index:]]
    return end_ns, all(ADMISSION_MARGIN.due_ns(end_ns, NOW_NS) <= due_ns for end_ns, due_ns in behind)


@given(scene=scenes(), demand=DEMANDS, due_ns=TIMES)
def test_a_newcomer_is_let_in_if_it_and_all_behind_it_end_in_time(
    scene: tuple[Levels, list[Block]], demand: Demand, due_ns: int
) -> None:
    levels, blocks = scene
    index = sum(block.due_ns <= due_ns for block in blocks)
    end_ns, is_harmless = end_at(levels, blocks, index, demand)
    is_in_time = ADMISSION_MARGIN.due_ns(end_ns, NOW_NS) <= due_ns
    promises = Promises(levels, blocks, NOW_NS)
    assert promises.end_ns(due_ns, demand) == (end_ns if is_in_time and is_harmless else None)


def one_lacks_a_nanosecond(
    levels: Levels, placed: Sequence[Block], index: int, newcomer: Demand, victim: int
) -> tuple[list[Block], int, int]:
    """Deadlines that leave every block just what a newcomer at `index` delays it by, but for the victim.

    Also the newcomer's own deadline and end.
    """
    without, behind = [list(node) for node in levels], [list(node) for node in levels]
    ends_ns = [place(without, block.demand, block.ready_ns) for block in placed]
    for block in placed[:index]:
        place(behind, block.demand, block.ready_ns)
    end_ns = place(behind, newcomer, NOW_NS)
    for rank, block in enumerate(placed[index:], start=index):
        ends_ns[rank] = max(ends_ns[rank], place(behind, block.demand, block.ready_ns))
    least_ns = [ADMISSION_MARGIN.due_ns(at_ns, NOW_NS) - (rank == victim) for rank, at_ns in enumerate(ends_ns)]
    due_ns = list(accumulate(least_ns, max))
    tight = [Block(due, block.ready_ns, block.demand) for due, block in zip(due_ns, placed, strict=True)]
    return tight, max(due_ns[index - 1] if index else 0, ADMISSION_MARGIN.due_ns(end_ns, NOW_NS)), end_ns


def test_a_newcomer_is_not_let_in_if_one_behind_it_would_be_late_by_a_nanosecond() -> None:
    """Whatever judges by less than placing all blocks again must not promise more than it knows."""
    num_tight, rng = 0, Random(1)

    def some_ns(least_ms: int, most_ms: int) -> int:
        return rng.randint(least_ms * NS_PER_MS, most_ms * NS_PER_MS)

    for _ in range(1500):
        levels = [sorted(some_ns(1000, 1600) for _ in range(rng.randint(1, 4)))]
        placed = [Block(0, 0, Demand(1, some_ns(1, 400))) for _ in range(rng.randint(2, 45))]
        index, newcomer = rng.randrange(len(placed)), Demand(rng.randint(1, 3), some_ns(1, 800))
        victim = rng.randrange(index, len(placed))
        tight, own_ns, end_ns = one_lacks_a_nanosecond(levels, placed, index, newcomer, victim)
        if own_ns < tight[index].due_ns:
            _, is_harmless = end_at(levels, tight, index, newcomer)
            num_tight += not is_harmless
            promises = Promises(levels, tight, NOW_NS - 40 * NS_PER_MS)
            promises.end_ns(own_ns, newcomer)
            promises.at(NOW_NS)
            assert promises.end_ns(own_ns, newcomer) == (end_ns if is_harmless else None)
    assert num_tight > 500


@pytest.mark.parametrize(
    ("levels", "run", "placed"),
    [
        ([[0, 1]], 3, [(2, 1, 3), (0, 1, 7)]),
        ([[0, 1, 1]], 2, [(0, 2, 4), (0, 1, 9)]),
        ([[1], [0]], 4, [(0, 1, 8)]),
    ],
    ids=["one is ready late", "one takes two devices", "two nodes"],
)
def test_a_newcomer_may_delay_others_by_more_than_it_raises_the_levels(
    levels: list[list[int]], run: int, placed: list[tuple[int, int, int]]
) -> None:
    """In tenths of a second from now; of each block when it is ready, its width and its time.

    Only the last one would be late; the others are due when it is.
    """
    unit_ns = 100 * NS_PER_MS
    scene = [[NOW_NS + at * unit_ns for at in node] for node in levels]
    after = [Block(0, NOW_NS + ready * unit_ns, Demand(width, time * unit_ns)) for ready, width, time in placed]
    newcomer = Demand(1, run * unit_ns)
    tight, own_ns, _ = one_lacks_a_nanosecond(scene, after, 0, newcomer, len(after) - 1)
    tight = [replace(block, due_ns=tight[-1].due_ns) for block in tight]
    assert own_ns < tight[0].due_ns
    assert Promises(scene, tight, NOW_NS).end_ns(own_ns, newcomer) is None


def blocks(*of_ms: tuple[int, int, int, int]) -> list[Block]:
    """From (due, ready, width, time)."""
    return [
        Block(due_ms * NS_PER_MS, ready_ms * NS_PER_MS, Demand(width, run_ms * NS_PER_MS))
        for due_ms, ready_ms, width, run_ms in of_ms
    ]


@given(scene=scenes(), demand=DEMANDS, at_least_ns=st.just(0) | TIMES)
@example(
    # A newcomer breaks no promise if it is due before the second or after the third, but one if it is due between them.
    scene=(
        [[1402 * NS_PER_MS, 2579 * NS_PER_MS], [1323 * NS_PER_MS, 2011 * NS_PER_MS]],
        blocks((2263, 1689, 2, 105), (3378, 2398, 2, 581), (3378, 1139, 2, 340), (3822, 0, 2, 667)),
    ),
    demand=Demand(1, 192 * NS_PER_MS),
    at_least_ns=3534 * NS_PER_MS,
)
def test_the_earliest_deadline_is_one_with_which_a_newcomer_is_let_in(
    scene: tuple[Levels, list[Block]], demand: Demand, at_least_ns: int
) -> None:
    promises = Promises(*scene, NOW_NS)
    due_ns = promises.earliest_ns(demand, at_least_ns)
    assert due_ns >= at_least_ns
    assert promises.end_ns(due_ns, demand) is not None


@given(data=st.data(), free_ns=TIMES, run_ns=st.integers(1, 800 * NS_PER_MS))
def test_no_earlier_deadline_would_do(data: st.DataObject, free_ns: int, run_ns: int) -> None:
    """Each place in the order is tried, each with the earliest deadline that would put a newcomer there.

    On one device, where all are ready. Else a later place in the order may break a promise though an earlier one does
    not, and the search passes over the earlier one.
    """
    levels, demand = [[free_ns]], Demand(1, run_ns)
    blocks = data.draw(promised_blocks(levels, st.just(0)))
    found = []
    for index in range(len(blocks) + 1):
        end_ns, is_harmless = end_at(levels, blocks, index, demand)
        after_ns = blocks[index - 1].due_ns if index else 0
        due_ns = max(after_ns, ADMISSION_MARGIN.due_ns(end_ns, NOW_NS))
        if is_harmless and (index == len(blocks) or due_ns < blocks[index].due_ns):
            found.append(due_ns)
    assert Promises(levels, blocks, NOW_NS).earliest_ns(demand) == min(found)


@pytest.mark.parametrize("policy", policy_names())
@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    rate=st.floats(1, 6),
    share=st.sampled_from((0.3, 1.0)),
    gpus_per_node=st.sampled_from((2, 3)),
)
def test_whoever_asks_again_with_the_deadline_that_it_was_offered_is_let_in(
    policy: str, seed: int, rate: float, share: float, gpus_per_node: int
) -> None:
    costs = replace(table(degrees=(1, 2)), gpus_per_node=gpus_per_node)
    simulation = Simulation(ControllerConfig(policy=policy), costs, SimConfig(num_gpus=3, seed=seed))

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
