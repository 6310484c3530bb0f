"""The simulated driver and the policies on it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import ONE_OF_EACH, PIPELINE, POLICIES, SERVICE_S, Idle, assert_legal, poisson, request, simulate, table
from quick import quick
from stages import DIFFUSE, stage_of
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Action
from tilework.core.events import DeviceJoined, Event, Stopped, Submitted, WorkFinished
from tilework.core.lora import UsedLora
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import OnMiss, Request, Shape, Status
from tilework.core.time import NS_PER_S
from tilework.core.work import Plan, Start
from tilework.formats.workload import WorkloadRequest
from tilework.policy import registry
from tilework.policy.published.fixed import FixedDegree
from tilework.policy.registry import UnknownPolicy, make_policy
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace
from tilework.sim.workloads.requests import to_requests


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
    trace = simulate(requests, "fixed-sp1", num_devices=1)
    finishes = [ending.finish_ns for ending in trace.endings]
    assert finishes == sorted(finishes)


def test_edf_serves_the_earliest_deadline_first_and_preempts_between_chunks() -> None:
    long = request("long", 0.0, side=192, steps=20, slo_s=30)
    urgent = request("urgent", 0.1, side=64, steps=4, slo_s=1.5)
    fifo, edf = (simulate([long, urgent], policy, num_devices=1) for policy in ("fixed-sp1", "edf"))
    assert [ending.on_time for ending in fifo.endings] == [True, False]
    assert [ending.on_time for ending in edf.endings] == [True, True]


def test_edf_drops_to_best_effort_what_cannot_be_on_time() -> None:
    doomed = [request(f"doomed{index}", 0.0, slo_s=0.5) for index in range(6)]
    feasible = request("feasible", 0.0, slo_s=2.0)
    trace = simulate([*doomed, feasible], num_devices=1)
    assert trace.endings[-1].on_time
    assert all(ending.status is Status.DONE for ending in trace.endings), "the late are served, too"


def test_edf_does_not_starve_best_effort() -> None:
    best_effort = request("patient", 0.0)
    crowd = [request(str(index), index * 1.06, slo_s=1.5) for index in range(120)]
    trace = simulate([best_effort, *crowd], num_devices=1)
    assert trace.endings[0].latency_ns < 70 * NS_PER_S


def test_edf_beats_first_come_first_served_near_capacity() -> None:
    requests = poisson(400, 1.5, seed=3, slo_s=4.0)
    assert attainment(simulate(requests, "edf")) > attainment(simulate(requests, "fixed-sp1")) + 0.1


@pytest.mark.parametrize("policy", POLICIES)
def test_same_seed_same_trace_and_another_seed_another(policy: str) -> None:
    requests = poisson(60, 1.2, seed=5)
    one, same, other = (simulate(requests, policy, jitter=0.05, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def check_drawn(policy: str, data: st.DataObject) -> None:
    seed, rate = data.draw(st.integers(0, 10_000)), data.draw(st.floats(0.3, 4))
    num_devices, devices_per_node = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 3, 4, 8]))
    degrees = data.draw(st.sampled_from([(1,), (1, 2), (1, 2, 4), (1, 2, 4, 8)]))
    requests = poisson(25, rate, seed)
    cancelled = data.draw(st.lists(st.sampled_from(requests), max_size=4))
    cancels = tuple((r.arrival_ns + data.draw(st.integers(0, 5 * NS_PER_S)), r.uid) for r in cancelled)
    costs = replace(table(degrees=degrees), devices_per_node=devices_per_node)
    trace = simulate(requests, policy, num_devices=num_devices, jitter=0.1, seed=seed, cancels=cancels, costs=costs)
    assert_legal(trace, num_devices, degrees, devices_per_node, {uid for _, uid in cancels})


@pytest.mark.parametrize("policy", quick(("tilework", "edf", "tetriserve"), ONE_OF_EACH))
@settings(max_examples=30)
@given(data=st.data())
def test_every_trace_is_legal(policy: str, data: st.DataObject) -> None:
    check_drawn(policy, data)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data())
def test_many_traces_are_legal(policy: str, data: st.DataObject) -> None:
    check_drawn(policy, data)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_trace_of_every_policy_is_legal(policy: str) -> None:
    requests, costs = poisson(25, 3.0, 1), replace(table(degrees=(1, 2)), devices_per_node=2)
    cancels = tuple((one.arrival_ns + NS_PER_S // 2, one.uid) for one in requests[::8])
    trace = simulate(requests, policy, num_devices=3, jitter=0.1, cancels=cancels, costs=costs)
    assert_legal(trace, 3, (1, 2), 2, {uid for _, uid in cancels})


def test_a_cancelled_request_frees_its_device_at_the_next_step() -> None:
    long, next_one = request("long", 0.0, steps=50), request("next", 0.05)
    trace = simulate([long, next_one], num_devices=1, cancels=((300_000_000, "long"),))
    assert trace.endings[0].status is Status.CANCELLED
    assert trace.endings[1].finish_ns < (0.3 + 0.1 + SERVICE_S + 0.01) * NS_PER_S


def test_a_device_has_no_bubble_while_work_is_waiting() -> None:
    trace = simulate([request(str(index)) for index in range(4)], num_devices=1)
    runs = sorted((run.start_ns, run.end_ns) for run in trace.runs)
    assert all(first[1] == second[0] for first, second in pairwise(runs))


# Admission.


@pytest.mark.parametrize(("policy", "rate"), [("fixed-sp1", 1.0), ("fixed-sp1", 3.0), ("edf", 1.0)])
def test_the_eta_is_near_what_happens(policy: str, rate: float) -> None:
    """First come, first served never breaks its word; EDF's later, more urgent arrivals postpone some."""
    trace = simulate(poisson(200, rate, seed=11, slo_s=30), policy)
    errors = sorted(abs(e.finish_ns - (e.eta_ns or 0)) / e.latency_ns for e in trace.endings)
    assert errors[len(errors) // 2] < 0.05


def test_an_unknown_pipeline_is_rejected_not_crashed_on() -> None:
    controller = Controller(ControllerConfig(), table())
    controller.handle(DeviceJoined(0, 0), 0)
    stranger = Request(uid="x", pipeline="other", shape=request("y").shape, steps=1, arrival_ns=0)
    (action,) = controller.handle(Submitted(stranger), 0)
    assert "'other' is not in the cost table; it knows toy" in action.reason  # type: ignore[union-attr]


def test_an_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(UnknownPolicy, match="did you mean 'edf'"):
        make_policy("edff")


# What the modelled devices lose, and how policies and nodes look to them.


def test_dispatch_and_result_times_are_added() -> None:
    one = request("a", steps=2, slo_s=9)  # Three works: encode, one chunk of two steps, decode.
    config = SimConfig(num_devices=1, dispatch_ns=1000, result_ns=70)
    (ending,) = Simulation(ControllerConfig(), table(), config).run([one]).endings
    plain = simulate([one], num_devices=1).endings[0].finish_ns
    assert ending.finish_ns == plain + 3 * 1000 + 70


def reported(simulation: Simulation, requests: list[Request]) -> tuple[Trace, list[int]]:
    """The trace, and the run times that the controller is told."""
    told: list[int] = []

    def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        if isinstance(event, WorkFinished):
            told.append(event.run_ns)

    return simulation.run(requests, observe=observe), told


def test_dispatch_lies_before_a_run_and_is_not_reported() -> None:
    config = SimConfig(num_devices=1, dispatch_ns=1000)
    simulation = Simulation(ControllerConfig(policy="fixed-sp1"), table(), config)
    trace, told = reported(simulation, [request("a", steps=2)])
    assert told == [10_000_000, 200_000_000, 50_000_000]
    assert [run.end_ns - run.start_ns for run in trace.runs] == told
    assert [run.start_ns for run in trace.runs] == [1000, 10_002_000, 210_003_000]


@pytest.mark.parametrize(
    ("dispatch_ns", "lost_ns"),
    [
        (7, [7, 7, 7]),
        ({1: 5, 2: 30, 8: 90}, [5, 30, 90]),
        ({2: 30}, [30, 30, 30]),
        ({}, [0, 0, 0]),
    ],
)
def test_dispatch_goes_by_degree(dispatch_ns: int | dict[int, int], lost_ns: list[int]) -> None:
    """A degree that is not listed is like the nearest narrower one, or like the narrowest."""
    config = SimConfig(num_devices=8, dispatch_ns=dispatch_ns)
    assert [config.dispatch_ns_at(degree) for degree in (1, 4, 8)] == lost_ns


def test_the_dispatch_time_of_a_group_is_that_of_its_degree() -> None:
    config = SimConfig(num_devices=4, dispatch_ns={1: 1000, 4: 9_000_000})
    policy = ControllerConfig(policy="fixed-sp4")
    encode, steps, decode = Simulation(policy, table(degrees=(1, 4)), config).run([request("a", steps=2)]).runs
    assert (encode.start_ns, steps.start_ns - encode.end_ns, decode.start_ns - steps.end_ns) == (1000, 9_000_000, 1000)


def test_devices_may_have_other_costs_than_the_controller_assumes() -> None:
    one = request("a", steps=2, slo_s=9)
    policy = ControllerConfig(policy="fixed-sp1")
    simulation = Simulation(policy, table(), SimConfig(num_devices=1), table(step_s=0.3))
    trace, told = reported(simulation, [one])
    assert told == [10_000_000, 600_000_000, 50_000_000]
    assert trace.endings[0].eta_ns == pytest.approx(260_000_000)


def test_a_moved_job_waits_until_its_state_has_arrived() -> None:
    """The long job is displaced on one device and goes on on the other, 2 ms after it is told to."""
    requests = [
        request("blocker", 0.0, steps=12, slo_s=1.6),
        request("long", 0.0, steps=30, slo_s=60),
        request("urgent", 0.15, steps=20, slo_s=2.4),
    ]
    config = SimConfig(num_devices=2)
    trace = Simulation(ControllerConfig(policy="edf"), table(decode_s=0.0001), config).run(requests)
    blocking, moving = ([run for run in trace.runs if run.work.job_ids == (job_id,)] for job_id in (0, 1))
    (arrived,) = [after for before, after in pairwise(moving) if before.work.devices != after.work.devices]
    assert blocking[-1].work.devices == arrived.work.devices
    # It is told to move when the blocker's last steps have ended; its state was put down long before.
    assert blocking[-2].end_ns == 1_210_000_000
    assert arrived.start_ns == 1_210_000_000 + 2_000_000


def test_a_group_waits_for_the_conditioning_from_its_first_member() -> None:
    trace = simulate([request("a", steps=2)], "fixed-sp4", num_devices=4, costs=table(degrees=(1, 2, 4)))
    encode, steps, decode = trace.runs
    assert (encode.work.devices, steps.work.devices, decode.work.devices) == ((0,), (0, 1, 2, 3), (0,))
    assert steps.start_ns == encode.end_ns + 2_000_000
    assert decode.start_ns == steps.end_ns, "the first member has the state"


class Sleeper(Idle):
    """Does nothing in the first second, then what `fixed-sp1` does."""

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        return Plan(wake_ns=NS_PER_S) if now_ns < NS_PER_S else FixedDegree(degree=1).plan(view, costs, now_ns)


def test_a_policy_is_woken_at_the_time_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._GIVEN, "sleeper", Sleeper)
    (ending,) = simulate([request("a")], "sleeper").endings
    assert ending.finish_ns == pytest.approx((1 + SERVICE_S) * NS_PER_S, abs=10)


