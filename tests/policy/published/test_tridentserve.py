"""TridentServe's dispatcher: its program by three solvers, the rewards, and the paper's example told by groups.

All stages are on each device here, but for the program itself; `test_tridentserve_placement` has the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import groups, job, planned, profile, request, shipped, simulate, table
from stages import DECODE, DIFFUSE, ENCODE, stage_of
from tilework.core.request import Request, Status
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.work import Member, Plan, Work
from tilework.cost.table_costs import TableCosts
from tilework.policy import registry
from tilework.policy.placement.roles import PlacementType
from tilework.policy.published.tridentserve.bids import LATE, MOST_SPEED, ON_TIME, one_by_one, read_bids
from tilework.policy.published.tridentserve.layout import Pool, PoolLayout
from tilework.policy.published.tridentserve.policy import TridentServe
from tilework.policy.published.tridentserve.program import EVERYWHERE, Capacities, PoolOption, solve_quickly
from tilework.policy.published.tridentserve.ways import Profiles, Ways
from tilework.policy.toolkit import knapsack
from tilework.policy.toolkit.knapsack import Option, solve_knapsack_quickly
from tilework.policy.toolkit.order import DeadlineOrder
from tilework.policy.toolkit.tasks import TaskReader
from tilework_lab.policies.tridentserve_ilp import solve, value_of

# Sides of 64, 128 and 192: efficient on 1, on up to 2 and on up to 4 devices.
STEPS_S = {
    64: {1: 0.1, 2: 0.09, 4: 0.08},
    128: {1: 0.2, 2: 0.11, 4: 0.08},
    192: {1: 0.4, 2: 0.21, 4: 0.12},
}
PROFILE = profile(STEPS_S, encode_s=0.1, decode_s=0.5)
COSTS = TableCosts(PROFILE)

POOLS = [Pool("", kind) for kind in (PlacementType.EDC, PlacementType.ED, PlacementType.DC)]
WIDTH, VALUE = st.integers(1, 8), st.integers(1, 2000)
ONE_POOL = st.lists(st.lists(st.builds(PoolOption, WIDTH, VALUE), max_size=4), max_size=5)
GROUPS = st.lists(st.lists(st.builds(PoolOption, WIDTH, VALUE, st.sampled_from(POOLS)), max_size=4), max_size=5)
CAPACITIES = st.dictionaries(st.sampled_from(POOLS), st.integers(0, 12))


def by_hand(options: Sequence[Sequence[PoolOption]], capacities: Capacities) -> int:
    """The most value, by trying everything."""
    choices = product(*[[None, *range(len(group))] for group in options])
    return max(value_of(options, chosen) for chosen in choices if fits(options, chosen, capacities))


def fits(options: Sequence[Sequence[PoolOption]], chosen: Sequence[int | None], capacities: Capacities) -> bool:
    return all(width <= capacities.get(pool, 0) for pool, width in widths_of(options, chosen).items())


def widths_of(options: Sequence[Sequence[PoolOption]], chosen: Sequence[int | None]) -> Counter[Pool]:
    found = Counter[Pool]()
    for group, index in zip(options, chosen, strict=True):
        if index is not None:
            found[group[index].pool] += group[index].width
    return found


# The program.


@settings(max_examples=150, deadline=None)
@given(GROUPS, CAPACITIES)
def test_the_program_is_solved_as_by_trying_everything(
    options: list[list[PoolOption]], capacities: dict[Pool, int]
) -> None:
    best = by_hand(options, capacities)
    solved = solve(options, capacities)
    assert (solved.value, solved.gap) == (best, pytest.approx(0.0, abs=1e-9))
    assert value_of(options, solved.chosen) == best
    assert fits(options, solved.chosen, capacities)
    chosen = solve_quickly(options, capacities)
    assert fits(options, chosen, capacities)
    assert value_of(options, chosen) <= best


@settings(max_examples=100, deadline=None)
@given(ONE_POOL, st.integers(0, 16))
def test_one_pool_is_a_knapsack(options: list[list[PoolOption]], capacity: int) -> None:
    chosen = solve_quickly(options, {EVERYWHERE: capacity})
    assert value_of(options, chosen) == by_hand(options, {EVERYWHERE: capacity})


@settings(max_examples=300, deadline=None)
@given(ONE_POOL, st.integers(8, 24))
def test_the_greedy_core_loses_less_than_one_option_is_worth(options: list[list[PoolOption]], capacity: int) -> None:
    """On few devices that may be all; see the next test for many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilework.policy.toolkit.knapsack._MOST_CELLS", -1)
        chosen = solve_knapsack_quickly(options, capacity)
    assert fits(options, chosen, {EVERYWHERE: capacity})
    dearest = max((option.value for group in options for option in group), default=0)
    assert value_of(options, chosen) >= by_hand(options, {EVERYWHERE: capacity}) - dearest


