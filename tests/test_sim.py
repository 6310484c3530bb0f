"""The simulated driver and the policies on it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import poisson, request, simulate, table
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.events import GpuJoined, Submitted
from tilework.core.interfaces import Admitted, Refused
from tilework.core.request import OnMiss, Request, Status
from tilework.core.time import NS_PER_S
from tilework.core.work import DIFFUSE
from tilework.policy.admission import EtaAdmission, service_time_ns, start_ns
from tilework.policy.registry import UnknownPolicy, make_policy, policy_names
from tilework.sim.simulation import Trace

SERVICE_S = 0.01 + 10 * 0.1 + 0.05


def attainment(trace: Trace) -> float:
    due = [ending for ending in trace.endings if ending.request.deadline_ns is not None]
    return sum(ending.on_time for ending in due) / len(due)


def test_one_request_takes_its_service_time() -> None:
    (ending,) = simulate([request("a")]).endings
    assert ending.status is Status.DONE
    assert ending.finish_ns == pytest.approx(SERVICE_S * NS_PER_S, abs=10)
    assert ending.eta_ns == ending.finish_ns


def test_fixed_serves_in_order_of_arrival() -> None:
    requests = [request(str(index), index * 0.01, slo_s=10 - index) for index in range(5)]
    trace = simulate(requests, "fixed-sp1", num_gpus=1)
    finishes = [ending.finish_ns for ending in trace.endings]
    assert finishes == sorted(finishes)


def test_edf_serves_the_earliest_deadline_first_and_preempts_between_chunks() -> None:
    long = request("long", 0.0, side=192, steps=20, slo_s=30)
    urgent = request("urgent", 0.1, side=64, steps=4, slo_s=1.5)
    fifo, edf = (simulate([long, urgent], policy, num_gpus=1) for policy in ("fixed-sp1", "edf"))
    assert [ending.on_time for ending in fifo.endings] == [True, False]
    assert [ending.on_time for ending in edf.endings] == [True, True]


def test_edf_sets_aside_what_cannot_be_on_time() -> None:
    doomed = [request(f"doomed{index}", 0.0, slo_s=0.5) for index in range(6)]
    feasible = request("feasible", 0.0, slo_s=2.0)
    trace = simulate([*doomed, feasible], num_gpus=1)
    assert trace.endings[-1].on_time
    assert all(ending.status is Status.DONE for ending in trace.endings), "the late are served, too"


def test_edf_does_not_starve_best_effort() -> None:
    best_effort = request("patient", 0.0)
    crowd = [request(str(index), index * 1.06, slo_s=1.5) for index in range(120)]
    trace = simulate([best_effort, *crowd], num_gpus=1)
    assert trace.endings[0].latency_ns < 70 * NS_PER_S


def test_edf_beats_first_come_first_served_near_capacity() -> None:
    requests = poisson(400, 1.5, seed=3, slo_s=4.0)
    assert attainment(simulate(requests, "edf")) > attainment(simulate(requests, "fixed-sp1")) + 0.1


@pytest.mark.parametrize("policy", policy_names())
def test_same_seed_same_trace_and_another_seed_another(policy: str) -> None:
    requests = poisson(60, 1.2, seed=5)
    one, same, other = (simulate(requests, policy, jitter=0.05, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


@pytest.mark.parametrize("policy", policy_names())
@given(
    seed=st.integers(0, 10_000),
    rate=st.floats(0.3, 4),
    num_gpus=st.integers(1, 4),
    data=st.data(),
)
def test_every_trace_is_legal(policy: str, seed: int, rate: float, num_gpus: int, data: st.DataObject) -> None:
    """A device runs one work at a time, nothing runs before it arrived, a request's works follow one another."""
    requests = poisson(25, rate, seed)
    cancelled = data.draw(st.lists(st.sampled_from(requests), max_size=4))
    cancels = tuple((r.arrival_ns + data.draw(st.integers(0, 5 * NS_PER_S)), r.uid) for r in cancelled)
    trace = simulate(requests, policy, num_gpus=num_gpus, jitter=0.1, seed=seed, cancels=cancels)
    for gpu in range(num_gpus):
        runs = sorted((run.start_ns, run.end_ns) for run in trace.runs if gpu in run.work.gpus)
        assert all(first[1] <= second[0] for first, second in pairwise(runs))
    for job_id, ending in enumerate(trace.endings):
        runs_of_job = sorted((r for r in trace.runs if job_id in r.work.job_ids), key=lambda r: r.start_ns)
        assert all(run.start_ns >= ending.request.arrival_ns for run in runs_of_job)
        assert all(first.end_ns <= second.start_ns for first, second in pairwise(runs_of_job))
        if ending.status is Status.DONE:
            assert sum(run.steps for run in runs_of_job if run.work.stage.name == DIFFUSE) == ending.request.steps


