"""Shortest remaining time first, aging, and the degrees that follow from a profile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import finished, groups, planned, poisson, profile, request, shipped, simulate, table
from stages import DIFFUSE, at_start
from tilework.core.request import Request, Shape, Status
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.demand import Speed, step_speeds
from tilework.cost.table_costs import TableCosts
from tilework.policy import registry
from tilework.policy.toolkit.degrees import best_doubling, efficient_degree
from tilework_lab.policies.srtf import ShortestFirst

SHORT_S, LONG_S = 0.06 + 0.2, 0.06 + 3.0  # Of two and of thirty steps.
# A step of 192 px takes 200, 100 and 50 ms on 1, 2 and 4 devices; one of 64 px 100 ms on any number.
MIXED = profile({64: {1: 0.1, 2: 0.1, 4: 0.1}, 192: {1: 0.2, 2: 0.1, 4: 0.05}})


# Degrees.


def of_sizes(name: str, rule: object, *shapes: Shape) -> list[int]:
    costs = shipped(name)
    asked = replace(request("a"), pipeline=costs.rows[0].pipeline)
    assert callable(rule)
    return [rule(step_speeds(replace(asked, shape=shape), TableCosts(costs))) for shape in shapes]


def squares(*sides: int) -> list[Shape]:
    return [Shape(side, side) for side in sides]


def test_the_degrees_of_ddit_are_those_of_the_paper() -> None:
    """§4.2.3: B is 1, 2 and 4 for 144p, 240p and 360p."""
    costs = shipped("opensora_h800")
    shapes = sorted({Shape(one.height, one.width, one.frames) for one in costs.rows}, key=lambda shape: shape.pixels)
    assert of_sizes("opensora_h800", best_doubling, *shapes) == [1, 2, 4]


def test_noise_does_not_decide_where_speed_up_is_nearly_linear() -> None:
    """At 2048 px, z is .482, .461 and .431: the largest is the first, which says nothing."""
    sizes = squares(256, 512, 1024, 2048)
    assert of_sizes("flux1dev_h100_eager", best_doubling, *sizes) == [1, 1, 4, 8]
    assert of_sizes("flux1dev_h100_eager", efficient_degree, *sizes) == [1, 1, 1, 4]


@pytest.mark.parametrize(
    ("step_ns", "efficient", "best"),
    [
        ((100,), 1, 1),
        ((100, 62), 2, 2),
        ((100, 63), 1, 2),
        ((100, 75), 1, 2),
        ((100, 76, 30), 4, 1),
        ((100, 120, 130), 1, 1),
        ((100, 50, 49, 15), 8, 2),
    ],
)
def test_an_efficient_degree_and_a_run_of_useful_doublings(step_ns: tuple[int, ...], efficient: int, best: int) -> None:
    speeds = [Speed(2**index, each_ns) for index, each_ns in enumerate(step_ns)]
    assert (efficient_degree(speeds), best_doubling(speeds)) == (efficient, best)


def test_where_one_device_is_too_small_the_narrowest_stands_for_it() -> None:
    speeds = [Speed(2, 100), Speed(4, 60), Speed(8, 58)]
    assert (efficient_degree(speeds), best_doubling(speeds)) == (4, 4)


# Shortest remaining time first.


def test_a_shorter_request_takes_over_at_the_end_of_a_chunk() -> None:
    requests = [request("long", steps=30), request("short", 0.5, steps=2)]
    assert finished(simulate(requests, "srtf", num_devices=1)) == ["short", "long"]
    assert finished(simulate(requests, "rssp", num_devices=1)) == ["long", "short"]


def test_only_remaining_work_counts() -> None:
    """The first has five steps left when one of ten comes: it goes on. One of three steps goes before it."""
    old, ten, three = request("old", steps=20), request("ten", 1.5, steps=10), request("three", 1.5, steps=3)
    assert finished(simulate([old, ten, three], "srtf", num_devices=1)) == ["three", "old", "ten"]


def test_urgency_is_the_arrival_and_twenty_times_the_service() -> None:
    policy, costs = ShortestFirst(), TableCosts(table())
    asked = request("a", 5.0, steps=2)
    policy.demand(asked, at_start(asked), costs)
    assert policy.urgency_ns(asked, False) == ns_from_s(5 + 20 * SHORT_S)
    assert policy.urgency_ns(replace(asked, weight=4.0), False, NS_PER_S) == ns_from_s(5 + 5 * SHORT_S)


def stream_and(long: Request, count: int = 400) -> list[Request]:
    """More short ones than a device can do."""
    return [long, *(request(str(index), index * 0.25, steps=2) for index in range(count))]


def test_a_long_request_is_passed_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By short ones that come up to twenty times the difference later; for ever, if there were no aging."""
    requests = stream_and(request("long", 0.3, steps=30))
    aged = simulate(requests, "srtf", num_devices=1).endings[0]
    assert 20 * (LONG_S - SHORT_S) < aged.latency_ns / NS_PER_S < 21 * LONG_S + 5
    monkeypatch.setitem(registry._GIVEN, "unaged", lambda: ShortestFirst(patience=10**6))
    starved = simulate(requests, "unaged", num_devices=1)
    assert finished(starved)[-1] == "long"


