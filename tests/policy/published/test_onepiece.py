"""OnePiece: dispatch, fast reject, and instances that change their stage."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Accept, Action, Place
from tilework.core.component import Component, LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.events import Cancelled, DeviceJoined, Event, ModelRemoved, Submitted
from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import StageSpec, StepShare
from tilework.core.request import OnMiss, Request, Shape, Status
from tilework.core.time import NS_PER_S, ns_from_s, s_from_ns
from tilework.core.work import NewPlacement
from tilework.cost.table import CostTable, graphs_of
from tilework.cost.table_costs import TableCosts
from tilework.policy.placement.roles import Role
from tilework.policy.placement.utilisation import UtilisationRule
from tilework.policy.published.onepiece.dispatch import OnePieceDispatch
from tilework.policy.published.onepiece.policy import Claim, OnePiece, RateLimit, RequestMonitor
from tilework.policy.published.onepiece.services import Service, Services
from tilework.policy.published.onepiece.traffic import Mode
from tilework.sim.config import SimConfig
from tilework.sim.faults import Fault, Faults
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace

LITERAL = RateLimit(headroom=1.0, burst_ns=0)
X, Y = "64x64", "128x128"


def workflow(x_s: float, y_s: float, pipeline: str = "w", degrees: tuple[int, ...] = (1,)) -> CostTable:
    """Two stages, which take this long at 64 px; at 128 px the first takes a quarter, and the second as long."""
    graph = Graph(
        pipeline,
        (
            StageSpec(name="x", inputs=("prompt",), outputs=("a",)),
            StageSpec(name="y", inputs=("a",), outputs=("b",), steps=StepShare(), degrees=None),
        ),
    )
    rows = [
        CostRow(pipeline=pipeline, stage=stage, height=side, width=side, degree=degree, seconds=seconds / degree)
        for stage, side, seconds in (("x", 64, x_s), ("x", 128, x_s / 4), ("y", 64, y_s), ("y", 128, y_s))
        for degree in (degrees if stage == "y" else (1,))
    ]
    return CostTable(hardware="toy", rows=tuple(rows), graphs=graphs_of(graph), devices_per_node=max(degrees))


def every(period_s: float, num: int, side: int = 64, begin_s: float = 0.0, pipeline: str = "w") -> list[Request]:
    return [
        Request(
            uid=f"{pipeline}-{begin_s:g}-{index}",
            pipeline=pipeline,
            shape=Shape(side, side),
            steps=1,
            arrival_ns=ns_from_s(begin_s + index * period_s),
        )
        for index in range(num)
    ]


def poisson(rate_per_s: float, num: int, seed: int) -> list[Request]:
    random, at_s, found = Random(seed), 0.0, []
    for one in every(0.0, num):
        at_s += random.expovariate(rate_per_s)
        found.append(replace(one, arrival_ns=ns_from_s(at_s)))
    return found


def run(
    policy: OnePieceDispatch,
    table: CostTable,
    requests: Sequence[Request],
    num_devices: int,
    faults: Faults | None = None,
) -> tuple[Trace, list[tuple[float, NewPlacement]]]:
    """The trace, and the placements with their times in seconds."""
    placements: list[tuple[float, NewPlacement]] = []

    def watch(_: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        placements.extend((s_from_ns(now_ns), one.placement) for one in actions if isinstance(one, Place))

    simulation = Simulation(
        ControllerConfig(policy="onepiece"),
        table,
        SimConfig(num_devices=num_devices, faults=faults or Faults()),
        make_controller=lambda config, costs: Controller(config, costs, policy=replace(policy)),
    )
    return simulation.run(sorted(requests, key=lambda one: one.arrival_ns), observe=watch), placements


def sizes(placement: NewPlacement) -> Counter[str]:
    found = Counter[str]()
    for group, name in placement.groups:
        found[name] += len(group)
    return found


# Theorem 1.


@pytest.mark.parametrize(("k", "m"), [(1, 3), (2, 6)])
def test_the_examples_of_section_5(k: int, m: int) -> None:
    """T_X = 4 s and T_Y = 12 s: X accepts a request every 4 / K s, and Y has one done every 4 / K s, 16 s later."""
    trace, placements = run(OnePiece(limit=LITERAL), workflow(4, 12), every(4 / k, 40), k + m)
    assert sizes(placements[-1][1]) == {"E": k, "D": m}
    assert all(one.status is Status.DONE for one in trace.endings)
    assert all(one.latency_ns == pytest.approx(16 * NS_PER_S, abs=NS_PER_S // 20) for one in trace.endings)


@pytest.mark.parametrize(("k", "m"), [(1, 3), (2, 6)])
def test_more_than_k_over_t_is_refused(k: int, m: int) -> None:
    """Twice the rate: every second request is refused at once, and the others are as fast as before."""
    trace, _ = run(OnePiece(limit=LITERAL), workflow(4, 12), every(2 / k, 80), k + m)
    done = [one for one in trace.endings if one.status is Status.DONE]
    assert len(done) == pytest.approx(40, abs=1)
    assert all(one.latency_ns < (16 + 4 - 4 / k + 0.1) * NS_PER_S for one in done)  # Of K at once all but one may wait.
    refused = [one for one in trace.endings if one.status is Status.REJECTED]
    assert all(one.finish_ns == one.request.arrival_ns for one in refused)
    assert "more is asked of E than its" in refused[0].reason


@pytest.mark.parametrize(("k", "x_s", "y_s", "m"), [(1, 4, 12, 3), (3, 4, 7, 6), (2, 3, 11, 8), (5, 2, 2.5, 7)])
def test_output_keeps_up_with_input(k: int, x_s: float, y_s: float, m: int) -> None:
    """Two minutes at K / T_X with as many instances as Theorem 1 asks for: output is input, and no queue grows.

    But where M T_X = K T_Y there is no time for the hop between the stages, which takes 2 ms each time.
    """
    requests = every(x_s / k, int(120 * k / x_s))
    trace, _ = run(OnePiece(limit=LITERAL, moves=False), workflow(x_s, y_s), requests, k + m)
    assert all(one.status is Status.DONE for one in trace.endings)
    waits_ns = [one.latency_ns - (x_s + y_s) * NS_PER_S for one in trace.endings]
    assert max(waits_ns[-k:]) < 0.05 * NS_PER_S


def test_one_instance_fewer_falls_behind() -> None:
    policy = OnePieceDispatch(moves=False)
    trace, _ = run(policy, workflow(4, 12), every(4, 100), 3)
    waits_s = [s_from_ns(one.latency_ns) - 16 for one in trace.endings]
    assert waits_s[-1] > waits_s[49] > waits_s[0] + 60


# The request monitor.

SERVICE = Service((Role.D,), (), "D")


def accepted(limit: RateLimit, requests: Sequence[Request], num_workers: int, run_s: float) -> int:
    monitor, num = RequestMonitor(limit), 0
    claims = {SERVICE: Claim(ns_from_s(run_s), num_workers, ns_from_s(run_s))}
    for one in requests:
        if monitor.refusal(one, claims, one.arrival_ns) is None:
            monitor.accept(one, claims, one.arrival_ns)
            num += 1
    return num


@pytest.mark.parametrize("num_proxies", [1, 2, 4])
def test_proxies_share_the_rate(num_proxies: int) -> None:
    """Eight workers with a second each, for 250 s, at three times that: together the proxies admit 8 per second."""
    assert accepted(replace(LITERAL, num_proxies=num_proxies), poisson(24, 12_000, seed=1), 8, 1.0) == pytest.approx(
        4000, rel=0.04
    )


def test_as_many_at_once_as_workers() -> None:
    assert accepted(LITERAL, every(0, 20), 8, 1.0) == 8
    assert accepted(replace(LITERAL, depth=2.0), every(0, 20), 8, 1.0) == 16
    assert accepted(replace(LITERAL, burst_ns=3 * NS_PER_S), every(0, 40), 8, 1.0) == 25


def test_a_request_may_come_when_the_refusal_says() -> None:
    claims = {SERVICE: Claim(NS_PER_S, 1, NS_PER_S)}
    monitor = RequestMonitor(RateLimit(burst_ns=0))
    first, second = every(0, 2)
    monitor.accept(first, claims, 0)
    refusal = monitor.refusal(second, claims, 0)
    assert refusal is not None
    assert refusal.retry_ns is not None
    assert monitor.refusal(second, claims, refusal.retry_ns - 2) is not None
    assert monitor.refusal(second, claims, refusal.retry_ns) is None


def test_the_slowest_service_sets_the_rate() -> None:
    """Refused by the second stage, which could do half of what the first can."""
    policy = OnePiece(limit=LITERAL, moves=False)
    trace, _ = run(policy, workflow(4, 12), every(4, 60), 3)  # One for X, two for Y: one request in 6 s.
    assert sum(one.status is Status.DONE for one in trace.endings) == pytest.approx(40, abs=2)
    assert all("asked of D" in one.reason for one in trace.endings if one.status is Status.REJECTED)


def test_promised_requests_are_refused_too() -> None:
    promised = [
        replace(one, on_miss=OnMiss.REJECT, deadline_ns=one.arrival_ns + 500 * NS_PER_S) for one in every(2, 20)
    ]
    trace, _ = run(OnePiece(limit=LITERAL), workflow(4, 12), promised, 4)
    done = [one for one in trace.endings if one.status is Status.DONE]
    assert all(one.on_time for one in done)
    assert 0 < len(done) < 20


# Dispatch.


def test_requests_are_handed_on_in_turn() -> None:
    """Each finds all of them idle."""
    trace, _ = run(OnePiece(moves=False), workflow(1, 3), every(4.5, 12), 4)
    devices = [one.devices for one in sorted(trace.runs, key=lambda one: one.start_ns) if one.work.stage.name == "y"]
    assert devices == [(1,), (2,), (3,)] * 4


def test_in_turn_waits_where_others_are_idle() -> None:
    """Every second request is long: in turn, all of these go to one of two instances. Any idle one is better."""
    graph = workflow(0.01, 1)
    rows = [replace(row, seconds=9.0) if row.stage == "y" and row.height == 64 else row for row in graph.rows]
    mixed = [replace(one, shape=Shape(side, side)) for one, side in zip(every(5.5, 20), (64, 128) * 10, strict=True)]
    waits = {}
    for in_turn in (True, False):
        policy = OnePieceDispatch(in_turn=in_turn, moves=False)
        trace, _ = run(policy, replace(graph, rows=tuple(rows)), mixed, 3)
        waits[in_turn] = sum(one.latency_ns for one in trace.endings)
    assert waits[False] <= waits[True]


@pytest.mark.parametrize(("mode", "widths"), [(Mode.COLLABORATION, {4}), (Mode.INDIVIDUAL, {1}), (Mode.EFFICIENT, {4})])
def test_modes(mode: Mode, widths: set[int]) -> None:
    """Steps that gain by each device: all four of a node, or one."""
    table = workflow(1, 8, degrees=(1, 2, 4))
    trace, _ = run(OnePiece(mode=mode), table, every(4, 6), 8)
    assert {len(one.devices) for one in trace.runs if one.work.stage.name == "y"} == widths
    assert {len(one.devices) for one in trace.runs if one.work.stage.name == "x"} == {1}


def test_a_wide_request_is_not_overtaken_for_ever() -> None:
    """One that needs all four workers of the only instance, among many that need one: the instance is held for it."""
    table = workflow(0.01, 4, degrees=(1, 2, 4))
    rows = [replace(row, seconds=4.0) if row.height == 128 else row for row in table.rows]
    wide = every(0, 1, begin_s=3)
    narrow = every(0.9, 60, side=128)
    policy = OnePieceDispatch(moves=False)
    trace, _ = run(policy, replace(table, rows=tuple(rows)), [*narrow, *wide], 8)
    (ending,) = [one for one in trace.endings if one.request.uid == wide[0].uid]
    assert ending.latency_ns < 12 * NS_PER_S


# Services.


def with_weights(pipeline: str, digests: Sequence[str]) -> CostTable:
    """The workflow, each of whose stages has one of these components."""
    table = workflow(1, 1, pipeline)
    graph = table.graph(pipeline)
    specs = tuple(replace(one, components=(one.name,)) for one in graph.specs)
    parts = {spec.name: Component(digest, 1000) for spec, digest in zip(specs, digests, strict=True)}
    return replace(
        table,
        graphs={pipeline: Graph(pipeline, specs)},
        components={pipeline: parts},
        load_bytes_per_s={LoadSource.DISK: 1e6},
    )


def two_pipelines() -> CostTable:
    """Two workflows that share the weights of their first stage."""
    one, two = with_weights("v", ("shared", "a")), with_weights("w", ("shared", "b"))
    return replace(
        one,
        rows=one.rows + two.rows,
        graphs={**one.graphs, **two.graphs},
        components={**one.components, **two.components},
    )


@pytest.mark.parametrize(
    ("num_instances", "names"),
    [(3, ["E of v", "D of v", "D of w"]), (2, ["E", "D"]), (1, ["all stages"])],
)
def test_as_many_services_as_instances_allow(num_instances: int, names: Sequence[str]) -> None:
    services, costs = Services(), TableCosts(two_pipelines())
    services.set_instances(num_instances)
    services.note("v", costs)
    services.note("w", costs)
    assert [str(one) for one in services.all()] == names


# Utilisation.


def shifting() -> list[Request]:
    """For ten minutes requests whose first stage takes 4 s, then for twenty some that take 1 s there, four times as
    many. Their second stage takes 4 s.
    """
    return [*every(2.2, 270), *every(0.9, 1300, side=128, begin_s=600)]


@pytest.mark.slow
def test_instances_follow_the_load() -> None:
    """Eight devices: first half of them for each stage; later a fifth of the work is in the first stage."""
    trace, placements = run(OnePiece(rule=UtilisationRule(window_ns=120 * NS_PER_S)), workflow(4, 4), shifting(), 8)
    first, last = sizes(placements[0][1]), sizes(placements[-1][1])
    assert first == {"E": 4, "D": 4}
    assert last["D"] > 5
    (share,) = re.findall(r"D was asked for (\d+)% of its time", placements[-1][1].why)
    assert int(share) > 100  # What was refused counts.
    times_s = [at_s for at_s, _ in placements if at_s > 0]
    assert all(after - before >= 120 for before, after in pairwise(times_s))
    assert len(times_s) <= 3  # It comes to rest.
    fixed, _ = run(OnePiece(moves=False), workflow(4, 4), shifting(), 8)
    assert _num_done(trace) > 1.1 * _num_done(fixed)


def _num_done(trace: Trace) -> int:
    return sum(one.status is Status.DONE for one in trace.endings)


def test_a_service_without_instances_gets_one_at_once() -> None:
    """A second pipeline comes after the first window, when all devices are for the first."""
    requests = [*every(2, 200, pipeline="v"), *every(2, 20, begin_s=400.5, pipeline="w")]
    trace, placements = run(OnePiece(), two_pipelines(), requests, 6)
    assert _num_done(trace) == 220
    at_s, placement = next((at_s, one) for at_s, one in placements if at_s > 300)
    assert at_s < 403
    assert sizes(placement)["D of w"] == 1
    assert "a request waits for D of w, which has no instance" in placement.why


def test_a_model_that_is_removed() -> None:
    """Its requests were among those that instances are divided by, and its instances go to others."""
    controller = Controller(ControllerConfig(policy="onepiece"), two_pipelines())
    for device_id in range(3):
        controller.handle(DeviceJoined(device_id, 0), 0)
    (first,) = every(0, 1, pipeline="v")
    controller.handle(Submitted(first), 0)
    controller.handle(Cancelled(first.uid, "test"), 1)
    controller.handle(ModelRemoved("v"), 2)
    for one in every(10, 3, begin_s=301):
        actions = controller.handle(Submitted(one), one.arrival_ns)
        assert any(isinstance(action, Accept) for action in actions)


def test_devices_that_are_lost_and_come_back() -> None:
    """Nothing is lost, and what the lost ones were for goes on."""
    faults = Faults({"crash": Fault("crash", 0.03, 5.0)})
    policy = OnePieceDispatch(rule=UtilisationRule(window_ns=30 * NS_PER_S))
    trace, placements = run(policy, workflow(1, 3), every(1.5, 150), 6, faults)
    assert _num_done(trace) == 150
    later = [one for at_s, one in placements if at_s > 30 and "devices have joined or were lost" in one.why]
    assert later
    assert all(sizes(one)["idle"] == 0 for one in later)


def test_a_log_replays_with_placements_and_refusals() -> None:
    """The simulation rebuilds its controller from its log again and again, and compares every action."""
    faults = Faults({"replay": Fault("replay", 0.05, 1.0)})
    trace, placements = run(
        OnePiece(rule=UtilisationRule(window_ns=60 * NS_PER_S)), workflow(4, 4), shifting()[:300], 8, faults
    )
    assert placements
    assert any(one.status is Status.REJECTED for one in trace.endings)
