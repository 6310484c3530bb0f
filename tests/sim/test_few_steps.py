"""Models of few steps, simulated: what a policy loses by few steps is that a step cannot be interrupted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from suite.cases.fewsteps import cut_into, longest_chunk, on_time, requests, staged

from builders import PIPELINE, profile, request, shipped
from stages import DIFFUSE
from tilework.control.controller import ControllerConfig
from tilework.core.request import Request
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace

TABLE = staged(shipped("flux1dev_h100_eager"))
MANY = 28


def simulate(asked: list[Request], table: CostTable, num_devices: int = 8) -> Trace:
    config = SimConfig(num_devices=num_devices)
    return Simulation(ControllerConfig(policy="tilework"), table, config).run(asked)


def served(table: CostTable, steps: int, load: float = 0.6, slack: float = 1.5) -> Trace:
    return simulate(requests(TableCosts(table), 8, 80, steps, load, slack, seed=1), table)


@pytest.mark.parametrize("steps", [4, 8])
def test_few_steps_that_are_cut_fine_keep_as_many_deadlines_as_many_steps(steps: int) -> None:
    many = on_time(served(TABLE, MANY))
    assert on_time(served(cut_into(TABLE, steps, MANY), MANY)) >= many - 2
    assert on_time(served(TABLE, steps)) >= 0.88 * many, "a step is a quarter of a request"


@pytest.mark.parametrize("steps", [4, 8, MANY])
def test_no_run_is_longer_than_a_chunk_or_a_step(steps: int) -> None:
    assert longest_chunk(served(TABLE, steps)) <= 1


@pytest.mark.parametrize("steps", [4, 8])
def test_an_urgent_request_waits_for_one_step_of_a_whole_request_in_one_chunk(steps: int) -> None:
    """All steps of a picture fit into a chunk: it is stopped at the next step."""
    table = profile({128: {1: 0.04}})
    first, urgent = request("first", steps=steps), request("urgent", 0.05, steps=2, slo_s=0.12)
    trace = simulate([first, replace(urgent, pipeline=PIPELINE)], table, num_devices=1)
    chunks = [run for run in trace.runs if run.work.stage.name == DIFFUSE and run.work.job_ids == (0,)]
    assert max(run.work.num_steps for run in chunks) >= min(steps, 4)
    assert trace.endings[1].on_time
