"""Stages after the steps that several devices may share: on how many they run, and what forecasts say of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import PIPELINE, job, request, simulate, table
from stages import DECODE, at_start
from tilework.control.cluster.tracker import Tracker
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_S
from tilework.core.work import Group
from tilework.cost.demand import Speed, fastest_degree, head_and_tail_ns, optimal_degree
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.policy.lookahead.allocation import RemainingJob, allocate
from tilework.policy.lookahead.forecast import Claim, JobForecast
from tilework.policy.lookahead.forecaster import Forecaster
from tilework.policy.lookahead.node_jobs import NodeJobs
from tilework.policy.lookahead.policy import LookaheadPolicy
from tilework.policy.lookahead.request_costs import RequestCosts
from tilework.sim.trace import Trace

DECODE_S = {1: 4.0, 2: 2.2, 4: 1.9, 8: 2.0}
"""At 128 px. Two devices are efficient (4 / 4.4), four are not, and eight are slower than four."""


def costs(decode_s: dict[int, float] = DECODE_S) -> CostTable:
    """Steps that up to eight devices share, and decodes that they share, too."""
    made = table(degrees=(1, 2, 4, 8))
    rows = [row for row in made.rows if row.height == 128 and row.stage != DECODE]
    decode = next(row for row in made.rows if row.height == 128 and row.stage == DECODE)
    specs = [
        replace(one, degrees=None, sliceable=False) if one.name == DECODE else one
        for one in latent_diffusion(PIPELINE).specs
    ]
    decodes = [replace(decode, degree=degree, seconds=seconds) for degree, seconds in decode_s.items()]
    return replace(made, rows=(*rows, *decodes), graphs={PIPELINE: Graph(PIPELINE, tuple(specs))})


def wanted(uid: str, at_s: float = 0.0, slo_s: float | None = None, **changes: object) -> Request:
    made = replace(request(uid, at_s, slo_s=slo_s), shape=Shape(128, 128))
    return replace(made, **changes)  # type: ignore[arg-type]


def decodes(trace: Trace) -> dict[str, Group]:
    """The devices of the decode of each request."""
    uids = {ending.job_id: ending.request.uid for ending in trace.endings}
    return {uids[run.work.job_ids[0]]: run.work.devices for run in trace.runs if run.work.stage.name == DECODE}


def test_a_decode_runs_as_fast_as_it_can_while_no_job_waits() -> None:
    trace = simulate([wanted("a")], "tilework", num_devices=8, costs=costs())
    (group,) = decodes(trace).values()
    steps = [run.work.devices for run in trace.runs if run.work.stage.has_steps]
    assert len(group) == min(4, len(steps[-1]))
    assert set(group) <= set(steps[-1])


def test_a_decode_takes_only_what_is_efficient_while_jobs_wait() -> None:
    """To be on time, the first needs all four devices for its steps; the other waits meanwhile."""
    first, other = wanted("a", slo_s=5.7, steps=40), wanted("b", 0.01)
    alone, trace = (
        simulate(asked, "tilework", num_devices=4, costs=costs({1: 4.0, 4: 1.9})) for asked in ([first], [first, other])
    )
    steps = [run.work.devices for run in trace.runs if run.work.stage.has_steps and run.work.job_ids == (0,)]
    assert {len(group) for group in steps} == {4}
    assert [len(decodes(one)["a"]) for one in (alone, trace)] == [4, 1]
    assert all(ending.on_time for ending in trace.endings)


def test_an_exact_request_is_decoded_on_one_device() -> None:
    trace = simulate([wanted("a", exact=True)], "tilework", num_devices=8, costs=costs())
    assert [len(group) for group in decodes(trace).values()] == [1]


def test_degrees_that_suit_a_decode() -> None:
    known = TableCosts(costs())
    stage, one = known.graph(PIPELINE).stage(DECODE), wanted("a")
    assert [optimal_degree(stage, one, known, most) for most in (1, 2, 3, 8)] == [1, 2, 2, 2]
    assert [fastest_degree(stage, one, known, most) for most in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert optimal_degree(stage, replace(one, exact=True), known, 8) == 1


def test_forecasts_know_the_time_after_the_steps_at_each_degree() -> None:
    known, one = TableCosts(costs()), wanted("a")
    left = known.start(one)
    assert [head_and_tail_ns(one, left, known, width)[1] / NS_PER_S for width in (1, 2, 8)] == [4.0, 2.2, 2.2]
    step_costs = RequestCosts().of(one, left, 8, known)
    assert step_costs.tail_factors == pytest.approx([1.0, 0.55, 0.55, 0.55])
    plain = TableCosts(table(degrees=(1, 2)))
    assert RequestCosts().of(request("a"), at_start(request("a")), 2, plain).tail_factors == ()


def forecast(due_ns: float) -> JobForecast:
    """Ten steps of 10 or 6 ns, then 100 ns on one device or 50 on two."""
    return JobForecast(
        job_id=0,
        claim=Claim.FEASIBLE,
        order_key=due_ns,
        due_ns=due_ns,
        speeds=(Speed(1, 10), Speed(2, 6)),
        usual=0,
        num_steps=10.0,
        head_ns=0.0,
        tail_ns=100.0,
        tail_factors=(1.0, 0.5),
    )


def test_a_deadline_between_two_degrees_needs_the_wider_one() -> None:
    assert [forecast(due_ns).needed_degree(0) for due_ns in (200, 199, 110)] == [1, 2, 2]
    assert (forecast(200).usual_ns, forecast(200).least_ns) == (200, 110)
    for due_ns, degree in ((200, 1), (199, 2)):
        job = RemainingJob(forecast(due_ns), 0, 10.0, 0.0, 100.0)
        allocate([], [job], [], 2, 0.0)
        assert job.degree == degree or due_ns == 200, "what is left makes it wider"


def test_a_decode_that_is_half_done_takes_half_the_time_at_any_degree() -> None:
    job = RemainingJob(forecast(500), 0, 10.0, 0.0, 100.0, level=1)
    assert job.run_ns() == 110
    job.run(60 + 25)
    assert (job.num_steps, job.run_ns()) == (0.0, 25)
    job.level = 0
    assert job.run_ns() == 50


def test_what_follows_the_steps_has_degrees_of_its_own() -> None:
    """One device, two efficiently, four at most: eight are slower."""
    known, one = TableCosts(costs()), wanted("a")
    tail = RequestCosts().of(one, known.start(one), 8, known).tail
    assert [speed.degree for speed in tail.speeds] == [1, 2, 4]
    assert tail.factors == pytest.approx([1.0, 0.55, 0.475])
    assert tail.usual == 1
    plain = TableCosts(table(degrees=(1, 2)))
    assert [
        speed.degree for speed in RequestCosts().of(request("a"), at_start(request("a")), 2, plain).tail.speeds
    ] == [1]
    alone = RequestCosts().of(one, known.start(one), 1, known).tail
    assert [speed.degree for speed in alone.speeds] == [1]


def waiting_to_decode(slo_s: float) -> tuple[JobForecast, int]:
    """The forecast at its arrival of a job that has made all its steps, and the devices that it needs to be on time."""
    known, one = TableCosts(costs()), wanted("a", slo_s=slo_s)
    tracker, policy = Tracker(LookaheadPolicy(), known), LookaheadPolicy()
    for device_id in range(8):
        tracker.add_device(device_id, 0)
    done = known.start(one).itinerary.at[1 + one.steps]
    waiting = job(0, one, policy.urgency_ns(one, False), done=done)
    tracker.add_job(waiting)
    node = NodeJobs(tracker.devices, 0, 1, lambda *_: 0.0)
    found = Forecaster(RequestCosts(), known, 0).forecast(waiting, node)
    assert found is not None
    return found, found.needed_degree(0)


@pytest.mark.parametrize(("slo_s", "needed"), [(5.0, 1), (3.0, 2), (2.0, 4)])
def test_a_decode_that_waits_gets_as_many_devices_as_make_it_on_time(slo_s: float, needed: int) -> None:
    found, degree = waiting_to_decode(slo_s)
    assert degree == needed
    assert found.least_ns / NS_PER_S == pytest.approx(1.9), "it is not given up while four devices would do"


def test_devices_that_no_job_needs_widen_a_decode_that_waits() -> None:
    found, _ = waiting_to_decode(5.0)
    remaining = RemainingJob(found, 0, 0.0, 0.0, found.tail_ns)
    (running,), _, _ = allocate([], [remaining], [], 8, 0.0)
    assert running.degree == 4
    assert running.run_ns() / NS_PER_S == pytest.approx(1.9)
