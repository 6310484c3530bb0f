"""Requests without a deadline under the lookahead policy: their degrees under load, and the room that they leave."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from builders import groups, planned, profile, request, shipped, simulate
from stages import DIFFUSE, at_start, stage_of
from tilework.core.request import Request, cost_key
from tilework.core.time import NS_PER_S
from tilework.core.work import Member, Work
from tilework.cost.table_costs import TableCosts
from tilework.policy.lookahead.arrivals import TightClasses
from tilework.policy.lookahead.policy import LookaheadPolicy
from tilework.sim.trace import Trace
from tilework.sim.workloads.requests import to_requests
from tilework_lab.workloads.flood import Flood

# Of ten steps; the request of 64 px can wait for 0.2 s.
STEPS = profile({64: {1: 0.1}, 128: {1: 1.0, 2: 0.6, 4: 0.4}})
HURRIED = request("hurried", side=64, slo_s=1.2)


def background(uid: str, arrival_s: float = 0.0, side: int = 128) -> Request:
    return request(uid, arrival_s, side=side)


def num_kept(trace: Trace, at_s: float) -> int:
    """How many devices requests without a deadline keep at one time."""
    jobs = {ending.job_id for ending in trace.endings if ending.request.deadline_ns is None}
    at_ns = at_s * NS_PER_S
    running = [run for run in trace.runs if run.start_ns <= at_ns < run.end_ns]
    return sum(len(run.devices) for run in running if run.work.job_ids[0] in jobs)


@pytest.mark.parametrize(("count", "widest"), [(1, 4), (12, 1)])
def test_the_more_requests_without_a_deadline_the_narrower_they_are(count: int, widest: int) -> None:
    """On four devices each takes 0.4 of the time, and 1.6 times the device time."""
    trace = simulate([background(f"b{index}") for index in range(count)], "tilework", num_devices=4, costs=STEPS)
    assert max(map(len, groups(trace)["b0"])) == widest


@pytest.mark.slow
def test_full_devices_serve_requests_without_a_deadline_as_soon_as_the_best_published_policy() -> None:
    """Measured at 90%: a mean latency of 6.2 s, 21.3 with wide groups; `gf-dit-edf-best-fit-drop` has 7.0."""
    flood = Flood(rate_per_s=0.97, urgent=0.0, num_requests=300)
    ours, other = (
        fmean(ending.latency_ns for ending in flooded(flood, policy).endings)
        for policy in ("tilework", "gf-dit-edf-best-fit-drop")
    )
    assert ours < other


def flooded(flood: Flood, policy: str) -> Trace:
    return simulate(to_requests(flood.requests(0)), policy, num_devices=8, costs=shipped(flood.table))


@pytest.mark.parametrize(("before", "most"), [([], 4), ([HURRIED], 3)])
def test_the_last_device_is_left_for_requests_that_cannot_wait_for_a_step(before: list[Request], most: int) -> None:
    requests = [*before, *(background(f"b{index}", 2.0) for index in range(6))]
    assert num_kept(simulate(requests, "tilework", num_devices=4, costs=STEPS), 2.5) == most


def test_a_request_that_cannot_wait_is_remembered_after_others_of_its_size() -> None:
    requests = [HURRIED, background("small", 1.0, side=64), *(background(f"b{index}", 2.0) for index in range(6))]
    assert num_kept(simulate(requests, "tilework", num_devices=4, costs=STEPS), 2.5) == 3


def test_a_single_device_is_not_left_idle() -> None:
    again = replace(HURRIED, uid="again", arrival_ns=2 * NS_PER_S, deadline_ns=int(3.2 * NS_PER_S))
    trace = simulate([HURRIED, again, background("b", 3.3)], "tilework", num_devices=1, costs=STEPS)
    assert min(run.start_ns for run in trace.runs if run.work.job_ids == (2,)) == int(3.3 * NS_PER_S)


def test_a_request_that_fits_on_all_devices_only_gets_the_last_one_too() -> None:
    """It waited for ever where hurried requests had come."""
    policy, costs, one = LookaheadPolicy(), TableCosts(STEPS), background("b")
    stage = stage_of(one.pipeline, DIFFUSE)
    narrow = Work(
        work_id=0,
        stage=stage,
        members=(Member(0, 1, 1, 0),),
        devices=(0, 1),
        num_steps=1,
        why="",
    )
    costs.observe_memory(narrow, (one.shape,), fitted=False, now_ns=0)
    policy.demand(HURRIED, at_start(HURRIED), costs)
    plan = planned(policy, [one], 4, costs)
    assert [start.devices for start in plan.starts if start.stage.name == DIFFUSE] == [(0, 1, 2, 3)] * 2


@pytest.mark.slow
def test_deadlines_that_leave_no_room_are_kept_beside_more_best_effort_than_the_devices_can_do() -> None:
    """Measured: 52% on time; 35% before a device was left."""
    flood = Flood(rate_per_s=1.3, urgent=0.5, slo_factor=1.05)
    due = [ending for ending in flooded(flood, "tilework").endings if ending.request.deadline_ns is not None]
    assert fmean(ending.on_time for ending in due) > 0.42


def test_patience_is_a_multiple_of_the_time_that_a_request_takes_alone() -> None:
    """10 steps take 4 s on four devices and 10 s on one."""
    policy, costs = LookaheadPolicy(), TableCosts(STEPS)
    long, short, due = background("long"), request("short", 5.0, steps=4, weight=2.0), request("due", slo_s=2000)
    for one in (long, short, due):
        policy.demand(one, at_start(one), costs)
    assert policy.urgency_ns(long, False) == 300 * 4 * NS_PER_S
    assert policy.urgency_ns(short, False, delay_ns=7) == 5 * NS_PER_S + 7 + 300 * 1.6 * NS_PER_S / 2
    assert policy.urgency_ns(due, False) == policy.urgency_ns(due, True) == 2000 * NS_PER_S


def test_how_often_requests_come_that_cannot_wait_for_long() -> None:
    tight = TightClasses()
    assert tight.frequencies(0) == ()
    small, large = cost_key(request("small", side=64)), cost_key(request("large"))
    for key, arrival_ns, slack_ns in [(small, 0, 10), (large, 100, 30), (small, 200, 20), (large, 500, 0)]:
        tight.add(key, arrival_ns, slack_ns)
    assert tight.frequencies(300) == ((20, 1 / 200), (30, 1 / 200 + 1 / 200))
    assert tight.frequencies(1100) == ((20, 1 / 900), (30, 1 / 900 + 1 / 1000)), "rarer, as none has come since"
