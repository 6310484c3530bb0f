"""Models that only some devices serve, simulated: each on its own, and none in the way of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from builders import PIPELINE, promise, request, simulate, table
from tilework.admission.reservation_guard import ReservationGuard
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Accept, Reject, RunWork
from tilework.core.component import Component, LoadSource
from tilework.core.events import (
    DeviceJoined,
    DeviceLost,
    ModelRemoved,
    OutOfMemory,
    Stopped,
    Submitted,
    WorkFinished,
)
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.request import Request, Status
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.work import Start
from tilework.cost.table import CostTable, merged
from tilework.policy.registry import UnknownPolicy, policy_names
from tilework.sim.config import SimConfig
from tilework.sim.fuzz import run_scenario
from tilework.sim.scenarios.scenario import scenario
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace

OTHER = "other"
SERVICE_S = 1.06


def tables(degrees: tuple[int, ...] = (1, 2, 4), **devices: Sequence[int]) -> CostTable:
    """Both pipelines, on these devices."""
    both = merged([table(degrees=degrees), table(degrees=degrees, pipeline=OTHER)])
    return replace(both, devices={pipeline: tuple(ids) for pipeline, ids in devices.items()})


def other(one: Request) -> Request:
    return replace(one, pipeline=OTHER)


def used(trace: Trace) -> dict[str, set[int]]:
    """The devices that each pipeline has run on."""
    found: dict[str, set[int]] = {}
    for run in trace.runs:
        found.setdefault(run.work.stage.pipeline, set()).update(run.work.devices)
    return found


def statuses(trace: Trace) -> dict[str, Status]:
    return {one.request.uid: one.status for one in trace.endings}


@pytest.mark.parametrize(
    "devices", [{PIPELINE: (0,)}, {PIPELINE: (0, 1), OTHER: (1, 2, 3)}, {PIPELINE: (3,), OTHER: (0, 1)}]
)
@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_each_model_runs_on_its_own_devices_only(devices: Mapping[str, Sequence[int]], per_node: int) -> None:
    requests = [
        one
        for index in range(12)
        for one in (
            request(f"a{index}", 0.2 * index, slo_s=6 if index % 2 else None),
            other(request(f"b{index}", 0.2 * index, side=192, slo_s=8 if index % 3 else None)),
        )
    ]
    costs = replace(tables(**devices), devices_per_node=per_node)
    trace = simulate(requests, "tilework", num_devices=4, costs=costs)
    assert set(statuses(trace).values()) == {Status.DONE}
    assert {name: ids <= set(devices.get(name, range(4))) for name, ids in used(trace).items()} == {
        PIPELINE: True,
        OTHER: True,
    }
    assert used(trace)[PIPELINE] == set(devices[PIPELINE]), "all of them are used"


def test_a_backlog_of_one_model_hides_no_request_for_another() -> None:
    """A hundred requests, all due before it, wait for device 0."""
    requests = [request(f"a{index}", slo_s=20) for index in range(100)]
    requests.append(other(request("b", 0.1, slo_s=60)))
    trace = simulate(requests, "tilework", num_devices=2, costs=tables(toy=(0,), other=(1,)))
    ends = {one.request.uid: one.finish_ns for one in trace.endings}
    assert ends["b"] < ns_from_s(0.1 + 1.2)


def controller(costs: CostTable, num_devices: int = 2) -> Controller:
    made = Controller(ControllerConfig(), costs)
    for device_id in range(num_devices):
        made.handle(DeviceJoined(device_id, 0), 0)
    return made


def submitted(made: Controller, one: Request, now_ns: int = 0) -> Any:
    return made.handle(Submitted(one), now_ns)


def test_the_predicted_finish_counts_only_the_jobs_that_may_run_there() -> None:
    made = controller(tables(toy=(0,), other=(1,)))
    for index in range(10):
        submitted(made, request(f"a{index}", slo_s=100))
    etas = {
        uid: next(action.eta_ns for action in submitted(made, one) if isinstance(action, Accept)) / NS_PER_S
        for uid, one in (("b", other(request("b", slo_s=200))), ("a", request("a", slo_s=200)))
    }
    assert etas["b"] == pytest.approx(SERVICE_S, abs=0.1)
    assert etas["a"] == pytest.approx(11 * SERVICE_S, rel=0.1)


def test_a_model_that_all_devices_serve_is_predicted_where_it_ends_first() -> None:
    """Ten jobs wait for device 0; what all serve goes to device 1."""
    made = controller(tables(degrees=(1,), toy=(0,)))
    for index in range(10):
        submitted(made, request(f"a{index}", slo_s=100))
    (accept,) = [one for one in submitted(made, other(request("b", slo_s=200))) if isinstance(one, Accept)]
    assert accept.eta_ns == pytest.approx(ns_from_s(SERVICE_S), rel=0.1)


def test_promises_are_counted_on_the_devices_of_their_models() -> None:
    """Two fit one after the other on a device before 2.6 s, a third does not; another model has its own device."""
    made = controller(tables(degrees=(1,), toy=(0,), other=(1,)))
    answers = [submitted(made, one) for one in (promise("a", 0, 2.6), promise("b", 0, 2.6), promise("c", 0, 2.6))]
    assert [any(isinstance(action, Accept) for action in one) for one in answers] == [True, True, False]
    assert any(isinstance(action, Accept) for action in submitted(made, other(promise("d", 0, 2.6))))
    blocks = {
        job.request.uid: block for job, block in zip(made.tracker.promised(), made.tracker.reserved(), strict=True)
    }
    assert {uid: block.devices for uid, block in blocks.items()} == {"a": (0,), "b": (0,), "d": (1,)}


@pytest.mark.parametrize("seed", range(4))
def test_promises_hold_beside_other_models(seed: int) -> None:
    requests = [
        one
        for index in range(30)
        for one in (
            promise(f"a{index}", 0.4 * index, 2.5 + (index * 7 + seed) % 5),
            other(promise(f"b{index}", 0.3 * index, 3.0 + (index * 5 + seed) % 4)),
            other(request(f"c{index}", 0.3 * index)),
        )
    ]
    trace = simulate(requests, "tilework", num_devices=4, costs=tables(toy=(0, 1), other=(1, 2, 3)), seed=seed)
    kept = [one.on_time for one in trace.endings if one.request.is_promise and one.status is Status.DONE]
    assert all(kept)
    assert len(kept) > 20


def test_while_the_devices_of_a_model_are_down_its_requests_wait_and_others_go_on() -> None:
    made = controller(tables(degrees=(1,), toy=(0,), other=(1,)))
    assert any(isinstance(action, Accept) for action in submitted(made, promise("kept", 0, 60)))
    made.handle(DeviceLost(0, "it was killed"), NS_PER_S)
    waiting = submitted(made, request("a", 1.0), NS_PER_S)
    assert [one.why for one in waiting if isinstance(one, Accept)] == [
        "no device that serves toy is up; the prediction assumes that one is up now"
    ]
    refused = submitted(made, promise("b", 1.0, 60), NS_PER_S)
    assert [one.reason for one in refused if isinstance(one, Reject)] == ["no device that serves toy is up"]
    begun = submitted(made, other(promise("c", 1.0, 3)), NS_PER_S)
    assert {one.work.devices for one in begun if isinstance(one, RunWork)} == {(1,)}
    back = made.handle(DeviceJoined(0, 0), 2 * NS_PER_S)
    assert {one.work.devices for one in back if isinstance(one, RunWork)} == {(0,)}


def test_devices_are_one_pool_again_when_the_model_that_divides_them_is_removed() -> None:
    made = controller(tables(toy=(0,)))
    wide = other(request("b", slo_s=0.9))
    assert {device.pool for device in made.tracker.devices} == {0, 1}
    made.handle(ModelRemoved(PIPELINE), 0)
    assert {device.pool for device in made.tracker.devices} == {0}
    begun = [one.work for one in submitted(made, wide) if isinstance(one, RunWork)]
    assert any(work.devices == (0, 1) for work in begun)


def test_a_device_loads_no_weights_of_what_it_does_not_serve() -> None:
    """All ask for one model. Device 1 is idle, and loads it ahead of need if it serves it."""
    costs = tables(degrees=(1,), toy=(0,), other=(0,))
    graphs = {name: latent_diffusion(name) for name in (PIPELINE, OTHER)}
    specs = {
        name: tuple(replace(spec, components=("denoiser",) if spec.steps else ()) for spec in graph.specs)
        for name, graph in graphs.items()
    }
    costs = replace(
        costs,
        graphs={name: Graph(name, of_one) for name, of_one in specs.items()},
        components={name: {"denoiser": Component(f"weights of {name}", 10)} for name in specs},
        memory_bytes=10,
        load_bytes_per_s={LoadSource.DISK: 100.0, LoadSource.HOST: 100.0},
    )
    requests = [request(f"a{index}", 10.0 * index) for index in range(12)]

    def loads(table: CostTable) -> set[tuple[str, int]]:
        trace = simulate(requests, "tilework", num_devices=2, costs=table)
        return {(load.load.stage.pipeline, load.load.device_id) for load in trace.loads}

    assert loads(costs) == {(PIPELINE, 0)}
    assert loads(replace(costs, devices={OTHER: (0,)})) == {(PIPELINE, 0), (PIPELINE, 1)}, "also in another pool"


def test_a_job_that_fits_only_on_more_of_its_devices_than_are_up_waits_for_them() -> None:
    """Beside it are enough devices, which do not serve it."""
    made = controller(tables(toy=(0, 1)), 4)
    made.handle(DeviceLost(1, "it was killed"), 0)
    (first, *_) = [one.work for one in submitted(made, request("a")) if isinstance(one, RunWork)]
    made.handle(WorkFinished(first.work_id, 10), 10)
    steps = next(work for work in made.tracker.works.values() if work.stage.has_steps)
    made.handle(OutOfMemory(steps.work_id, 0), 20)
    made.handle(Stopped(steps.work_id + 1, 0), 20)
    assert made.tracker.num_parked == 1
    begun = [one.work for one in made.handle(DeviceJoined(1, 0), 30) if isinstance(one, RunWork)]
    assert {work.devices for work in begun if work.stage.has_steps} == {(0, 1)}


def test_a_promised_job_without_a_device_is_not_started_however_late_it_is() -> None:
    made = controller(tables(degrees=(1,), toy=(0,), other=(1,)))
    guard = ReservationGuard(degrees=made.policy.degrees)
    submitted(made, other(promise("b", 0, 60)))
    submitted(made, promise("a", 0, 3))
    made.handle(DeviceLost(0, "it was killed"), 10)
    view, costs = made.tracker, made.costs
    guard.update(view, costs, 20)
    assert guard._known is not None
    late = dict.fromkeys(guard._known.ends_ns, 0)
    guard._known = replace(guard._known, ends_ns=late, spared_ns=dict.fromkeys(guard._known.spared_ns, 0))
    assert {view.jobs[start.job_ids[0]].request.uid for start in guard.forced(view, costs, 20)} <= {"b"}


def test_other_policies_are_refused() -> None:
    costs = tables(toy=(0,))
    for name in policy_names():
        if name != "tilework":
            with pytest.raises(UnknownPolicy, match=f"policy '{name}' gives every device .* 'toy' .* choose tilework"):
                Controller(ControllerConfig(policy=name), costs)


def test_a_work_on_a_device_that_does_not_serve_it_is_a_bug() -> None:
    simulation = Simulation(ControllerConfig(), tables(toy=(0,)), SimConfig(num_devices=2))
    made = simulation.controller
    made.handle(DeviceJoined(1, 0), 0)
    job_of = submitted(made, request("a"))
    assert not [one for one in job_of if isinstance(one, RunWork)], "its device is not up"
    (job,) = made.tracker.jobs.values()
    stage = job.committed.stage
    assert stage is not None
    start = Start(stage=stage, job_ids=(job.job_id,), devices=(1,), num_steps=1, why="")
    with pytest.raises(AssertionError, match="device 1, which does not serve it"):
        made.tracker.commit(start)


@pytest.mark.parametrize("seed", [11, 55, 61, 105, 171, 334, 351])
def test_pools_survive_faults(seed: int) -> None:
    """Seeds that have found mistakes: reservations without devices, and requests of which no device is left."""
    one = scenario(seed, policy="tilework")
    assert one.table.devices
    assert not run_scenario(one).violation


def test_the_invariants_notice_a_work_on_a_wrong_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `check_start`, and with a policy that takes all devices for its own."""
    monkeypatch.setattr("tilework.control.cluster.tracker.check_start", lambda *_: None)
    monkeypatch.setattr("tilework.policy.lookahead.node_table.may_run", lambda *_: True)
    found = [run_scenario(scenario(seed, policy="tilework")).violation for seed in (11, 55, 61, 105, 171, 334)]
    assert any("which does not serve it" in violation for violation in found)
