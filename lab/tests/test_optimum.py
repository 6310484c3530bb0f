"""Policies against what is known to be best: the exact optimum of small cases, and optimal rules for one device.

The optimum splits and moves requests between any two steps at no cost, and knows all arrivals. No policy can do that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from random import Random
from statistics import fmean

import pytest
from exact_optimum import exact_optimum
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import FEW_POLICIES, finished, profile, request, simulate, table
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.cost.table_costs import TableCosts
from tilework.policy.registry import policy_names

# Against the exact optimum. Times are whole tenths of a second, so that it is quickly found.

STEPS_S = {64: {1: 0.2, 2: 0.1, 4: 0.1}, 128: {1: 0.5, 2: 0.3, 4: 0.2}}
COSTS = profile(STEPS_S)
NUM_CASES = 60


@dataclass(frozen=True, slots=True)
class Small:
    """A handful of requests with tight deadlines, and how many of them can be on time."""

    requests: tuple[Request, ...]
    num_devices: int
    best: int

    def reached(self, policy: str) -> int:
        trace = simulate(list(self.requests), policy, num_devices=self.num_devices, costs=COSTS)
        return sum(ending.on_time for ending in trace.endings)


@cache
def small(seed: int) -> Small:
    """3 to 6 requests on 2 to 4 devices, due after 0.4 to 1.1 times what they take on one device.

    30 ms come on top of each deadline: nothing to the optimum, which counts tenths, and room for the moves of a state.
    """
    rng, requests, arrival_s, num_devices = Random(seed), list[Request](), 0.0, 0
    num_requests, num_devices = rng.randint(3, 6), rng.randint(2, 4)
    for index in range(num_requests):
        arrival_s = round(arrival_s + rng.choice((0.0, 0.0, 0.1, 0.2)), 1)
        side, steps = rng.choice(tuple(STEPS_S)), rng.randint(2, 4)
        slo_s = round(steps * STEPS_S[side][1] * rng.uniform(0.4, 1.1), 1) + 0.03
        requests.append(request(str(index), arrival_s, side=side, steps=steps, slo_s=slo_s))
    best = len(exact_optimum(requests, TableCosts(COSTS), num_devices=num_devices).on_time)
    return Small(tuple(requests), num_devices, best)


def smalls() -> list[Small]:
    return [small(seed) for seed in range(NUM_CASES)]


def test_the_small_cases_are_hard() -> None:
    """In most of them not all can be on time, and in each at least one can."""
    assert sum(one.best < len(one.requests) for one in smalls()) >= 0.7 * NUM_CASES
    assert min(one.best for one in smalls()) >= 1


@pytest.mark.parametrize("policy", FEW_POLICIES)
def test_no_policy_is_above_the_optimum(policy: str) -> None:
    for seed, one in enumerate(smalls()):
        assert one.reached(policy) <= one.best, f"seed {seed}"


def test_tilework_is_near_the_optimum() -> None:
    """Measured: 0.897 of it on the mean, and a third at worst. The next best is `tetriserve-early` with 0.611."""
    shares = [one.reached("tilework") / one.best for one in smalls()]
    assert fmean(shares) >= 0.88
    assert min(shares) >= 1 / 3
    others = (fmean(one.reached(policy) / one.best for one in smalls()) for policy in ("edf", "tetriserve"))
    assert fmean(shares) > max(others) + 0.2


# Rules that are optimal on one device. Requests that "come at once" do so while another one keeps the device busy: of
# equal arrivals a controller still hears one by one.

BLOCKER = request("blocker", steps=1, slo_s=0.2)
AT_ONCE_S = 0.1


def run_s(steps: int) -> float:
    """Of a request of so many steps by `table`."""
    return 0.06 + 0.1 * steps


@given(steps=st.lists(st.integers(1, 12), min_size=1, max_size=5), data=st.data())
def test_edf_keeps_all_feasible_deadlines_of_simultaneous_arrivals(steps: list[int], data: st.DataObject) -> None:
    """In some order all are just in time; that of the deadlines does as well (Jackson's rule)."""
    due_s, requests = run_s(1), []
    for index, num_steps in enumerate(data.draw(st.permutations(steps))):
        due_s += run_s(num_steps) + data.draw(st.sampled_from([0.0, 0.0, 0.3]))
        requests.append(request(str(index), AT_ONCE_S, steps=num_steps, slo_s=due_s - AT_ONCE_S + 1e-6))
    trace = simulate([BLOCKER, *data.draw(st.permutations(requests))], "edf", num_devices=1)
    assert all(ending.on_time for ending in trace.endings)


def lateness_s(requests: list[tuple[float, int, float]]) -> float:
    """By how much the latest of these (arrival, steps, deadline) is late if the earliest deadline is always served."""
    left_s, late_s = [run_s(steps) for _, steps, _ in requests], -1e9
    now_s = 0.0
    while any(left > 1e-9 for left in left_s):
        there = [index for index, one in enumerate(requests) if one[0] <= now_s + 1e-9 and left_s[index] > 1e-9]
        coming = [arrival_s for arrival_s, _, _ in requests if arrival_s > now_s + 1e-9]
        if not there:
            now_s = min(coming)
            continue
        index = min(there, key=lambda index: requests[index][2])
        span_s = min([left_s[index], *(arrival_s - now_s for arrival_s in coming)])
        left_s[index] -= span_s
        now_s += span_s
        if left_s[index] <= 1e-9:
            late_s = max(late_s, now_s - requests[index][2])
    return late_s


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(1, 60)), min_size=1, max_size=6))
def test_edf_keeps_all_deadlines_but_for_what_has_been_handed_out(drawn: list[tuple[int, int, int]]) -> None:
    """If serving the earliest deadline at every moment meets all deadlines (and it does if anything can), so does
    `edf`, if there is room for the two chunks of 200 ms that a device may have been told when a request comes.
    """
    asked = sorted((arrival / 10, steps, (arrival + due) / 10) for arrival, steps, due in drawn)
    shift_s = lateness_s(asked) + 0.4 + 1e-6
    requests = [
        request(str(index), arrival_s, steps=steps, slo_s=due_s + shift_s - arrival_s)
        for index, (arrival_s, steps, due_s) in enumerate(asked)
    ]
    trace = simulate(requests, "edf", num_devices=1)
    assert all(ending.on_time for ending in trace.endings)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([64, 128])), min_size=1, max_size=5))
