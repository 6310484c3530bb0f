"""The simulated driver and the policies on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import PIPELINE, poisson, request, simulate, table
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Action
from tilework.core.events import Event, GpuJoined, Submitted
from tilework.core.interfaces import Admitted, ClusterView, CostModel, Refused
from tilework.core.request import OnMiss, Request, Shape, Status
from tilework.core.time import NS_PER_S
from tilework.core.work import DECODE, DIFFUSE, Plan, StageId, Work
from tilework.core.workload import WorkloadRequest
from tilework.policy import registry
from tilework.policy.admission import EtaAdmission, service_time_ns, start_ns
from tilework.policy.fixed import FixedDegreeOne
from tilework.policy.registry import UnknownPolicy, make_policy, policy_names
from tilework.sim.device import ModelledGpu
from tilework.sim.simulation import SimConfig, Simulation, Trace
from tilework.sim.workload import to_requests

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


# Modelled devices.


def work(work_id: int, job_id: int = 0, stage: str = DIFFUSE, num_steps: int = 4) -> Work:
    return Work(
        work_id=work_id,
        stage=StageId(PIPELINE, stage),
        job_ids=(job_id,),
        attempts=(1,),
        gpus=(0,),
        num_steps=num_steps,
        why="a test",
    )


@pytest.mark.parametrize(
    ("now_ns", "steps", "end_ns"),
    [(100, 1, 110), (109, 1, 110), (110, 2, 120), (111, 2, 120), (125, 3, 130), (139, 4, 143), (50, 1, 110)],
)
def test_a_stop_takes_effect_at_the_next_step_boundary(now_ns: int, steps: int, end_ns: int) -> None:
    """Four steps of 10 ns from 100 on; the last takes the 3 ns that do not divide by four."""
    gpu = ModelledGpu(gpu=0)
    gpu.enqueue(work(1), 43)
    gpu.begin_next(100)
    run = gpu.stop(1, now_ns)
    assert run is not None
    assert (run.start_ns, run.end_ns, run.steps, run.stopped) == (100, end_ns, steps, True)
    assert gpu.running is run
    assert gpu.stop(1, now_ns) is None, "once is enough"


def test_a_stage_without_steps_runs_to_its_end() -> None:
    gpu = ModelledGpu(gpu=0)
    gpu.enqueue(work(1, stage="encode", num_steps=1), 40)
    run = gpu.begin_next(0)
    assert gpu.stop(1, 10) is None
    assert gpu.running is run


def test_a_revoked_work_takes_no_time_and_a_stop_for_nobody_does_nothing() -> None:
    gpu = ModelledGpu(gpu=0)
    assert gpu.begin_next(0) is None
    for work_id in (1, 2, 3):
        gpu.enqueue(work(work_id), 40)
    gpu.begin_next(0)
    assert gpu.begin_next(5) is None, "one at a time"
    assert gpu.stop(2, 5) is None
    assert gpu.stop(9, 5) is None
    gpu.end()
    revoked = gpu.begin_next(40)
    assert revoked is not None
    assert (revoked.work.work_id, revoked.end_ns, revoked.steps, revoked.stopped) == (2, 40, 0, True)
    gpu.end()
    third = gpu.begin_next(40)
    assert third is not None
    assert (third.work.work_id, third.end_ns, third.steps, third.stopped) == (3, 80, 4, False)


def test_a_work_waits_for_the_state_of_its_job_once() -> None:
    gpu = ModelledGpu(gpu=0)
    gpu.expect_state(7, 500)
    for work_id in (1, 2):
        gpu.enqueue(work(work_id, job_id=7), 40)
    starts = []
    for now_ns in (100, 200):  # The second time is earlier than the arrival: it must not be waited for again.
        run = gpu.begin_next(now_ns)
        assert run is not None
        starts.append(run.start_ns)
        gpu.end()
    assert starts == [500, 200]


def test_a_state_that_arrived_long_ago_is_not_waited_for() -> None:
    gpu = ModelledGpu(gpu=0)
    gpu.expect_state(7, 500)
    gpu.enqueue(work(1, job_id=7), 40)
    run = gpu.begin_next(800)
    assert run is not None
    assert (run.start_ns, run.end_ns) == (800, 840)


def test_a_state_leaves_after_its_own_work_or_between_two_steps_of_anothers() -> None:
    gpu = ModelledGpu(gpu=0)
    assert gpu.state_ready_ns(8, 90) == 90
    gpu.enqueue(work(1, job_id=7), 40)
    gpu.begin_next(100)
    assert gpu.state_ready_ns(7, 115) == 140
    assert gpu.state_ready_ns(8, 115) == 120
    gpu.end()
    gpu.enqueue(work(2, job_id=7, stage=DECODE, num_steps=1), 40)
    gpu.begin_next(140)
    assert gpu.state_ready_ns(8, 150) == 180
    gpu.end()
    for work_id in (3, 4):
        gpu.enqueue(work(work_id, job_id=7), 40)
    gpu.begin_next(200)
    for work_id in (3, 4):
        gpu.stop(work_id, 215)
    assert gpu.state_ready_ns(8, 216) == 220, "when the step at which the work stops has ended"
    gpu.end()
    gpu.begin_next(220)
    assert gpu.state_ready_ns(8, 220) == 220, "a revoked work delays nobody"


def test_what_a_device_and_an_answer_lose_is_added() -> None:
    one = request("a", steps=2, slo_s=9)  # Three works: encode, one chunk of two steps, decode.
    config = SimConfig(num_gpus=1, dispatch_ns=1000, result_ns=70)
    (ending,) = Simulation(ControllerConfig(), table(), config).run([one]).endings
    plain = simulate([one], num_gpus=1).endings[0].finish_ns
    assert ending.finish_ns == plain + 3 * 1000 + 70


def test_a_moved_job_waits_until_its_state_has_arrived() -> None:
    """The long job is displaced on one device and goes on on the other as soon as that has room."""
    requests = [
        request("blocker", 0.0, steps=12, slo_s=1.6),
        request("long", 0.0, steps=30, slo_s=60),
        request("urgent", 0.15, steps=20, slo_s=2.4),
    ]
    config = SimConfig(num_gpus=2)
    trace = Simulation(ControllerConfig(), table(decode_s=0.0001), config).run(requests)
    blocking, moving = ([run for run in trace.runs if run.work.job_ids == (job_id,)] for job_id in (0, 1))
    (arrived,) = [after for before, after in pairwise(moving) if before.work.gpus != after.work.gpus]
    assert blocking[-1].work.gpus == arrived.work.gpus
    # It is told to move when the blocker's last steps have ended, and leaves at the next boundary of the urgent steps.
    assert blocking[-2].end_ns == 1_210_000_000
    assert arrived.start_ns == 1_220_000_000 + 2_000_000


@dataclass(frozen=True)
class Sleeper:
    """Does nothing in the first second, then what `fixed-sp1` does."""

    def urgency_ns(self, request: Request, set_aside: bool) -> int:
        return request.arrival_ns

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        return Plan(wake_ns=NS_PER_S) if now_ns < NS_PER_S else FixedDegreeOne().plan(view, costs, now_ns)


def test_a_policy_is_woken_when_it_asked_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._REGISTRY, "sleeper", Sleeper)
    (ending,) = simulate([request("a")], "sleeper").endings
    assert ending.finish_ns == pytest.approx((1 + SERVICE_S) * NS_PER_S, abs=10)


def test_devices_are_told_their_nodes() -> None:
    joined: list[tuple[int, int]] = []

    def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        if isinstance(event, GpuJoined):
            joined.append((event.gpu, event.node))

    costs = replace(table(), gpus_per_node=2)
    Simulation(ControllerConfig(), costs, SimConfig(num_gpus=5)).run([request("a")], observe=observe)
    assert joined == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)]


def test_jitter_never_makes_time_run_backwards() -> None:
    requests = [request(str(index), steps=2, slo_s=100) for index in range(60)]
    trace = simulate(requests, num_gpus=1, jitter=1.0)
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
        priority=3,
        on_miss=OnMiss.REJECT,
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
            priority=3,
        ),
        Request(uid="1", pipeline=PIPELINE, shape=Shape(64, 64), steps=1, arrival_ns=0),
    ]