class Mover(Idle):
    """Sends its only job over device 0 for all but its last steps, and these to device 1."""

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        starts = [
            Start(
                stage=stage_of(PIPELINE, stage),
                job_ids=(job.job_id,),
                devices=devices,
                num_steps=num_steps,
                why="a test",
            )
            for job in view.waiting()
            if len(view.devices) == 2
            for stage, devices, num_steps in (("encode", (0,), 1), (DIFFUSE, (0,), 8), (DIFFUSE, (1,), 2))
        ]
        return Plan(starts=tuple(starts))


def test_a_revoked_work_frees_its_device_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._GIVEN, "mover", Mover)
    stopped: list[tuple[int, int]] = []

    def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        if isinstance(event, Stopped):
            stopped.append((event.work_id, now_ns))

    simulation = Simulation(ControllerConfig(policy="mover"), table(), SimConfig(num_devices=2))
    simulation.run([request("a")], [(150_000_000, "a")], observe)
    assert stopped == [(3, 150_000_000), (2, 210_000_000)]


def test_devices_join_with_their_nodes() -> None:
    joined: list[tuple[int, int]] = []

    def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        if isinstance(event, DeviceJoined):
            joined.append((event.device_id, event.node))

    costs = replace(table(), devices_per_node=2)
    Simulation(ControllerConfig(), costs, SimConfig(num_devices=5)).run([request("a")], observe=observe)
    assert joined == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)]