def test_a_cancelled_request_frees_its_device_at_the_next_step() -> None:
    long, next_one = request("long", 0.0, steps=50), request("next", 0.05)
    trace = simulate([long, next_one], num_gpus=1, cancels=((300_000_000, "long"),))
    assert trace.endings[0].status is Status.CANCELLED
    assert trace.endings[1].finish_ns < (0.3 + 0.1 + SERVICE_S + 0.01) * NS_PER_S


def test_a_device_has_no_bubble_while_work_is_waiting() -> None:
    trace = simulate([request(str(index)) for index in range(4)], num_gpus=1)
    runs = sorted((run.start_ns, run.end_ns) for run in trace.runs)
    assert all(first[1] == second[0] for first, second in pairwise(runs))


# Admission.


def test_a_request_that_cannot_make_it_is_rejected_with_the_earliest_deadline() -> None:
    crowd = [request(str(index), 0.0) for index in range(6)]
    refused = request("late", 0.0, slo_s=1.2, on_miss=OnMiss.REJECT)
    trace = simulate([*crowd, refused], "fixed-sp1")
    assert trace.endings[-1].status is Status.REJECTED
    assert "late behind 6 other requests" in trace.endings[-1].reason
    again = request("on time", 0.0, slo_s=4.3, on_miss=OnMiss.REJECT)
    assert simulate([*crowd, again], "fixed-sp1").endings[-1].on_time


@pytest.mark.parametrize(("policy", "rate"), [("fixed-sp1", 1.0), ("fixed-sp1", 3.0), ("edf", 1.0)])
def test_the_eta_is_near_what_happens(policy: str, rate: float) -> None:
    """First come, first served never breaks its word; EDF's later, more urgent arrivals postpone some."""
    trace = simulate(poisson(200, rate, seed=11, slo_s=30), policy)
    errors = sorted(abs(e.finish_ns - (e.eta_ns or 0)) / e.latency_ns for e in trace.endings)
    assert errors[len(errors) // 2] < 0.05


@given(
    free=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    ahead=st.lists(st.integers(1, 50), min_size=129, max_size=400),
)
def test_pouring_many_jobs_is_close_to_placing_each(free: list[int], ahead: list[int]) -> None:
    exact = list(free)
    for job_ns in ahead:
        exact[exact.index(min(exact))] += job_ns
    assert abs(start_ns(free, ahead) - min(exact)) <= 2 * max(ahead)


class NoDevices:
    def num_jobs(self) -> int:
        return 0

    def device_free_ns(self, now_ns: int) -> list[int]:
        return []

    def ahead_ns(self, urgency_ns: int) -> list[int]:
        return []


def test_without_devices_only_a_promise_is_refused() -> None:
    costs = Controller(ControllerConfig(), table()).costs
    admit = EtaAdmission().admit
    patient, strict = request("a", slo_s=9.0), request("b", slo_s=9.0, on_miss=OnMiss.REJECT)
    assert admit(patient, 0, NoDevices(), costs, 0) == Admitted(service_time_ns(patient, costs))
    assert admit(strict, 0, NoDevices(), costs, 0) == Refused("no device is up", None)


def test_an_unknown_pipeline_is_rejected_not_crashed_on() -> None:
    controller = Controller(ControllerConfig(), table())
    controller.handle(GpuJoined(0, 0, frozenset()), 0)
    stranger = Request(uid="x", pipeline="other", shape=request("y").shape, steps=1, arrival_ns=0)
    (action,) = controller.handle(Submitted(stranger), 0)
    assert "'other' is not in the cost table; it knows toy" in action.reason  # type: ignore[union-attr]


def test_an_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(UnknownPolicy, match="did you mean 'edf'"):
        make_policy("edff")
