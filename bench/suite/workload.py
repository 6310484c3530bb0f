"""Requests and costs for cases that run the controller without a model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from random import Random
from statistics import fmean
from uuid import UUID

from suite.stages import DECODE, DIFFUSE, ENCODE
from tilework.core.cost_row import CostRow
from tilework.core.request import Request, Shape
from tilework.core.time import ns_from_s
from tilework.cost.table import CostTable

PIPELINE = "bench"
# Seconds at (encode, one step, decode) by side: a small model on a slow device, so that chunks hold several steps.
_SECONDS = {64: (0.004, 0.012, 0.015), 128: (0.004, 0.030, 0.050), 192: (0.004, 0.065, 0.110)}
SHAPES = tuple(Shape(side, side) for side in _SECONDS)
COSTS = CostTable(
    hardware="modelled for bench",
    rows=tuple(
        CostRow(pipeline=PIPELINE, stage=stage, height=side, width=side, seconds=seconds)
        for side, values in _SECONDS.items()
        for stage, seconds in zip((ENCODE, DIFFUSE, DECODE), values, strict=True)
    ),
)


def service_s(steps: int, shape: Shape | None = None) -> float:
    """Device seconds of a request of this shape, or of the mean one."""
    if shape is None:
        return fmean(service_s(steps, one) for one in SHAPES)
    encode_s, step_s, decode_s = _SECONDS[shape.height]
    return encode_s + steps * step_s + decode_s


def request_of(rng: Random, arrival_s: float, *, steps: int, slo_s: float | None, shape: Shape) -> Request:
    """With a uid such as the server's."""
    return Request(
        uid=f"{UUID(int=rng.getrandbits(128), version=4).hex}-0",
        pipeline=PIPELINE,
        shape=shape,
        steps=steps,
        arrival_ns=ns_from_s(arrival_s),
        seed=rng.getrandbits(32),
        deadline_ns=None if slo_s is None else ns_from_s(arrival_s + slo_s),
    )


def mixed_requests(
    num_requests: int, rate_per_s: float, rng: Random, *, steps: int, slack: float, best_effort: float
) -> list[Request]:
    """Poisson arrivals of all shapes. `slack` is deadline over service time; a share `best_effort` has none."""

    def endless() -> Iterator[Request]:
        arrival_s = 0.0
        for _ in count():
            arrival_s += rng.expovariate(rate_per_s)
            shape = rng.choice(SHAPES)
            slo_s = None if rng.random() < best_effort else slack * service_s(steps, shape)
            yield request_of(rng, arrival_s, steps=steps, slo_s=slo_s, shape=shape)

    return list(islice(endless(), num_requests))