def test_jitter_never_makes_time_run_backwards() -> None:
    requests = [request(str(index), steps=2, slo_s=100) for index in range(60)]
    trace = simulate(requests, num_devices=1, jitter=1.0)
    shares = [(run.end_ns - run.start_ns) / run.steps for run in trace.runs if run.work.stage.name == DIFFUSE]
    assert min(shares) == pytest.approx(0.2 * 0.1 * NS_PER_S)


def test_on_time_includes_the_deadline_itself() -> None:
    ending = simulate([request("a")]).endings[0]
    due = replace(ending, request=replace(ending.request, deadline_ns=ending.finish_ns))
    assert due.on_time
    assert not replace(due, finish_ns=due.finish_ns + 1).on_time
    assert not replace(due, status=Status.CANCELLED).on_time


def test_a_workload_becomes_requests_with_nothing_lost() -> None:
    line = WorkloadRequest(
        id="mine",
        arrival_s=1.5,
        pipeline=PIPELINE,
        height=64,
        width=128,
        frames=2,
        steps=9,
        slo_s=2.0,
        seed=5,
        tenant="acme",
        priority="interactive",
        on_miss=OnMiss.REJECT,
        loras=(UsedLora("ink", 0.5),),
    )
    bare = WorkloadRequest(arrival_s=0.0, pipeline=PIPELINE, height=64, width=64, steps=1)
    assert to_requests([line, bare]) == [
        Request(
            uid="mine",
            pipeline=PIPELINE,
            shape=Shape(64, 128, 2),
            steps=9,
            arrival_ns=1_500_000_000,
            seed=5,
            deadline_ns=3_500_000_000,
            on_miss=OnMiss.REJECT,
            tenant="acme",
            priority="interactive",
            weight=4.0,
            loras=(UsedLora("ink", 0.5),),
        ),
        Request(uid="1", pipeline=PIPELINE, shape=Shape(64, 64), steps=1, arrival_ns=0),
    ]