def test_a_heavier_request_is_passed_for_a_shorter_time() -> None:
    light, heavy = (
        simulate(stream_and(request("long", 0.3, steps=30, weight=weight)), "srtf", num_devices=1).endings[0].latency_ns
        for weight in (1.0, 4.0)
    )
    assert heavy < light / 2


def test_a_job_that_needs_more_devices_than_are_free_gets_them() -> None:
    """Four long narrow ones run, whose chunks do not end together: each makes room, and the free ones are held."""
    narrow = [request(str(index), index * 0.03, side=64, steps=200) for index in range(4)]
    wide = request("wide", 3.0, side=192, steps=20)
    trace = simulate([*narrow, wide], "srtf", num_devices=4, costs=MIXED)
    assert groups(trace)["wide"] == [(0, 1, 2, 3)]
    assert trace.endings[4].latency_ns < 1.5 * NS_PER_S, "a second of its own, and two chunks of the others"


def test_devices_are_not_held_for_those_that_no_job_will_give_up() -> None:
    """Three short ones have three devices, and go before the wide one; a long one has the fourth meanwhile."""
    short = [request(str(index), side=64, steps=10) for index in range(3)]
    wide, narrow = request("wide", 0.05, side=192, steps=100), request("narrow", 0.1, side=64, steps=300)
    trace = simulate([*short, wide, narrow], "srtf", num_devices=4, costs=MIXED)
    assert finished(trace) == ["0", "1", "2", "wide", "narrow"]
    assert min(run.start_ns for run in trace.runs if run.work.job_ids == (4,)) == ns_from_s(0.1)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), rate=st.floats(0.5, 4))
def test_every_request_is_served_and_each_simulation_is_the_same(seed: int, rate: float) -> None:
    requests = poisson(12, rate, seed)
    trace = simulate(requests, "srtf", costs=table(degrees=(1, 2)))
    assert [ending.status for ending in trace.endings] == [Status.DONE] * 12
    assert trace == simulate(requests, "srtf", costs=table(degrees=(1, 2)))


# The best static degree, first come first served.


def test_each_size_has_its_degree() -> None:
    plan = planned(registry.make_policy("rssp"), [request("a", side=192), request("b", side=64)], 8, TableCosts(MIXED))
    steps = {start.job_ids[0]: start.devices for start in plan.starts if start.stage.name == DIFFUSE}
    assert steps == {0: (0, 1, 2, 3), 1: (4,)}


def test_no_job_overtakes_the_first_waiting_job() -> None:
    """The narrow one could run at once beside the one that runs: strictly first come, first served, it waits."""
    requests = [request("runs", side=64), request("wide", 0.1, side=192), request("narrow", 0.2, side=64)]
    trace = simulate(requests, "rssp", num_devices=4, costs=MIXED)
    assert finished(trace) == ["runs", "wide", "narrow"]
    starts_ns = {run.work.job_ids[0]: run.start_ns for run in reversed(trace.runs)}
    assert starts_ns[1] == trace.endings[0].finish_ns
    assert starts_ns[2] >= starts_ns[1]


def test_a_request_keeps_its_group() -> None:
    requests = [request(str(index), index * 0.1, side=64 + 128 * (index % 2)) for index in range(9)]
    trace = simulate(requests, "rssp", num_devices=4, costs=MIXED)
    assert all(len(visited) == 1 for visited in groups(trace).values())
    first_ns = {run.work.job_ids[0]: run.start_ns for run in reversed(trace.runs)}
    assert [first_ns[index] for index in range(9)] == sorted(first_ns.values())
