"""Requests for videos, simulated: they take a CPU slot at the end, and requests for pictures of a clip do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import PIPELINE, poisson, request
from tilework.control.controller import ControllerConfig
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import ResultKind
from tilework.core.request import OnMiss, Request, Status, cost_key
from tilework.core.time import ns_from_s
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table, table_json
from tilework.pipelines.video.export import EXPORT
from tilework.sim.config import SimConfig
from tilework.sim.faults import parse_faults
from tilework.sim.fuzz import run_scenario
from tilework.sim.scenarios.scenario import Scenario
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace

NUM_DEVICES = 2
GRAPH = Graph(PIPELINE, (*latent_diffusion("").specs, EXPORT))
SECONDS = {"encode": 0.01, "diffuse": 0.1, "decode": 0.05, EXPORT.name: 0.3}


def table(**changes: float) -> CostTable:
    """The seconds of each stage, or of a step, but for these changes."""
    rows = tuple(
        CostRow(
            pipeline=PIPELINE,
            stage=stage.name,
            height=side,
            width=side,
            degree=1,
            seconds={**SECONDS, **changes}[stage.name] * (side / 128) ** 2,
        )
        for stage in GRAPH.stages
        for side in (64, 128, 192)
    )
    return CostTable(hardware="toy", rows=rows, graphs={PIPELINE: GRAPH})


def mixed(num: int, rate_per_s: float, seed: int, **fields: object) -> list[Request]:
    """Every second one is for a video."""
    results = (ResultKind.VIDEO, ResultKind.PIXELS)
    return [
        replace(one, result=results[index % 2], **fields)  # type: ignore[arg-type]
        for index, one in enumerate(poisson(num, rate_per_s, seed=seed, slo_s=5.0, best_effort=0))
    ]


def simulate(policy: str, requests: list[Request], costs: CostTable) -> Trace:
    return Simulation(ControllerConfig(policy=policy), costs, SimConfig(num_devices=NUM_DEVICES)).run(requests)


@pytest.mark.parametrize("policy", ["tilework", "edf", "tetriserve", "fixed-sp1"])
def test_videos_alone_take_the_slot(policy: str) -> None:
    requests = mixed(16, 1.0, seed=2)
    trace = simulate(policy, requests, table())
    assert {ending.status for ending in trace.endings} == {Status.DONE}
    videos = {ending.job_id for ending in trace.endings if ending.request.result is ResultKind.VIDEO}
    exports = [run for run in trace.runs if run.work.stage.name == EXPORT.name]
    assert sorted(job_id for run in exports for job_id in run.work.job_ids) == sorted(videos)
    assert all(run.devices == (NUM_DEVICES,) for run in exports), "the CPU slot comes after the devices"


@pytest.mark.parametrize("export_s", [0.3, 2.0])
def test_promises_of_videos_hold_also_where_the_slot_is_scarce(export_s: float) -> None:
    for seed in range(4):
        endings = simulate("tilework", mixed(30, 2.0, seed, on_miss=OnMiss.REJECT), table(export=export_s)).endings
        done = [ending for ending in endings if ending.status is Status.DONE]
        assert {ending.request.result for ending in done} == set(ResultKind)
        assert all(ending.on_time for ending in done)
        assert {ending.status for ending in endings} <= {Status.DONE, Status.REJECTED}


@pytest.mark.parametrize("policy", ["tilework", "edf"])
def test_a_promise_that_is_due_first_leaves_a_slot_to_one_that_has_less_time(policy: str) -> None:
    """One slot is free at 0.5 s and one at 2 s. `long` takes 4.5 s of 5.8 s; `due first` has time until 2 s, too."""

    def video(uid: str, arrival_s: float, side: int, slo_s: float | None = None) -> Request:
        on_miss = OnMiss.BEST_EFFORT if slo_s is None else OnMiss.REJECT
        asked = request(uid, arrival_s, side=side, steps=4, slo_s=slo_s, on_miss=on_miss)
        return replace(asked, result=ResultKind.VIDEO)

    others = [video("short", 0.0, 64), video("middle", 0.0, 128)]
    promises = [video("long", 0.12, 192, slo_s=5.8), video("due first", 0.13, 128, slo_s=5.1)]
    config = SimConfig(num_devices=4, slots_per_node=2)
    costs = table(diffuse=0.01, export=2.0)
    trace = Simulation(ControllerConfig(policy=policy), costs, config).run([*others, *promises])
    assert all(ending.on_time for ending in trace.endings)
    assert {ending.status for ending in trace.endings} == {Status.DONE}


STEP_S = 3.0
LONG = request("long", 0.0, steps=20, result=ResultKind.VIDEO)


def test_chunks_are_single_steps_where_a_step_takes_seconds() -> None:
    """Chunks are of a time, so an urgent request waits for the step that runs, and no longer."""
    urgent = request("urgent", 10.0, side=64, steps=2, slo_s=8.0)
    costs, config = table(diffuse=STEP_S), SimConfig(num_devices=1)
    trace = Simulation(ControllerConfig(policy="tilework"), costs, config).run([LONG, urgent])
    long, short = (ending.job_id for ending in trace.endings)
    chunks = [run for run in trace.runs if run.work.stage.has_steps and run.work.job_ids == (long,)]
    assert [run.work.num_steps for run in chunks] == [1] * LONG.steps
    first_ns = min(run.start_ns for run in trace.runs if run.work.job_ids == (short,))
    assert first_ns <= urgent.arrival_ns + ns_from_s(STEP_S + 0.1)
    assert all(ending.on_time for ending in trace.endings)
    quick = Simulation(ControllerConfig(policy="tilework"), table(diffuse=0.01), config).run([LONG])
    assert max(run.work.num_steps for run in quick.runs) > 1, "quick steps share a chunk"


def test_a_client_that_goes_away_costs_the_step_that_runs() -> None:
    costs, config = table(diffuse=STEP_S), SimConfig(num_devices=1)
    gone_ns = ns_from_s(10.0)
    trace = Simulation(ControllerConfig(policy="tilework"), costs, config).run([LONG], cancels=[(gone_ns, "long")])
    assert trace.endings[0].status is Status.CANCELLED
    assert gone_ns < max(run.end_ns for run in trace.runs) <= gone_ns + ns_from_s(STEP_S)


def test_faults_break_no_invariant() -> None:
    faults = parse_faults(["crash", "hang", "oom", "error", "checkpoint", "doubled", "delayed"])
    for seed in range(2):
        one = Scenario(
            seed=seed,
            controller=ControllerConfig(policy="tilework", max_residents=2),
            table=table(),
            config=SimConfig(num_devices=NUM_DEVICES, seed=seed, jitter=0.05, faults=faults),
            requests=tuple(mixed(20, 1.5, seed)),
            cancels=((2_000_000_000, "3"),),
        )
        result = run_scenario(one)
        assert not result.violation, f"seed {seed}: {result.violation} {result.where}"


def test_a_video_costs_the_time_of_its_last_stage_more() -> None:
    costs = TableCosts(table())
    (pixels,) = poisson(1, 1.0, seed=3)
    video = replace(pixels, result=ResultKind.VIDEO)
    stages = [[stage.name for stage in costs.start(one).itinerary.stages] for one in (pixels, video)]
    assert stages[1] == [*stages[0], EXPORT.name]
    assert cost_key(pixels) != cost_key(video), "what is known of one does not hold for the other"
    finish_s = [simulate("fixed-sp1", [one], table()).endings[0].finish_ns / 1e9 for one in (pixels, video)]
    stage = GRAPH.stage(EXPORT.name)
    assert finish_s[1] - finish_s[0] == pytest.approx(costs.work_ns(stage, (video,), 1) / 1e9, rel=0.05)
    assert parse_table(table_json(table())) == table()
