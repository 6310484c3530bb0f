"""Short ways to say what a test is about: tables, requests, simulations."""

from __future__ import annotations

from random import Random

from tilework.control.controller import ControllerConfig
from tilework.core.request import OnMiss, Request, Shape
from tilework.core.time import ns_from_s
from tilework.core.wire import CostRow
from tilework.core.work import STAGES, StageId
from tilework.cost.table import CostTable
from tilework.sim.simulation import SimConfig, Simulation, Trace

PIPELINE = "toy"
ALL_STAGES = frozenset(StageId(PIPELINE, stage) for stage in STAGES)
SIDES = (64, 128, 192)


def table(encode_s: float = 0.01, step_s: float = 0.1, decode_s: float = 0.05) -> CostTable:
    """Seconds at 128 px; other sizes in proportion to their pixels."""
    rows = [
        CostRow(pipeline=PIPELINE, stage=stage, height=side, width=side, seconds=seconds * (side / 128) ** 2)
        for side in SIDES
        for stage, seconds in zip(STAGES, (encode_s, step_s, decode_s), strict=True)
    ]
    return CostTable(hardware="toy", rows=tuple(rows))


def request(
    uid: str,
    arrival_s: float = 0.0,
    *,
    side: int = 128,
    steps: int = 10,
    slo_s: float | None = None,
    on_miss: OnMiss = OnMiss.BEST_EFFORT,
) -> Request:
    return Request(
        uid=uid,
        pipeline=PIPELINE,
        shape=Shape(side, side),
        steps=steps,
        arrival_ns=ns_from_s(arrival_s),
        deadline_ns=None if slo_s is None else ns_from_s(arrival_s + slo_s),
        on_miss=on_miss,
    )


def poisson(count: int, rate_per_s: float, seed: int, slo_s: float = 3.0, best_effort: float = 0.2) -> list[Request]:
    """A mix of sizes with exponential gaps; a share is best effort."""
    rng, arrival_s, requests = Random(seed), 0.0, []
    for index in range(count):
        arrival_s += rng.expovariate(rate_per_s)
        slo = None if rng.random() < best_effort else slo_s
        requests.append(request(str(index), arrival_s, side=rng.choice(SIDES), slo_s=slo))
    return requests


def simulate(
    requests: list[Request],
    policy: str = "edf",
    *,
    num_gpus: int = 2,
    jitter: float = 0.0,
    seed: int = 0,
    cancels: tuple[tuple[int, str], ...] = (),
) -> Trace:
    simulation = Simulation(
        ControllerConfig(policy=policy), table(), SimConfig(num_gpus=num_gpus, seed=seed, jitter=jitter)
    )
    return simulation.run(requests, cancels)