@pytest.mark.parametrize(
    ("capacity", "options", "chosen"),
    [
        (3, [[(1, 1), (2, 10)], [(1, 4)], [(1, 4)]], [1, 0, None]),  # An option that is not on the hull is skipped.
        (6, [[(3, 60)], [(5, 50), (6, 51)]], [0, None]),  # No group skips an option.
        (3, [[(2, 20)], [(1, 1), (2, 15)]], [0, 0]),  # What is left over is not left.
        (2, [[(1, 6)], [(2, 10)]], [0, None]),  # Here it is wrong.
    ],
)
def test_the_greedy_core_step_by_step(
    monkeypatch: pytest.MonkeyPatch, capacity: int, options: list[list[tuple[int, int]]], chosen: list[int | None]
) -> None:
    monkeypatch.setattr("tilework.policy.toolkit.knapsack._MOST_CELLS", -1)
    assert solve_knapsack_quickly([[Option(*one) for one in group] for group in options], capacity) == chosen


def test_the_solver_is_not_misled_by_the_greedy_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.policy.toolkit.knapsack._MOST_CELLS", -1)
    assert solve([[PoolOption(1, 6)], [PoolOption(2, 10)]], {EVERYWHERE: 2}).chosen == [None, 0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("per_device", [0.25, 1, 3])
def test_on_many_devices_the_greedy_core_is_as_good_as_the_solver(per_device: float, seed: int) -> None:
    """FLUX.1-dev: some roomy, some urgent, some late, some without a deadline."""
    rng, devices = Random(seed), 256
    requests = [any_flux(str(index), rng) for index in range(int(per_device * devices))]
    options = bids(requests, TableCosts(shipped("flux1dev_h100_eager")))
    assert len(options) * devices > knapsack._MOST_CELLS
    value = value_of(options, solve_quickly(options, {EVERYWHERE: devices}))
    assert value >= 0.995 * solve(options, {EVERYWHERE: devices}, max_nodes=1).bound


def any_flux(uid: str, rng: Random) -> Request:
    """It has waited up to half a minute."""
    side, slo_s = rng.choice((256, 512, 1024, 2048)), rng.choice((None, rng.uniform(5, 60)))
    asked = request(uid, 30 - rng.uniform(0, 30), side=side, steps=20, slo_s=slo_s)
    return replace(asked, pipeline="flux.1-dev")


def bids(requests: Sequence[Request], costs: TableCosts, now_s: float = 30.0) -> list[tuple[PoolOption, ...]]:
    """The options of requests that have not begun, with devices of a node of 8 free."""
    reader = TaskReader({}, costs, 8, ns_from_s(now_s))
    jobs = [job(index, asked, TridentServe().urgency_ns(asked, False)) for index, asked in enumerate(requests)]
    tasks = [task for one in jobs if (task := reader.read(one)) is not None]
    ways = Ways(PoolLayout.colocated({0: range(8)}), Profiles(), costs)
    return [bid.options for bid in read_bids(one_by_one(tasks), ways)]


def test_a_truncated_search_reports_its_gap() -> None:
    """Subset sums: the relaxation is worth the capacity, and whole numbers come close only after a search."""
    rng = Random(1)
    options = [[PoolOption(2 * width, 2 * width)] for width in rng.sample(range(1000, 9000), 40)]
    solved = solve(options, {EVERYWHERE: 50_001}, max_nodes=1)
    assert 0 < solved.gap < 0.01
    assert solved.value >= value_of(options, solve_quickly(options, {EVERYWHERE: 50_001}))
    assert solved.bound >= solved.value


@pytest.mark.parametrize(("num_up", "degrees"), [(1, [1]), (2, [2]), (4, [2, 4])])
def test_steps_that_did_not_fit_are_tried_again_only_where_nothing_wider_is_left(
    num_up: int, degrees: list[int]
) -> None:
    """The controller counts the attempts; without one the request would wait for ever."""
    costs, profiles, asked = TableCosts(PROFILE), Profiles(), request("a", side=192)
    stage, members = stage_of(asked.pipeline, DIFFUSE), (Member(0, 1, 1, 0),)
    work = Work(work_id=1, stage=stage, members=members, devices=(0,), num_steps=1, why="")
    costs.observe_memory(work, (asked.shape,), fitted=False, now_ns=0)
    profiles.set_devices(None, (num_up,))
    task = TaskReader({}, costs, num_up, 0).read(job(0, asked))
    assert task is not None
    ways = Ways(PoolLayout.colocated({0: range(num_up)}), profiles, costs).of(task)
    assert sorted(way.degree for way in ways) == degrees


# Rewards.


@pytest.mark.parametrize(
    ("now_s", "rewards"),
    [
        (0.0, [(1, ON_TIME), (2, ON_TIME)]),
        (2.3, [(1, ON_TIME), (2, ON_TIME)]),
        (2.5, [(2, ON_TIME)]),
        (3.3, [(2, ON_TIME)]),
        (3.47, [(1, 1.1 * LATE), (2, 1.1 * LATE)]),
        (5.0, [(1, 2 * LATE), (2, 2 * LATE)]),
        (18.0, [(1, 9.65 * LATE), (2, 9.65 * LATE)]),
        (18.6, [(1, ON_TIME), (2, ON_TIME)]),
        (99.0, [(1, ON_TIME), (2, ON_TIME)]),
    ],
)
def test_the_reward_of_a_request(now_s: float, rewards: list[tuple[int, float]]) -> None:
    """It takes 2.6 s on one device and 1.7 s on two, and is due at 5 s: till 2.4 s one is enough, till 3.3 s two are.

    Then it is late, and 17 s later by nine times the 1.7 s more.
    """
    found = bids([request("a", slo_s=5.0)], COSTS, now_s)[0]
    for_speed = {1: 1000 * 1.7 // 2.6, 2: 1000}
    assert [(option.width, option.value) for option in found] == [
        (width, pytest.approx(reward + for_speed[width], abs=LATE / 100)) for width, reward in rewards
    ]


def test_without_a_deadline_the_reward_grows_after_a_minute() -> None:
    """By 100 with each 1.6 s, which it takes."""
    asked = request("a", side=64, steps=10)
    values = [bids([asked], COSTS, now_s)[0][0].value - MOST_SPEED for now_s in (0.0, 58.4, 60.0, 61.6, 90.0)]
    assert values == [LATE, LATE, 2 * LATE, 3 * LATE, ON_TIME]


# What is dispatched.


def widths(plan: Plan) -> dict[int, int]:
    """The number of devices on which each job's steps are started."""
    return {start.job_ids[0]: len(start.devices) for start in plan.starts if start.stage.name == DIFFUSE}


def test_the_sum_counts_and_not_the_most_urgent() -> None:
    """Two devices: the one that needs both, and is due first, waits while two others are served that need one each."""
    wide, narrow = request("wide", slo_s=1.8), [request(str(n), side=64, slo_s=9.0) for n in range(2)]
    late = request("late", side=64)
    assert widths(planned(TridentServe(), [wide, *narrow], 2, COSTS)) == {1: 1, 2: 1}
    assert widths(planned(TridentServe(), [wide, late, late], 2, COSTS)) == {0: 2}


def test_a_request_gets_as_few_devices_as_its_deadline_allows_and_more_if_they_would_idle() -> None:
    roomy = [request(str(n), slo_s=9.0) for n in range(5)]
    assert widths(planned(TridentServe(), roomy[:4], 4, COSTS)) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert widths(planned(TridentServe(), roomy[:2], 4, COSTS)) == {0: 2, 1: 2}
    assert widths(planned(TridentServe(), roomy[:1], 4, COSTS)) == {0: 2}


def test_a_degree_that_wastes_devices_is_not_used_though_a_deadline_needs_it() -> None:
    """On two devices it would be on time, at an efficiency of 0.56."""
    policy, asked = TridentServe(), request("a", side=64, slo_s=1.55)
    assert policy.degrees(asked, COSTS) == [1]
    assert planned(policy, [asked], 4, COSTS).dropped_to_best_effort[0][0] == 0


def test_the_widest_jobs_are_placed_first_and_those_without_a_node_are_decided_again() -> None:
    """Three devices free on one node and one on another: two groups of two are free in number, and not in fact."""
    both = [request(str(n)) for n in range(2)]
    assert widths(planned(TridentServe(), both, costs=COSTS, devices=(0, 1, 2, 8))) == {0: 2, 1: 1}
    plan = planned(TridentServe(), [request("small", side=64), *both], costs=COSTS, devices=(0, 1, 2, 8, 9))
    placed = [(start.job_ids[0], start.devices) for start in plan.starts if start.stage.name == DIFFUSE]
    assert placed == [(1, (0, 1)), (2, (8, 9)), (0, (2,))]


# Over time.


def test_figure_6_nine_plans_of_three_requests() -> None:
    """#0 runs encode, steps and decode on one device, merged. #1 has two for its steps, and one of these decodes.

    #2, which came meanwhile, runs its steps and its decode on the other, "at the third tick", as the decode begins. The
    paper has more devices, since its encodes and decodes have their own; it gives no numbers.
    """
    requests = [
        request("#0", side=64, steps=40, slo_s=9.0),
        request("#1", side=128, steps=10, slo_s=2.0),
        request("#2", 0.5, side=64, steps=4, slo_s=9.0),
    ]
    trace = simulate(requests, "tridentserve", num_devices=3, costs=PROFILE)
    assert {stage: groups(trace, stage) for stage in (ENCODE, DIFFUSE, DECODE)} == {
        ENCODE: {"#0": [(2,)], "#1": [(0,)], "#2": [(1,)]},
        DIFFUSE: {"#0": [(2,)], "#1": [(0, 1)], "#2": [(1,)]},
        DECODE: {"#0": [(2,)], "#1": [(0,)], "#2": [(1,)]},
    }
    starts_s = {(run.work.job_ids[0], run.work.stage.name): run.start_ns / NS_PER_S for run in reversed(trace.runs)}
    assert starts_s[1, DECODE] == starts_s[2, ENCODE] == pytest.approx(0.1 + 10 * 0.11, abs=0.01)


def test_a_request_that_has_begun_is_not_disturbed() -> None:
    """Neither by a more urgent one, nor by devices that come free."""
    long, short = request("long", steps=60, slo_s=99.0), request("short", side=64, steps=5)
    requests = [request("first", side=64, steps=2), *[replace(one, arrival_ns=1) for one in (long, short)]]
    requests += [request("urgent", 0.1, side=64, slo_s=4.0)]
    trace = simulate(requests, "tridentserve", num_devices=2, costs=PROFILE)
    (group,) = groups(trace)["long"]
    assert len(group) == 1
    assert trace.endings[3].on_time


def test_a_request_that_can_be_on_time_waits_for_enough_devices() -> None:
    """It needs two; on the one that is free it would be late for good."""
    requests = [request("a", side=64, steps=3), request("b", 0.1, slo_s=2.55)]
    trace = simulate(requests, "tridentserve", num_devices=2, costs=PROFILE)
    assert groups(trace)["b"] == [(0, 1)]
    assert trace.endings[1].on_time


@pytest.mark.parametrize("slo_s", [None, 2.0])
def test_a_request_that_needs_several_devices_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, slo_s: float | None
) -> None:
    """The wide one runs on four devices only; narrow ones, which can be on time, take each that comes free."""
    order = DeadlineOrder(patience_ns=20 * NS_PER_S, late_patience_ns=30 * NS_PER_S)
    monkeypatch.setitem(registry._GIVEN, "impatient", lambda: TridentServe(order=order))
    narrow_costs, wide_costs = table(), table(degrees=(4,), pipeline="video")
    costs = replace(narrow_costs, rows=narrow_costs.rows + wide_costs.rows)
    requests = [request(str(n), 0.2 * n, steps=9 + n % 3, slo_s=60.0) for n in range(200)]
    requests.append(replace(request("wide", 1.0, steps=50, slo_s=slo_s), pipeline="video"))
    trace = simulate(requests, "impatient", num_devices=4, costs=costs)
    (run_ns,) = [run.start_ns for run in trace.runs if run.work.stage == stage_of("video", ENCODE)]
    held_s = run_ns / NS_PER_S - 1 - (20 if slo_s is None else 30)
    assert groups(trace)["wide"] == [(0, 1, 2, 3)]
    assert 0 < held_s < 0.01 + 11 * 0.1 + 0.05


@pytest.mark.parametrize("policy", ["tridentserve", "tridentserve-ilp"])
def test_a_group_stays_inside_its_node_and_the_same_until_the_end(policy: str) -> None:
    rng = Random(3)
    requests = [
        request(str(n), 0.2 * n, side=rng.choice((64, 128, 192)), slo_s=rng.choice((None, 3.0, 6.0))) for n in range(60)
    ]
    trace = simulate(requests, policy, num_devices=8, costs=replace(PROFILE, devices_per_node=4))
    assert {ending.status for ending in trace.endings} == {Status.DONE}
    visited = groups(trace)
    assert all(len(each) == 1 for each in visited.values())
    assert {len({device_id // 4 for device_id in group}) for (group,) in visited.values()} == {1}
    assert {len(group) for (group,) in visited.values()} == {1, 2, 4}
