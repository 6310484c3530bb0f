"""A pipeline that is not encode, steps, decode: two encoders that join, two stages with steps, and a last one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from builders import POLICIES, poisson
from tilework.control.controller import ControllerConfig
from tilework.core.cost_row import CostRow
from tilework.core.graph import Graph
from tilework.core.request import OnMiss, Request, Status
from tilework.core.stage import StageSpec, StepShare
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table, table_json
from tilework.sim.config import SimConfig
from tilework.sim.faults import parse_faults
from tilework.sim.fuzz import run_scenario
from tilework.sim.runs import Run
from tilework.sim.scenarios import Scenario
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace

PIPELINE = "toy"
GRAPH = Graph(
    PIPELINE,
    (
        StageSpec(name="decode", inputs=("refined",), outputs=("picture",), sliceable=True),
        StageSpec(
            name="refine", inputs=("latents", "texts"), outputs=("refined",), steps=StepShare(first=0.8), degrees=None
        ),
        StageSpec(
            name="base",
            inputs=("texts", "reference"),
            outputs=("latents",),
            steps=StepShare(last=0.8),
            degrees=None,
            batchable=True,
        ),
        StageSpec(name="encode_text", inputs=("prompt",), outputs=("texts",)),
        StageSpec(name="encode_image", inputs=("image",), outputs=("reference",)),
    ),
)
SECONDS = {"encode_text": 0.01, "encode_image": 0.02, "base": 0.1, "refine": 0.2, "decode": 0.05}
SIDES = (64, 128, 192)


def table() -> CostTable:
    rows = tuple(
        CostRow(
            pipeline=PIPELINE,
            stage=stage.name,
            height=side,
            width=side,
            degree=degree,
            seconds=SECONDS[stage.name] * (side / 128) ** 2 / 1.6 ** (degree.bit_length() - 1),
        )
        for stage in GRAPH.stages
        for side in SIDES
        for degree in ((1, 2, 4) if stage.is_parallel else (1,))
    )
    return CostTable(hardware="toy", rows=rows, graphs={PIPELINE: GRAPH})


def simulate(policy: str, requests: list[Request], **sim: object) -> Trace:
    config = SimConfig(num_devices=4, **sim)  # type: ignore[arg-type]
    return Simulation(ControllerConfig(policy=policy), table(), config).run(requests)


def runs_of(trace: Trace, uid: str) -> list[Run]:
    (job_id,) = (ending.job_id for ending in trace.endings if ending.request.uid == uid)
    return [run for run in sorted(trace.runs, key=lambda run: run.start_ns) if job_id in run.work.job_ids]


def test_a_table_keeps_its_graph() -> None:
    assert parse_table(table_json(table())) == table()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_passes_all_stages_in_order_with_its_share_of_the_steps(policy: str) -> None:
    requests = poisson(12, 1.0, seed=3, slo_s=9.0)
    trace = simulate(policy, requests)
    assert {ending.status for ending in trace.endings} == {Status.DONE}
    for request in requests:
        runs = runs_of(trace, request.uid)
        num_steps = Counter[str]()
        for run in runs:
            num_steps[run.work.stage.name] += run.steps
        base = round(0.8 * request.steps)
        assert num_steps == {
            "encode_text": 1,
            "encode_image": 1,
            "base": base,
            "refine": request.steps - base,
            "decode": 1,
        }
        order = list(dict.fromkeys(run.work.stage.name for run in runs))
        assert order == ["encode_text", "encode_image", "base", "refine", "decode"]


def test_both_stages_with_steps_are_widened_for_a_tight_deadline() -> None:
    alone_s = 0.08 + 8 * 0.1 + 2 * 0.2
    (one,) = poisson(1, 1.0, seed=3, slo_s=alone_s / 1.7)
    trace = simulate("tilework", [one])
    assert trace.endings[0].on_time
    for name in ("base", "refine"):
        assert max(len(run.devices) for run in runs_of(trace, one.uid) if run.work.stage.name == name) > 1


@pytest.mark.parametrize("policy", ["tilework", "edf", "tetriserve"])
def test_promises_hold(policy: str) -> None:
    requests = [replace(one, on_miss=OnMiss.REJECT) for one in poisson(40, 2.0, seed=5, slo_s=6.0, best_effort=0)]
    endings = simulate(policy, requests).endings
    done = [ending for ending in endings if ending.status is Status.DONE]
    assert done
    assert all(ending.on_time for ending in done)
    assert {ending.status for ending in endings} <= {Status.DONE, Status.REJECTED}


@pytest.mark.parametrize("policy", POLICIES)
def test_faults_break_no_invariant(policy: str) -> None:
    """Kills, moves, stops, late messages and lost blobs: each step runs once, in one lineage, for every request."""
    faults = parse_faults(["crash", "hang", "oom", "error", "checkpoint", "doubled", "delayed"])
    for seed in range(3):
        one = Scenario(
            seed=seed,
            controller=ControllerConfig(policy=policy, max_residents=2),
            table=table(),
            config=SimConfig(num_devices=4, seed=seed, jitter=0.05, faults=faults),
            requests=tuple(poisson(25, 1.5, seed=seed, slo_s=8.0)),
            cancels=((2_000_000_000, "3"),),
        )
        result = run_scenario(one)
        assert not result.violation, f"seed {seed}: {result.violation} {result.where}"


def test_the_time_of_a_request_is_that_of_all_its_stages() -> None:
    costs = TableCosts(table())
    (one,) = poisson(1, 1.0, seed=3)
    trace = simulate("fixed-sp1", [one])
    expected_s = sum(costs.work_ns(stage, (one,), 1, num_steps) / 1e9 for stage, num_steps in costs.start(one).pieces())
    assert (trace.endings[0].finish_ns - one.arrival_ns) / 1e9 == pytest.approx(expected_s, rel=0.02)
