"""The bound on requests on time and the exact optimum: against every schedule of small cases, and all policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from exact_optimum import Optimum, TooLarge, exact_optimum
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders import FEW_POLICIES, PIPELINE, flux_requests, poisson, promise_mix, request, simulate, table
from stages import DECODE, DIFFUSE, ENCODE
from tilework.core.cost_row import CostRow
from tilework.core.request import Request
from tilework.cost.demand import Speed, worthwhile
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.cost.tabled import UnknownCost
from tilework_lab.optimum.bound import Bound, on_time_bound
from tilework_lab.optimum.solver import Program, solve_relaxed, solve_whole

UNIT_S = 0.1
NARROW, WIDE = 64, 128  # Sides of the two kinds of requests of `priced`.


def priced(encode: int, decode: int, *steps: dict[int, int]) -> CostTable:
    """Times in units, 0 for a stage that costs nothing; `steps` by degree, of NARROW and, if it is given, of WIDE."""
    rows = []
    for side, by_degree in zip((NARROW, WIDE), steps, strict=False):
        times = [(ENCODE, 1, encode), (DECODE, 1, decode), *((DIFFUSE, *one) for one in by_degree.items())]
        rows += [
            CostRow(pipeline=PIPELINE, stage=stage, height=side, width=side, degree=degree, seconds=units * UNIT_S)
            for stage, degree, units in times
            if units
        ]
    return CostTable(hardware="toy", rows=tuple(rows))


def asked(uid: str, arrival: int, slo: int | None, steps: int = 1, side: int = NARROW) -> Request:
    """Times in units."""
    return request(uid, arrival * UNIT_S, side=side, steps=steps, slo_s=None if slo is None else slo * UNIT_S)


def bound(requests: Sequence[Request], costs: CostTable, num_devices: int = 1, per_node: int = 8, **options) -> Bound:
    return on_time_bound(requests, TableCosts(costs), num_devices=num_devices, devices_per_node=per_node, **options)


def optimum(requests: Sequence[Request], costs: CostTable, num_devices: int = 1, per_node: int = 8) -> Optimum:
    return exact_optimum(requests, TableCosts(costs), num_devices=num_devices, devices_per_node=per_node)


# Cases by hand.


def test_only_one_of_two_requests_for_the_same_time_is_on_time() -> None:
    requests, costs = [asked("a", 0, 4, steps=3), asked("b", 1, 4, steps=3)], priced(0, 0, {1: 1})
    assert bound(requests, costs).value == len(optimum(requests, costs).on_time) == 1
    assert bound(requests, costs, num_devices=2).value == len(optimum(requests, costs, num_devices=2).on_time) == 2


def test_encode_and_decode_take_their_part_of_the_window_and_of_the_devices() -> None:
    requests = [asked("a", 0, 6, steps=2), asked("b", 0, 6, steps=2)]
    assert bound(requests, priced(0, 0, {1: 1})).value == 2
    assert bound(requests, priced(1, 1, {1: 1})).value == 1
    assert bound([asked("a", 0, 3, steps=2)], priced(1, 1, {1: 1})).unreachable == {"a"}


def test_nothing_runs_beside_a_group_of_all_devices() -> None:
    """Together they need 2 devices x 2 units, which there are; but one needs both at once, and the other always one."""
    requests, costs = [asked("a", 0, 2), asked("b", 0, 2, side=WIDE)], priced(0, 0, {1: 2, 2: 2}, {1: 3, 2: 1})
    assert bound(requests, costs, num_devices=2).value == 1
    assert len(optimum(requests, costs, num_devices=2).on_time) == 1


def test_groups_of_some_devices_run_side_by_side() -> None:
    requests, costs = [asked("a", 0, 3), asked("b", 0, 3)], priced(0, 0, {1: 9, 2: 3, 4: 2})
    assert bound(requests, costs, num_devices=4).value == len(optimum(requests, costs, num_devices=4).on_time) == 2


def test_no_group_is_wider_than_a_node() -> None:
    requests, costs = [asked("a", 0, 1)], priced(0, 0, {1: 2, 2: 1})
    assert bound(requests, costs, num_devices=2, per_node=2).value == 1
    assert bound(requests, costs, num_devices=2, per_node=1).unreachable == {"a"}
    assert optimum(requests, costs, num_devices=2, per_node=1).on_time == frozenset()


def test_a_request_without_a_deadline_takes_nothing_and_does_not_count() -> None:
    found = bound([asked("a", 0, 3, steps=3), asked("b", 0, None, steps=50)], priced(0, 0, {1: 1}))
    assert (found.value, found.shares) == (1.0, {"a": pytest.approx(1.0)})
    assert bound([], priced(0, 0, {1: 1})) == Bound(value=0.0, shares={}, unreachable=frozenset())


def test_an_exact_fit_is_on_time_and_a_nanosecond_less_is_not() -> None:
    exact = asked("a", 3, 7, steps=7)
    assert exact.deadline_ns is not None
    costs = priced(0, 0, {1: 1})
    late = replace(exact, deadline_ns=exact.deadline_ns - 1)
    assert (bound([exact], costs).value, bound([late], costs).value) == (1, 0)


def test_weights_are_what_requests_count() -> None:
    requests, costs = [asked("a", 0, 3, steps=3), asked("b", 0, 3, steps=3)], priced(0, 0, {1: 1})
    found = bound(requests, costs, weights={"a": 1.0, "b": 2.5})
    assert found.value == pytest.approx(2.5, abs=1e-4)
    assert found.shares == pytest.approx({"a": 0.0, "b": 1.0})


def test_only_degrees_that_are_quicker_than_every_narrower_one_are_worthwhile() -> None:
    speeds = [Speed(1, 40), Speed(2, 72), Speed(4, 40), Speed(8, 39)]
    assert worthwhile(speeds) == [Speed(1, 40), Speed(8, 39)]


def test_fewer_cuts_keep_it_a_bound() -> None:
    requests, costs = flux_requests(60, 30, 1.0, seed=3), read_table("flux1dev_h100_eager")
    values = [bound(requests, costs, 8, max_cuts=cuts, max_whole=0).value for cuts in (1, 2, 4, 1000)]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]


def test_unknown_costs_and_large_cases_are_refused() -> None:
    with pytest.raises(UnknownCost, match="degree 1"):
        bound([asked("a", 0, 9)], priced(0, 0, {2: 1}))
    with pytest.raises(TooLarge, match="divisor above 1000000 ns"):
        optimum([asked("a", 0, 900_000), request("b", 0.001, slo_s=9.0)], priced(0, 0, {1: 1}))


# The solver.


def knapsack() -> Program:
    """3a + 2b <= 4, a and b up to 1, worth 3 and 2.5: 4.5 with parts, 3 in whole."""
    ones = np.array([1.0, 1.0])
    at = np.array([0, 0]), np.array([0, 1])
    return Program(
        gains=np.array([3.0, 2.5]),
        upper=ones,
        limits=np.array([4.0]),
        rows=at[0],
        columns=at[1],
        values=np.array([3.0, 2.0]),
    )


def test_any_prices_bound_a_program_and_the_right_ones_are_tight() -> None:
    assert knapsack().bound(np.array([1.0])) == pytest.approx(4.5)
    assert all(knapsack().bound(np.array([price])) >= 4.5 for price in (0.0, 0.5, 0.99, 1.01, 3.0))
    assert solve_relaxed(knapsack()).bound == pytest.approx(4.5)
    assert solve_whole(knapsack(), np.array([0, 1])).bound == pytest.approx(3.0)


# Against every schedule.

Pieces = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]  # (units, (degree, time of one)...) of one after another.


def best_of_all_schedules(jobs: Sequence[tuple[int, int, Pieces]], num_devices: int) -> int:
    """The most jobs (arrival, deadline, pieces) that end in time, by trying everything.

    Something begins only when a job arrives or a unit ends: every schedule can be shifted to the left until it does.
    """

    @cache
    def most(now: int, states: tuple[tuple[int, int, int, int], ...]) -> int:
        """`states`: piece, units of it that are left, end of the running unit, its degree (0: none runs)."""
        settled = [settle(now, job, state) for job, state in zip(jobs, states, strict=True)]
        choices = [options(now, job, state) for job, state in zip(jobs, settled, strict=True)]
        best = 0
        for after in product(*choices):
            if sum(degree for *_, degree in after) > num_devices:
                continue
            times = [end for _, _, end, degree in after if degree] + [job[0] for job in jobs if job[0] > now]
            ended = sum(state[0] == len(job[2]) for job, state in zip(jobs, after, strict=True))
            best = max(best, most(min(times), after) if times else ended)
        return best

    def settle(now: int, job, state):
        piece, left, end, degree = state
        if not degree or end > now:
            return state
        if left > 1:
            return piece, left - 1, 0, 0
        return (piece + 1, job[2][piece + 1][0] if piece + 1 < len(job[2]) else 0, 0, 0)

    def options(now: int, job, state):
        arrival, deadline, pieces = job
        piece, left, _, degree = state
        yield state
        if not degree and now >= arrival and piece < len(pieces):
            for wider, time in pieces[piece][1]:
                if now + time <= deadline:
                    yield piece, left, now + time, wider

    return most(0, tuple((0, pieces[0][0], 0, 0) for _, _, pieces in jobs))


STEP_TIMES = st.tuples(st.integers(1, 6), st.integers(1, 4))  # At degrees 1 and 2.
SMALL_CASES = st.tuples(
    st.integers(0, 2),
    st.integers(0, 2),
    st.tuples(STEP_TIMES, STEP_TIMES),
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(2, 12), st.integers(1, 3), st.booleans()), min_size=1, max_size=3
    ),
    st.integers(1, 3),
)


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(SMALL_CASES)
def test_the_optimum_is_that_of_all_schedules_and_the_bound_is_not_below(case) -> None:
    encode, decode, times, drawn, num_devices = case
    steps = [{2**index: units for index, units in enumerate(some) if 2**index <= num_devices} for some in times]
    costs = priced(encode, decode, *steps)
    requests, jobs = [], []
    for index, (arrival, slo, num_steps, is_wide) in enumerate(drawn):
        requests.append(asked(str(index), arrival, slo, num_steps, WIDE if is_wide else NARROW))
        pieces = [(1, ((1, encode),)), (num_steps, tuple(steps[is_wide].items())), (1, ((1, decode),))]
        jobs.append((arrival, arrival + slo, tuple(piece for piece in pieces if piece[1][0][1])))
    best = best_of_all_schedules(jobs, num_devices)
    found = optimum(requests, costs, num_devices)
    assert len(found.on_time) == best
    check_schedule(found, requests, costs, num_devices)
    for max_whole in (0, 40):
        assert bound(requests, costs, num_devices, max_whole=max_whole).value >= best


def check_schedule(found: Optimum, requests: Sequence[Request], costs: CostTable, num_devices: int) -> None:
    """What is on time has all its pieces, in order, one at a time, in its window and on devices that are there."""
    for one in requests:
        mine = [placed for placed in found.schedule if placed.uid == one.uid]
        if one.uid not in found.on_time:
            assert not mine
            continue
        assert one.deadline_ns is not None
        ends = [one.arrival_ns, *(placed.end_ns for placed in mine)]
        assert all(end <= placed.start_ns for end, placed in zip(ends, mine, strict=False))
        assert ends[-1] <= one.deadline_ns
        known = [row.stage for row in costs.rows if row.height == one.shape.height]
        chain = [ENCODE] * (ENCODE in known) + [DIFFUSE] * one.steps + [DECODE] * (DECODE in known)
        assert [placed.stage for placed in mine] == chain
    for now in {placed.start_ns for placed in found.schedule}:
        assert sum(one.degree for one in found.schedule if one.start_ns <= now < one.end_ns) <= num_devices


def test_two_nodes_do_not_share_a_group() -> None:
    """Of two that take a pair each, nodes of three devices serve both at once, one of three devices does not."""
    requests, costs = [asked("a", 0, 1), asked("b", 0, 1)], priced(0, 0, {1: 2, 2: 1})
    assert len(optimum(requests, costs, 6, per_node=3).on_time) == 2
    assert len(optimum(requests, costs, 4, per_node=3).on_time) == 1
    assert bound(requests, costs, 4, per_node=3).value == 2  # Pooled: devices of two nodes may form a group.


# Against every policy.


def on_time(trace) -> int:
    return sum(ending.on_time for ending in trace.endings if ending.request.deadline_ns is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests on devices, and the bound of how many of them can be on time."""

    name: str
    requests: list[Request]
    costs: CostTable
    num_devices: int
    limit: float