def test_srtf_has_the_least_mean_latency_for_simultaneous_arrivals(drawn: list[tuple[int, int]]) -> None:
    """Of all orders, on one device."""
    requests = [request(str(index), AT_ONCE_S, steps=steps, side=side) for index, (steps, side) in enumerate(drawn)]
    times_ns = [round(run_s(steps) * (side / 128) ** 2 * NS_PER_S) for steps, side in drawn]
    best_ns = min(sum(sum(order[: index + 1]) for index in range(len(order))) for order in permutations(times_ns))
    best_ns += round((run_s(1) - AT_ONCE_S) * NS_PER_S) * len(drawn)
    reached_ns = sum(ending.latency_ns for ending in simulate([BLOCKER, *requests], "srtf", num_devices=1).endings[1:])
    assert abs(reached_ns - best_ns) < NS_PER_MS


@pytest.mark.parametrize("policy", [name for name in policy_names() if name.startswith("fixed-")])
@settings(max_examples=25)
@given(
    gaps=st.lists(st.sampled_from([0.0, 0.05, 0.5]), min_size=1, max_size=8),
    num_devices=st.integers(1, 5),
    data=st.data(),
)
def test_fixed_degrees_begin_in_order_of_arrival(
    policy: str, gaps: list[float], num_devices: int, data: st.DataObject
) -> None:
    """Whatever their deadlines and weights; on one group they also end in it."""
    requests, arrival_s = [], 0.0
    for index, gap_s in enumerate(gaps):
        arrival_s += gap_s
        slo_s, weight = data.draw(st.sampled_from([None, 0.5, 9.0])), data.draw(st.sampled_from([1.0, 4.0]))
        steps = data.draw(st.integers(1, 9))
        requests.append(request(str(index), arrival_s, steps=steps, slo_s=slo_s, weight=weight))
    trace = simulate(requests, policy, num_devices=num_devices, costs=table(degrees=(1, 2, 4)))
    starts_ns = {run.work.job_ids[0]: run.start_ns for run in reversed(trace.runs)}
    assert [starts_ns[index] for index in range(len(requests))] == sorted(starts_ns.values())
    if num_devices <= int(policy.removeprefix("fixed-sp")) and num_devices in (1, 2, 4):
        assert finished(trace) == [one.uid for one in requests]
