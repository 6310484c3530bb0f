"""The lookahead policy where devices must load components: who waits for which device."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import pytest

from builders import on_time, shipped, simulate
from tilework.core.policy import JobView
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.demand import Speed
from tilework.policy.lookahead.arrivals import DueArrivals
from tilework.policy.lookahead.forecast import Claim, JobForecast
from tilework.policy.lookahead.node_jobs import NodeJobs
from tilework.policy.lookahead.selection import Selection
from tilework.sim.trace import Trace
from tilework.sim.workloads.registry import make_workload
from tilework.sim.workloads.requests import to_requests

COSTS = shipped("gentd26")
FORGETFUL = replace(COSTS, host_bytes=0)
"""Every load comes from storage, and takes 32.8 s."""
PATIENT_S = 500.0


def wanted(uid: str, rank: int, arrival_s: float = 0.0, slo_s: float = PATIENT_S, images: int = 1) -> Request:
    """A request of 512 px for the checkpoint of this rank. The first two take 8.9 and 8.1 s for one picture."""
    arrival_ns = ns_from_s(arrival_s)
    return Request(
        uid=uid,
        pipeline=f"gentd26-{rank:02}",
        shape=Shape(512, 512, images),
        steps=30,
        arrival_ns=arrival_ns,
        deadline_ns=arrival_ns + ns_from_s(slo_s),
    )


def served(trace: Trace) -> list[tuple[str, int]]:
    """The requests in the order in which they began, each with its device; again where one continues after another."""
    by_job = {ending.job_id: ending.request.uid for ending in trace.endings}
    begun = [(by_job[run.work.job_ids[0]], run.devices[0]) for run in sorted(trace.runs, key=lambda run: run.start_ns)]
    return [one for index, one in enumerate(begun) if index == 0 or one != begun[index - 1]]


def order(*requests: Request, num_devices: int = 1) -> list[str]:
    trace = simulate(list(requests), "tilework", num_devices=num_devices, costs=FORGETFUL)
    return [uid for uid, _ in served(trace)]


def test_what_loads_least_goes_first_while_none_is_late_by_it() -> None:
    """The second request is due first, but the device has what the third needs. It takes 33 + 8 s, the third 9 s."""
    first = wanted("first", 1)
    due_first, here = wanted("due first", 2, 1.0, 150.0), wanted("here", 1, 2.0, 200.0)
    assert order(first, due_first, here) == ["first", "here", "due first"]
    urgent = wanted("urgent", 2, 1.0, 84.0)
    assert order(first, urgent, here) == ["first", "urgent", "here"], "41.7 + 41.0 s, and no 8.9 more"


def test_weights_are_spread_over_devices_before_any_are_dropped() -> None:
    """Each of two devices has room for two checkpoints: four come, and come again."""
    requests = [wanted(f"{turn}-{rank}", rank, 100.0 * (4 * turn + rank)) for turn in range(2) for rank in (1, 2, 3, 4)]
    trace = simulate(requests, "tilework", num_devices=2, costs=FORGETFUL)
    assert len(trace.loads) == 4


def test_a_running_request_keeps_its_device_while_none_is_late_by_it() -> None:
    """Without loads, the one that is due first takes the device over at the next step."""
    long, due_first = wanted("long", 1, images=8), wanted("due first", 2, 40.0, 150.0)
    assert order(long, due_first) == ["long", "due first"]
    urgent = wanted("urgent", 2, 40.0, 60.0)
    assert order(long, urgent) == ["long", "urgent", "long"]


@pytest.mark.parametrize(("images", "device"), [(1, 0), (4, 0), (8, 1)])
def test_a_request_waits_for_a_device_that_has_its_weights_if_that_is_sooner(images: int, device: int) -> None:
    """The first of these takes 9, 25 or 46 s when it has loaded; another device would load for 33 s."""
    first, second = wanted("first", 1, images=images), wanted("second", 1, 33.0)
    trace = simulate([first, second], "tilework", num_devices=2, costs=FORGETFUL)
    assert served(trace)[0] == ("first", 0)
    assert {one for uid, one in served(trace) if uid == "second"} == {device}
    assert len(trace.loads) == 1 + device


@pytest.mark.parametrize(("number", "num_loads"), [(2, 1), (5, 2)])
def test_those_that_wait_for_a_device_are_counted_there(number: int, num_loads: int) -> None:
    """Two requests of 9 s each wait less than 33 s on a device, even when both devices are idle; of five, some do."""
    requests = [wanted(f"{index}", 1, 33.0 + index / 10) for index in range(number)]
    trace = simulate([wanted("first", 1), *requests], "tilework", num_devices=2, costs=FORGETFUL)
    assert len(trace.loads) == num_loads
    assert {device for _, device in served(trace)} == set(range(num_loads))


def test_an_idle_device_that_has_the_weights_is_preferred() -> None:
    requests = [wanted("a", 2), wanted("b", 1), wanted("c", 1, 100.0), wanted("d", 2, 200.0)]
    trace = simulate(requests, "tilework", num_devices=2, costs=FORGETFUL)
    assert dict(served(trace)) == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert len(trace.loads) == 2


def test_a_deadline_that_a_load_makes_impossible_is_given_up_at_once() -> None:
    """Alone it takes 8 s; with its load it would be late, so one that is due later is served before it."""
    late, later = wanted("late", 2, 0.1, 40.0), wanted("later", 3, 0.2, 120.0)
    trace = simulate([wanted("first", 1), late, later], "tilework", num_devices=1, costs=FORGETFUL)
    assert [uid for uid, _ in served(trace)] == ["first", "later", "late"]
    assert [ending.on_time for ending in trace.endings] == [True, False, True]


def test_a_deadline_is_not_given_up_for_a_load_that_a_busy_device_spares() -> None:
    """With the load that is counted it ends 2 s late, with that of the busy device in time."""
    job = SimpleNamespace(job_id=0, request=wanted("a", 1, slo_s=40.0), dropped_to_best_effort=False)
    forecast = JobForecast(
        job_id=0,
        claim=Claim.FEASIBLE,
        order_key=0.0,
        speeds=(Speed(1, NS_PER_S),),
        usual=0,
        num_steps=9.0,
        head_ns=33.0 * NS_PER_S,
        tail_ns=0.0,
        load_ns=33.0 * NS_PER_S,
        spared_ns=33.0 * NS_PER_S,
    )
    node = NodeJobs([], 0, NS_PER_S, lambda *_: inf)
    node.add(cast(JobView, job), forecast)
    assert not node.unreachable()
    forecast.spared_ns = 0.0
    assert [job_id for job_id, _ in node.unreachable()] == [0]


@pytest.mark.parametrize(("load_s", "first"), [(0.0, [1, 0]), (1.0, [0, 1])])
def test_jobs_that_run_go_first_only_while_others_must_load(load_s: float, first: list[int]) -> None:
    """The one that waits has the earlier deadline; with the device that the other is to get besides, it is on time."""

    def feasible(job_id: int, due_s: float, level: int, load_s: float = 0.0) -> JobForecast:
        return JobForecast(
            job_id=job_id,
            claim=Claim.FEASIBLE,
            order_key=due_s * NS_PER_S,
            due_ns=due_s * NS_PER_S,
            speeds=(Speed(1, NS_PER_S),),
            usual=0,
            num_steps=4.0,
            head_ns=load_s * NS_PER_S,
            tail_ns=0.0,
            level=level,
            load_ns=load_s * NS_PER_S,
        )

    idle = [SimpleNamespace(device_id=index, works=[], is_loading=False, free_ns=0) for index in range(3)]
    node = NodeJobs(cast(Any, idle), 0, NS_PER_S, lambda *_: inf, load_ns=lambda job, device: 0)
    node.forecasts += [feasible(0, 90.0, 0), feasible(1, 50.0, -1), feasible(2, 95.0, -1, load_s)]
    order = [one.job_id for one in Selection(node).choose().order]
    assert order == [*first, 2]


def test_late_requests_go_in_order_of_their_loads() -> None:
    """Both are late. By patience the first of them would go first: it came before the other, and takes less time."""
    late, here = wanted("late", 2, 1.0, 5.0), wanted("late, and here", 1, 2.0, 5.0)
    assert order(wanted("first", 1), late, here) == ["first", "late, and here", "late"]


@pytest.mark.parametrize("must_load", [False, True])
def test_late_requests_are_held_only_where_all_weights_are_there(*, must_load: bool) -> None:
    """Requests that can be on time come every second, and the late one takes ten."""
    arrivals = DueArrivals()
    arrivals.add(range(0, 10 * NS_PER_S, NS_PER_S))
    late = JobForecast(
        job_id=0,
        claim=Claim.LATE,
        order_key=0.0,
        speeds=(Speed(1, NS_PER_S),),
        usual=0,
        num_steps=10.0,
        head_ns=0.0,
        tail_ns=0.0,
    )
    load_ns = (lambda job, device: 0) if must_load else None
    node = NodeJobs([], 10 * NS_PER_S, NS_PER_S, lambda *_: inf, due_arrivals=arrivals, load_ns=load_ns)
    node.forecasts.append(late)
    node.hold_late()
    assert late.claim is (Claim.LATE if must_load else Claim.HELD)


@pytest.mark.slow
def test_on_many_checkpoints_it_is_on_time_more_often_than_the_best_simple_policy() -> None:
    days = [to_requests(make_workload("gentd26", {"to_hour": 15, "slo": 2.5}).requests(seed)) for seed in (1, 2)]

    def share(policy: str) -> float:
        return fmean(on_time(simulate(requests, policy, num_devices=4, costs=COSTS)) for requests in days)

    assert share("tilework") > share("deadline-lru") + 0.02
