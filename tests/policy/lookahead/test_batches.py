"""Batches as a decision of the lookahead policy: which requests share a forward pass, and that none is late by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from builders import (
    batched,
    finished,
    flux_requests,
    job,
    on_time,
    planned,
    poisson,
    promise,
    request,
    shipped,
    simulate,
)
from stages import DIFFUSE, stage_of
from tilework.control.controller import ControllerConfig
from tilework.core.block import Block, Demand
from tilework.core.graph.stage import Stage
from tilework.core.request import Request, Status
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.cost.demand import Speed
from tilework.cost.table_costs import TableCosts
from tilework.policy.lookahead.batch import Batch, BatchMember
from tilework.policy.lookahead.forecast import Claim, JobForecast
from tilework.policy.lookahead.node_jobs import NodeJobs
from tilework.policy.lookahead.policy import LookaheadPolicy
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace

MS = NS_PER_MS
FIXED_MS, EACH_MS = 60, 40  # Of a step: what every forward pass takes, and every request in it.
DECODE_MS = 5


def step_time(stage: Stage, requests: Sequence[Request]) -> float:
    return (FIXED_MS + EACH_MS * len(requests)) * MS if stage.has_steps else DECODE_MS * len(requests) * MS


def member(index: int, steps: int, due_ms: float = inf, *, encode_ms: int = 0, decode_ms: int = 0) -> BatchMember:
    is_due = due_ms < inf
    forecast = JobForecast(
        job_id=index,
        claim=Claim.FEASIBLE if is_due else Claim.BEST_EFFORT,
        order_key=due_ms * MS if is_due else 0.0,
        due_ns=due_ms * MS,
        speeds=(Speed(1, (FIXED_MS + EACH_MS) * MS),),
        usual=0,
        num_steps=float(steps),
        head_ns=0.0,
        tail_ns=0.0,
    )
    waiting = job(index, request(str(index), steps=steps))
    return BatchMember(waiting, forecast, encode_ms * MS, steps, decode_ms * MS, forecast.due_ns)


def batch(*members: BatchMember) -> Batch:
    return Batch(members, 0.0, step_time)


def test_members_end_one_by_one_and_steps_are_faster_then() -> None:
    """Two steps of three (180 ms), one of two (140), one of one (100); each decode delays the members that go on."""
    three = batch(member(0, 4, decode_ms=5), member(1, 2, decode_ms=5), member(2, 3, encode_ms=7, decode_ms=5))
    assert three.ends_ns == (622 * MS, 372 * MS, 517 * MS)
    assert batch(member(0, 4)).ends_ns == (400 * MS,)


def shared_decode(saved_ms: float, *members: BatchMember, num_behind: float = 0.0) -> Batch:
    """A batch in which a decode of two takes so much less than two decodes."""

    def timed(stage: Stage, requests: Sequence[Request]) -> float:
        return step_time(stage, requests) - (0 if stage.has_steps else saved_ms * MS * (len(requests) - 1))

    return Batch(members, 0.0, timed, num_behind)


def decodes(of: Batch) -> list[tuple[int, ...]]:
    """The jobs of each decode of a plan."""
    starts = of.starts(0, 9, 99, 10_000 * MS, "")
    return [start.job_ids for start in starts if start.stage.name == "decode"]


@pytest.mark.parametrize(
    ("saved_ms", "num_behind", "due_ms", "together"),
    [
        (3.0, 0.0, inf, True),  # Two end after 7 ms, before after 5 and 10.
        (2.0, 0.0, inf, False),  # Both end after 8 ms: one loses 3 ms, the other gains 2.
        (2.0, 1.0, inf, True),  # What waits behind them gains 2 ms, too.
        (0.9, 9.0, inf, False),  # It saves less than a tenth.
        (2.0, 0.0, 288.0, True),  # Nothing is gained by ending before a deadline.
        (2.0, 0.0, 287.9, False),
    ],
)
def test_members_that_end_their_steps_together_share_the_decode_if_it_pays(
    saved_ms: float, num_behind: float, due_ms: float, together: bool
) -> None:
    pair = [member(index, 2, due_ms=due_ms, decode_ms=DECODE_MS) for index in (0, 1)]
    both = shared_decode(saved_ms, *pair, num_behind=num_behind)
    assert decodes(both) == ([(0, 1)] if together else [(0,), (1,)])
    whole_ms = 280 + 2 * DECODE_MS
    ends_ms = (whole_ms - saved_ms,) * 2 if together else (whole_ms - DECODE_MS, whole_ms)
    assert both.ends_ns == tuple(end_ms * MS for end_ms in ends_ms)


def test_only_members_of_one_size_that_may_share_do_so() -> None:
    pair = [member(index, 2, decode_ms=DECODE_MS) for index in (0, 1, 2)]
    wide = replace(pair[2], job=job(2, request("2", steps=2, side=256)))
    assert decodes(shared_decode(4.0, *pair[:2], wide)) == [(0, 1), (2,)]
    unlucky = job(1, request("1", steps=2))
    unlucky.failures = 1
    assert decodes(shared_decode(4.0, pair[0], replace(pair[1], job=unlucky))) == [(0,), (1,)]


def test_those_that_go_on_gain_by_a_shared_decode() -> None:
    pair = [member(index, 2, decode_ms=DECODE_MS) for index in (0, 1)]
    assert decodes(shared_decode(2.0, *pair, member(2, 4))) == [(0, 1), (2,)]


def test_the_slack_of_a_batch_is_the_least_of_its_members() -> None:
    assert batch(member(0, 2, due_ms=300), member(1, 2, due_ms=290)).slack_ns == 10 * MS
    assert batch(member(0, 2, due_ms=300), member(1, 4, due_ms=470)).slack_ns == -10 * MS
    assert batch(member(0, 2), member(1, 4)).slack_ns == inf


def test_the_longest_members_leave_until_none_is_late() -> None:
    tight = batch(member(0, 2, due_ms=300), member(1, 3, due_ms=900), member(2, 9))
    assert [one.job.job_id for one in tight.trimmed().members] == [0, 1]
    hopeless = batch(member(0, 2, due_ms=150), member(1, 3))
    assert [one.job.job_id for one in hopeless.trimmed().members] == [0]


def test_the_share_of_a_step_that_one_more_member_saves() -> None:
    one = member(9, 5)
    assert batch(member(0, 5)).saved(one) == pytest.approx(60 / 200)
    assert batch(member(0, 5), member(1, 5)).saved(one) == pytest.approx(60 / 240)
    other = replace(one, job=job(9, replace(request("9"), pipeline="other")))
    assert batch(member(0, 5)).saved(other) == 0, "another model"


def test_those_without_deadlines_gain_in_the_mean_or_stay_apart() -> None:
    """Together, ten steps of both take 1.4 s instead of 1.0 and 2.0: one gains 0.2 s more than the other loses."""
    assert batch(member(0, 10)).is_better_with(member(1, 10), 1000 * MS, 0)
    assert not batch(member(0, 10)).is_better_with(member(1, 10), 700 * MS, 0), "another device is free soon"
    assert batch(member(0, 10)).is_better_with(member(1, 10), 700 * MS, 1), (
        "a request that waits behind them gains, too"
    )


def test_promises_are_kept_even_if_members_run_one_by_one_later() -> None:
    """A chunk of one step together takes 140 ms, then the first has 400 ms to go and the second 400 more."""

    def promised(index: int, due_ms: int) -> BatchMember:
        one = member(index, 5, due_ms=due_ms)
        one.job.promised = Block(due_ms * MS, 0, Demand(1, 500 * MS))  # type: ignore[misc]
        return one

    assert batch(promised(0, 540), promised(1, 940)).keeps_promises(140 * MS)
    assert not batch(promised(0, 539), promised(1, 940)).keeps_promises(140 * MS)
    assert not batch(promised(0, 540), promised(1, 939)).keeps_promises(140 * MS)
    assert batch(member(0, 5, due_ms=1), member(1, 5)).keeps_promises(140 * MS), "nothing is promised"


def test_as_one_forecast_a_batch_is_on_time_when_all_members_are() -> None:
    both = batch(member(0, 2, due_ms=300), member(1, 4, due_ms=490))
    forecast = both.as_forecast(0, may_split=True)
    assert (forecast.claim, forecast.due_ns - forecast.least_device_ns) == (Claim.FEASIBLE, both.slack_ns)
    assert [speed.step_ns for speed in forecast.speeds] == [480 * MS, 400 * MS], "on two devices each has one"
    assert batch(member(0, 2), member(1, 4)).as_forecast(0, may_split=False).claim is Claim.BEST_EFFORT


# In simulation.


def sizes(trace: Trace) -> list[int]:
    return [len(run.work.job_ids) for run in trace.runs if run.work.stage.name == DIFFUSE]


def test_requests_that_would_be_late_one_by_one_are_on_time_together() -> None:
    """The first has begun two chunks alone, 0.4 s, before the others come."""
    three = [request(str(index), slo_s=2.2) for index in range(3)]
    assert on_time(simulate(three, "edf", num_devices=1, costs=batched())) == pytest.approx(2 / 3)
    trace = simulate(three, "tilework", num_devices=1, costs=batched())
    assert on_time(trace) == 1.0
    assert max(sizes(trace)) == 3


def test_a_request_that_would_make_another_late_does_not_join() -> None:
    """The other can spare 10 ms, and a step together takes 40 ms more than alone."""
    tight, other = request("tight", slo_s=1.01), request("other", slo_s=1.3)
    trace = simulate([tight, other], "tilework", num_devices=1, costs=batched())
    assert (on_time(trace), max(sizes(trace))) == (0.5, 1)


def test_without_a_gain_no_request_shares() -> None:
    requests = [request(str(index), slo_s=1.9) for index in range(3)]
    assert max(sizes(simulate(requests, "tilework", num_devices=1, costs=batched(0.002, 0.098)))) == 1


def test_small_requests_share_a_device_beside_a_wide_one() -> None:
    """The wide one needs four of five devices; the small ones would end after 0.8, 1.6 and 2.4 s one by one."""
    wide = request("wide", steps=60, slo_s=2.02)
    small = [request(str(index), side=64, steps=10, slo_s=1.7) for index in range(3)]
    trace = simulate([wide, *small], "tilework", num_devices=5, costs=batched())
    assert on_time(trace) == 1.0
    assert {len(run.devices) for run in trace.runs if run.work.job_ids == (0,) and run.work.stage.name == DIFFUSE} == {
        4
    }
    assert max(sizes(trace)) == 3


@pytest.mark.parametrize("most", [1, 2])
def test_batches_are_no_larger_than_they_may_be(most: int) -> None:
    requests = [request(str(index)) for index in range(4)]
    config = ControllerConfig(policy="tilework", max_batch=most)
    assert max(sizes(Simulation(config, batched(), SimConfig(num_devices=1)).run(requests))) == most


def test_a_request_whose_time_alone_is_a_guess_does_not_share() -> None:
    """Until one has run alone. Requests with previews share, since their works measure nothing."""
    exact = batched()
    guess = replace(exact, rows=tuple(replace(row, num_runs=1) for row in exact.rows))
    asked = [request(str(index)) for index in range(3)]
    watched = [replace(one, preview_every=2) for one in asked]

    def shares(requests: list[Request], costs: TableCosts) -> bool:
        return any(len(start.job_ids) > 1 for start in planned(LookaheadPolicy(), requests, 1, costs).starts)

    assert shares(asked, TableCosts(exact))
    costs = TableCosts(guess)
    assert not shares(asked, costs)
    assert shares(watched, costs)
    costs.observe(stage_of(asked[0].pipeline, DIFFUSE), asked[:1], 1, 1, 100 * MS)
    assert shares(asked, costs)


def test_errors_of_recent_predictions_count_against_a_batch() -> None:
    """Two take 140 ms, of 200 one by one; then half as much or as much again, in turn. The mean is worth little."""
    costs, pair = TableCosts(batched()), [request(uid) for uid in "ab"]
    step = stage_of(pair[0].pipeline, DIFFUSE)

    def shares() -> bool:
        return max(len(start.job_ids) for start in planned(LookaheadPolicy(), pair, 1, costs).starts) == 2

    assert shares()
    for run_ms in (140, 70, 210) * 20:
        costs.observe(step, pair, 1, 1, run_ms * MS)
    assert costs.work_ns(step, pair, 1) < 160 * MS
    assert costs.prediction_error(step) > 0.25
    assert not shares()
    for _ in range(20):
        costs.observe(step, pair, 1, 1, 140 * MS)
    assert shares()


def test_on_idle_devices_each_request_runs_alone() -> None:
    requests = [request(str(index)) for index in range(4)]
    assert set(sizes(simulate(requests, "tilework", num_devices=4, costs=batched()))) == {1}


def test_a_batch_is_split_when_devices_become_idle() -> None:
    """A third one keeps the other device busy at first."""
    requests = [request("busy", steps=3), request("a", steps=40), request("b", steps=40)]
    trace = simulate(requests, "tilework", num_devices=2, costs=batched())
    last = max(trace.runs, key=lambda run: run.end_ns)
    assert len(last.work.job_ids) == 1
    alone = [request(str(index), steps=40) for index in range(2)]
    lonely = simulate(alone, "tilework", num_devices=2, costs=batched())
    assert max(run.end_ns for run in trace.runs) < 1.2 * max(run.end_ns for run in lonely.runs)


def test_a_later_request_joins_at_the_end_of_a_chunk() -> None:
    trace = simulate(
        [request("first", steps=20), request("second", 0.5, steps=10)], "tilework", num_devices=1, costs=batched()
    )
    shared = [run for run in trace.runs if len(run.work.job_ids) == 2]
    assert 0.5 < shared[0].start_ns / 1e9 < 1.0
    assert {run.work.members[0].first_step for run in shared} != {run.work.members[1].first_step for run in shared}


def test_many_waiting_requests_are_served_sooner_together() -> None:
    waiting = poisson(60, 6.0, 3, best_effort=1.0)
    apart = simulate(waiting, "edf", num_devices=2, costs=batched())
    together = simulate(waiting, "tilework", num_devices=2, costs=batched())
    assert sorted(finished(together)) == sorted(finished(apart))

    def mean_ns(trace: Trace) -> float:
        return sum(ending.latency_ns or 0 for ending in trace.endings) / len(trace.endings)

    assert mean_ns(together) < 0.7 * mean_ns(apart)


def test_promises_are_kept_beside_batches() -> None:
    promises = [promise(f"p{index}", index * 0.3, 3.0) for index in range(20)]
    others = [request(f"o{index}", index * 0.25, side=64) for index in range(20)]
    trace = simulate(
        sorted([*promises, *others], key=lambda one: one.arrival_ns), "tilework", num_devices=1, costs=batched()
    )
    kept = [one for one in trace.endings if one.request.is_promise and one.status is Status.DONE]
    assert len(kept) >= 8
    assert all(one.on_time for one in kept)
    assert max(sizes(trace)) > 1


def test_tables_without_batches_are_served_as_if_there_were_none() -> None:
    """The policy asks once for each class of requests whether two gain, and nothing else."""
    costs, asked = TableCosts(shipped("flux1dev_h100_eager")), list[int]()
    work_ns = costs.work_ns

    def counted(stage, requests, degree, num_steps=1):  # type: ignore[no-untyped-def]
        asked.append(len(requests))
        return work_ns(stage, requests, degree, num_steps)

    costs.work_ns = counted  # type: ignore[method-assign]
    planned(LookaheadPolicy(), flux_requests(40, 600.0, 1.5, 1), 8, costs)
    assert 0 < sum(number > 1 for number in asked) <= 4


def test_a_job_that_was_left_out_of_a_work_is_not_on_its_device() -> None:
    """Its state was lost there. The others run on; it has begun on another device, where its next stage follows."""
    left_out, stays, on_other = (
        SimpleNamespace(job_ids=(0, 1)),
        SimpleNamespace(job_ids=(1,)),
        SimpleNamespace(job_ids=(0,)),
    )
    jobs: dict[int, Any] = {
        0: SimpleNamespace(job_id=0, works=[on_other]),
        1: SimpleNamespace(job_id=1, works=[left_out, stays]),
    }
    devices: list[Any] = [
        SimpleNamespace(device_id=0, works=[left_out, stays], is_loading=False, free_ns=5),
        SimpleNamespace(device_id=1, works=[on_other], is_loading=False, free_ns=5),
    ]
    node = NodeJobs(devices, 0, NS_PER_S, lambda *_: inf, jobs=jobs)
    assert [[job.job_id for job in node.jobs_on(device)] for device in devices] == [[1], [0]]
    del jobs[1]
    assert len(list(node.pinned())) == 1, "no job of this plan is on the first"
