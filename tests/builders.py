"""Short ways to say what a test is about: tables, requests, simulations."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log2
from random import Random

from tilework.control.controller import ControllerConfig
from tilework.core.request import OnMiss, Request, Shape
from tilework.core.time import ns_from_s
from tilework.core.wire import CostRow
from tilework.core.work import DIFFUSE, STAGES, StageId
from tilework.cost.table import CostTable
from tilework.sim.simulation import SimConfig, Simulation, Trace

PIPELINE = "toy"
ALL_STAGES = frozenset(StageId(PIPELINE, stage) for stage in STAGES)
SIDES = (64, 128, 192)


def table(
    encode_s: float = 0.01, step_s: float = 0.1, decode_s: float = 0.05, degrees: tuple[int, ...] = (1,)
) -> CostTable:
    """Seconds at 128 px; other sizes in proportion to their pixels. Each doubling of the degree gains a factor 1.6."""
    rows = [
        CostRow(
            pipeline=PIPELINE,
            stage=stage,
            height=side,
            width=side,
            degree=degree,
            seconds=seconds * (side / 128) ** 2 / 1.6 ** log2(degree),
        )
        for side in SIDES
        for stage, seconds in zip(STAGES, (encode_s, step_s, decode_s), strict=True)
        for degree in (degrees if stage == DIFFUSE else (1,))
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


FLUX_SLO_S = {256: 1.5, 512: 2.0, 1024: 3.0, 2048: 5.0}


def flux_requests(count: int, per_minute: float, scale: float, seed: int, alpha: float = 0.0) -> list[Request]:
    """The workload of TetriServe §6.1: 20 steps, deadlines by size times `scale`.

    A size is the more probable the larger it is, by a factor exp(alpha x tokens / most tokens); 0 is uniform.
    """
    rng, arrival_s, requests = Random(seed), 0.0, []
    weights = [exp(alpha * (side / 2048) ** 2) for side in FLUX_SLO_S]
    for index in range(count):
        arrival_s += rng.expovariate(per_minute / 60)
        (side,) = rng.choices(list(FLUX_SLO_S), weights)
        due_s = FLUX_SLO_S[side] * scale
        one = request(str(index), arrival_s, side=side, steps=20, slo_s=due_s)
        requests.append(replace(one, pipeline="flux.1-dev"))
    return requests


def simulate(
    requests: list[Request],
    policy: str = "edf",
    *,
    num_gpus: int = 2,
    jitter: float = 0.0,
    seed: int = 0,
    cancels: tuple[tuple[int, str], ...] = (),
    costs: CostTable | None = None,
) -> Trace:
    config = SimConfig(num_gpus=num_gpus, seed=seed, jitter=jitter)
    return Simulation(ControllerConfig(policy=policy), costs or table(), config).run(requests, cancels)