@pytest.fixture(scope="module")
def loads() -> list[Load]:
    flux, found = read_table("flux1dev_h100_eager"), []
    for seed in range(3):
        mixed = promise_mix(30, 4.0, seed, 0.3)
        for name, requests, costs, num_devices in (
            ("flux", flux_requests(40, 30, 1.0, seed, alpha=1.0), flux, 8),
            ("toy", poisson(30, 2.5, seed, slo_s=2.0), table(degrees=(1, 2, 4)), 4),
            ("mixed", mixed, table(degrees=(1, 2)), 3),
            ("nodes", mixed, replace(table(degrees=(1, 2)), devices_per_node=2), 4),
        ):
            limit = bound(requests, costs, num_devices, per_node=costs.devices_per_node).value
            found.append(
                Load(name=f"{name} {seed}", requests=requests, costs=costs, num_devices=num_devices, limit=limit)
            )
    return found


@pytest.mark.parametrize("policy", FEW_POLICIES)
def test_no_policy_exceeds_the_bound(policy: str, loads: list[Load]) -> None:
    for load in loads:
        reached = on_time(simulate(load.requests, policy, num_devices=load.num_devices, costs=load.costs))
        assert reached <= load.limit, f"{policy}, {load.name}"


def test_the_bound_is_below_the_number_of_requests(loads: list[Load]) -> None:
    """Where there is more to do than can be done, it shows: every policy would keep to a bound of all requests."""
    flux = [load for load in loads if load.name.startswith("flux")]
    assert sum(load.limit for load in flux) <= 0.95 * sum(len(load.requests) for load in flux)


def test_with_little_to_do_a_policy_is_at_the_bound() -> None:
    requests = [request(str(index), 2.0 * index, slo_s=1.5) for index in range(8)]
    assert bound(requests, table()).value == on_time(simulate(requests, "edf", num_devices=1)) == 8
