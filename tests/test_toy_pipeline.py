"""A made-up pipeline, simulated and live: two inputs that join, two stages with steps, a CPU slot, and a last stage.

    read ─────────────┐
                      ├──► sketch (steps) ──► refine (steps) ──► develop
    draw (CPU slot) ──┘

It is Stable Diffusion 3 cut elsewhere: `draw` makes the initial noise, `sketch` and `refine` make half of the steps
each. So its picture is the stock one, bit for bit. Nothing but this file knows of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilework
import tiny
from builders import FEW_POLICIES, POLICIES, poisson
from quick import quick
from runtime.rig import PingPong, Rig, assert_nothing_is_left, kill
from tilework.control.controller import ControllerConfig
from tilework.control.log import replay
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import DeviceKind, StageSpec, StepShare
from tilework.core.model import ModelSource
from tilework.core.request import OnMiss, Request, Status, Terms
from tilework.core.time import NS_PER_S
from tilework.core.wire.spec import Spec
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table, table_json
from tilework.pipelines.families.latent_state import LatentState
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.family import Values
from tilework.pipelines.staged import one_by_one
from tilework.policy import registry
from tilework.runtime.ticket import Outcome, Ticket
from tilework.sim.config import SimConfig
from tilework.sim.faults import parse_faults
from tilework.sim.fuzz import run_scenario
from tilework.sim.runs import Run
from tilework.sim.scenarios.scenario import Scenario
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace
from waiting import until

PIPELINE = "toy"
HALF = 0.5


class Toy(StableDiffusion3):
    """The stock pipeline with other cuts. Its sampler must be deterministic, and its `begin_index` settable."""

    stages = (
        StageSpec(name="develop", inputs=("refined",), outputs=("picture",), sliceable=True),
        StageSpec(
            name="refine",
            inputs=("sketched", "conditioning"),
            outputs=("refined",),
            steps=StepShare(first=HALF),
            degrees=None,
        ),
        StageSpec(
            name="sketch",
            inputs=("conditioning", "noise"),
            outputs=("sketched",),
            steps=StepShare(last=HALF),
            degrees=None,
            batchable=True,
        ),
        StageSpec(name="read", inputs=("prompt",), outputs=("conditioning",)),
        StageSpec(name="draw", outputs=("noise",), device_kind=DeviceKind.CPU),
    )

    def __init__(self, pipeline: Any, name: str, overrides: Mapping[str, Any], library: str) -> None:
        super().__init__(pipeline, name, overrides, library)
        self._at_once = {
            "read": one_by_one(self._run_encode),
            "draw": one_by_one(self._run_draw),
            "develop": self._run_develop,
        }

    def _run_draw(self, spec: Spec, values: Values) -> Values:
        return {"noise": super().begin("sketch", spec, self._run_encode(spec, values)).latents}

    def _run_develop(self, specs: Sequence[Spec], values: Sequence[Values], sliced: bool) -> list[Values]:
        return self._run_decode(specs, [{"latents": one["refined"]} for one in values], sliced)

    def begin(self, stage: str, spec: Spec, values: Values) -> LatentState:
        state, first = super().begin(stage, spec, values), StepShare(last=HALF).of(spec.steps)
        is_sketch, times = stage == "sketch", state.sampler.timesteps
        state.sampler.timesteps = times[:first] if is_sketch else times[first:]
        state.sampler.set_begin_index(0 if is_sketch else first)
        latents = values["noise" if is_sketch else "sketched"]
        return replace(state, latents=latents)

    def finish(self, state: LatentState) -> Values:
        return {"sketched" if state.stage == "sketch" else "refined": state.latents}


GRAPH = Graph(PIPELINE, Toy.stages)
ORDER = ["read", "draw", "sketch", "refine", "develop"]
SECONDS = {"read": 0.01, "draw": 0.02, "sketch": 0.1, "refine": 0.2, "develop": 0.05}
SIDES = (64, 128, 192)


# Simulated.


def table(**seconds: float) -> CostTable:
    rows = tuple(
        CostRow(
            pipeline=PIPELINE,
            stage=stage.name,
            height=side,
            width=side,
            degree=degree,
            seconds={**SECONDS, **seconds}[stage.name] * (side / 128) ** 2 / 1.6 ** (degree.bit_length() - 1),
        )
        for stage in GRAPH.stages
        for side in SIDES
        for degree in ((1, 2, 4) if stage.is_parallel else (1,))
    )
    return CostTable(hardware="toy", rows=rows, graphs={PIPELINE: GRAPH})


def simulate(policy: str, requests: list[Request], costs: CostTable | None = None, **sim: object) -> Trace:
    config = SimConfig(num_devices=4, **sim)  # type: ignore[arg-type]
    return Simulation(ControllerConfig(policy=policy), costs or table(), config).run(requests)


def runs_of(trace: Trace, uid: str) -> list[Run]:
    (job_id,) = (ending.job_id for ending in trace.endings if ending.request.uid == uid)
    return [run for run in sorted(trace.runs, key=lambda run: run.start_ns) if job_id in run.work.job_ids]


def promises(rate_per_s: float, seed: int, slo_s: float) -> list[Request]:
    requests = poisson(40, rate_per_s, seed=seed, slo_s=slo_s, best_effort=0)
    return [replace(one, on_miss=OnMiss.REJECT) for one in requests]


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
            assert (run.devices == (4,)) == (run.work.stage.name == "draw"), "the CPU slot has id 4"
        first = round(HALF * request.steps)
        assert num_steps == {"read": 1, "draw": 1, "sketch": first, "refine": request.steps - first, "develop": 1}
        assert list(dict.fromkeys(run.work.stage.name for run in runs)) == ORDER


def test_both_stages_with_steps_are_widened_for_a_tight_deadline() -> None:
    alone_s = 0.08 + 5 * 0.1 + 5 * 0.2
    (one,) = poisson(1, 1.0, seed=3, slo_s=alone_s / 1.7)
    trace = simulate("tilework", [one])
    assert trace.endings[0].on_time
    for name in ("sketch", "refine"):
        assert max(len(run.devices) for run in runs_of(trace, one.uid) if run.work.stage.name == name) > 1


@pytest.mark.parametrize("draw_s", quick((0.4,), (0.02, 0.4)))
@pytest.mark.parametrize("policy", quick(("tilework",), ("tilework", "edf", "tetriserve")))
def test_promises_hold(policy: str, draw_s: float) -> None:
    """Also when the CPU slot is what there is too little of."""
    for seed in range(5):
        endings = simulate(policy, promises(2.0, seed, 6.0), table(draw=draw_s)).endings
        done = [ending for ending in endings if ending.status is Status.DONE]
        assert len(done) > 5
        assert all(ending.on_time for ending in done)
        assert {ending.status for ending in endings} <= {Status.DONE, Status.REJECTED}


@pytest.mark.parametrize("policy", FEW_POLICIES)
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
    expected_s = sum(costs.work_ns(stage, (one,), 1, num_steps) / 1e9 for stage, num_steps in costs.start(one).pieces)
    assert (trace.endings[0].finish_ns - one.arrival_ns) / 1e9 == pytest.approx(expected_s, rel=0.02)


# Live.


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("toy")
    tiny.save_sd3(directory)
    return directory


@pytest.fixture(scope="module")
def stock(directory: Path) -> Callable[[Spec], np.ndarray]:
    pipeline = tilework.reference(str(directory))
    return lambda spec: tiny.run_stock(pipeline, spec).pixels


@pytest.fixture(scope="module")
def start(directory: Path) -> Iterator[Callable[..., Rig]]:
    """Starts rigs on the toy with two devices and a CPU slot; all of them end with the module."""
    rigs: list[Rig] = []
    registry._GIVEN["ping-pong"] = PingPong

    def start(policy: str) -> Rig:
        source = ModelSource(path=str(directory), adapter=f"{Toy.__module__}:{Toy.__name__}")
        rigs.append(rig := Rig(source, policy))
        rig.start()
        return rig

    yield start
    for rig in rigs:
        rig.close()
    del registry._GIVEN["ping-pong"]


def specs_of(prefix: str, steps: int = 6) -> dict[str, Spec]:
    sizes = [(64, 64), (64, 96), (128, 64), (96, 96)]
    return {
        f"{prefix}{index}": tiny.spec(height=height, width=width, seed=index, steps=steps + index % 2)
        for index, (height, width) in enumerate(sizes)
    }


def assert_equal_to_stock(outcomes: list[Outcome], specs: dict[str, Spec], stock: Callable[[Spec], np.ndarray]) -> None:
    for outcome in outcomes:
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        assert np.array_equal(tiny.pixels(outcome.image), stock(specs[outcome.uid])), f"{outcome.uid} differs"
        assert list(dict.fromkeys(segment.stage for segment in outcome.segments)) == ORDER
        assert all((segment.devices == (2,)) == (segment.stage == "draw") for segment in outcome.segments)


@pytest.mark.slow
def test_live_pictures_equal_the_stock_pipelines_while_they_move_after_every_step(
    start: Callable[..., Rig], stock: Callable[[Spec], np.ndarray]
) -> None:
    rig, specs = start("ping-pong"), specs_of("moved")
    outcomes = rig.outcomes(specs)
    assert_equal_to_stock(outcomes, specs, stock)
    assert replay(rig.log.getvalue().splitlines())[1] is None
    assert_nothing_is_left(rig.engine)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [2, 0])
def test_live_requests_survive_the_loss_of_a_device_and_of_the_cpu_slot(
    start: Callable[..., Rig], stock: Callable[[Spec], np.ndarray], victim: int
) -> None:
    rig, specs = start("edf"), specs_of(f"lost{victim}-", steps=40)

    async def scenario() -> list[Outcome]:
        tickets = [rig.submit(spec, uid) for uid, spec in specs.items()]
        assert all(isinstance(ticket, Ticket) for ticket in tickets)
        await until(lambda: any(ticket.steps_done > 2 for ticket in tickets if isinstance(ticket, Ticket)))
        kill(rig, victim)
        late = rig.submit(tiny.spec(seed=99, steps=4), "late")
        return [await ticket.outcome for ticket in (*tickets, late) if isinstance(ticket, Ticket)]

    outcomes = rig.run(scenario())
    assert_equal_to_stock(outcomes, {**specs, "late": tiny.spec(seed=99, steps=4)}, stock)
    assert_nothing_is_left(rig.engine)


@pytest.mark.slow
def test_live_promises_are_kept_and_cancelled_requests_end(
    start: Callable[..., Rig], stock: Callable[[Spec], np.ndarray]
) -> None:
    rig, specs = start("tilework"), {uid: replace(spec, exact=True) for uid, spec in specs_of("promised").items()}

    async def scenario() -> tuple[Outcome, list[Outcome]]:
        endless = rig.submit(tiny.spec(steps=1000, height=128, width=128), "endless")
        assert isinstance(endless, Ticket)
        await until(lambda: endless.steps_done > 2)
        deadline_ns = rig.engine.now_ns() + 50 * NS_PER_S
        terms = Terms(on_miss=OnMiss.REJECT)
        tickets = [rig.submit(spec, uid, deadline_ns=deadline_ns, terms=terms) for uid, spec in specs.items()]
        assert all(isinstance(ticket, Ticket) for ticket in tickets), "there is time enough"
        rig.engine.cancel("endless", "not wanted")
        return await endless.outcome, [await ticket.outcome for ticket in tickets if isinstance(ticket, Ticket)]

    cancelled, outcomes = rig.run(scenario())
    assert (cancelled.status, cancelled.reason) == (Status.CANCELLED, "not wanted")
    assert_equal_to_stock(outcomes, specs, stock)
    assert_nothing_is_left(rig.engine)
