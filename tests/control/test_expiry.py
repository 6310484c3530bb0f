"""Requests that are worthless when late (`on_miss: drop`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import POLICIES, controller, flux_requests, request, shipped, simulate
from tilework.core.actions import Accept, Finish, Reject, WakeAt
from tilework.core.events import Submitted, Woke
from tilework.core.request import OnMiss, RefusalCode, Request, Status
from tilework.core.time import NS_PER_S

# Ten steps with encode and decode take 1.06 s.
FIRST, ALONE_NS = request("first"), int(1.06 * NS_PER_S)


def hurried(uid: str, arrival_s: float = 0.0, slo_s: float = 1.5) -> Request:
    return request(uid, arrival_s, slo_s=slo_s, on_miss=OnMiss.DROP)


def test_one_that_would_be_late_on_idle_devices_is_refused() -> None:
    one = controller()
    (answer,) = one.handle(Submitted(hurried("a", slo_s=1.0)), 0)
    assert answer == Reject("a", "alone it needs 1.06 s on 1 device", ALONE_NS, RefusalCode.DEADLINE)
    accept, *_ = one.handle(Submitted(hurried("b", slo_s=1.07)), 0)
    assert isinstance(accept, Accept)


def test_one_that_waits_too_long_ends_at_the_first_moment_from_which_it_would_be_late() -> None:
    """`ddit` does not look whether a deadline can be met."""
    one = controller("ddit")
    one.handle(Submitted(FIRST), 0)
    accept, *rest = one.handle(Submitted(hurried("late")), 0)
    assert isinstance(accept, Accept)
    last_ns = int(1.5 * NS_PER_S) - ALONE_NS
    assert WakeAt(last_ns + 1) in rest
    assert one.handle(Woke(), last_ns) == ()
    (end,) = one.handle(Woke(), last_ns + 1)
    reason = "even if nothing else ran from now on, it would be late"
    assert end == Finish(accept.job_id, "late", Status.EXPIRED, reason)
    assert one.num_jobs == 1


def test_nothing_is_looked_at_again_for_a_call_that_is_refused() -> None:
    """The first request of the call would be accepted, and so are both in trials with later deadlines."""
    one = controller("ddit")
    one.handle(Submitted(FIRST), 0)
    answers = one.handle(Submitted(hurried("a"), (hurried("b", slo_s=1.0),)), 0)
    assert [type(answer) for answer in answers] == [Reject, Reject]
    accept, *rest = one.handle(Submitted(hurried("c", slo_s=1.4)), 0)
    assert isinstance(accept, Accept)
    assert WakeAt(int(1.4 * NS_PER_S) - ALONE_NS + 1) in rest, "its look is its own, though the id was used in trials"


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_none_is_done_late_and_each_that_is_not_done_says_why(policy: str) -> None:
    requests = [replace(one, on_miss=OnMiss.DROP) for one in flux_requests(60, 30, 1.0, seed=1)]
    trace = simulate(requests, policy, num_devices=8, costs=shipped("flux1dev_h100_eager"))
    statuses = [ending.status for ending in trace.endings]
    assert set(statuses) <= {Status.DONE, Status.EXPIRED, Status.REJECTED}
    assert all(ending.on_time for ending in trace.endings if ending.status is Status.DONE)
    assert all("late" in ending.reason for ending in trace.endings if ending.status is Status.EXPIRED)


def test_under_overload_more_are_on_time_if_the_others_are_dropped() -> None:
    late, costs = flux_requests(150, 18, 1.0, seed=1), shipped("flux1dev_h100_eager")
    served, dropped = (
        sum(ending.on_time for ending in simulate(requests, "fixed-sp8", num_devices=8, costs=costs).endings)
        for requests in (late, [replace(one, on_miss=OnMiss.DROP) for one in late])
    )
    assert dropped > 1.2 * served


def test_one_that_makes_progress_is_left_alone_and_ends_on_time() -> None:
    trace = simulate([hurried("a", slo_s=1.08)], "edf", num_devices=1)
    assert [ending.status for ending in trace.endings] == [Status.DONE]


def test_without_a_deadline_nothing_is_dropped() -> None:
    trace = simulate([replace(one, on_miss=OnMiss.DROP) for one in (FIRST, request("b"))], "edf", num_devices=1)
    assert [ending.status for ending in trace.endings] == [Status.DONE, Status.DONE]
