"""A short measurement of this device: seconds of each stage for some shapes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from tilework.core.request import Shape
from tilework.core.time import NS_PER_MS, s_from_ns
from tilework.core.wire import CostRow, Spec
from tilework.core.work import DECODE, DIFFUSE, ENCODE
from tilework.pipelines.family import Family
from tilework.worker.settle import settle

_log = logging.getLogger(__name__)
_MAX_REPEATS = 5
_BUDGET_NS = 100 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class _Timing:
    seconds: float
    peak_bytes: int | None


def calibrate(family: Family, shapes: tuple[Shape, ...]) -> tuple[CostRow, ...]:
    """Time every stage for every shape, with guidance: three rows per shape, in the order of `shapes`.

    A shape that cannot run here (no memory for it, say) is left out, with a warning in the log.
    """
    rows: list[CostRow] = []
    for shape in shapes:
        try:
            timings = _time_stages(family, shape)
        except Exception:
            _log.exception("%s cannot run here; it is left out of the calibration", shape)
            continue
        for stage, timing in timings.items():
            rows.append(
                CostRow(
                    pipeline=family.info.name,
                    stage=stage,
                    height=shape.height,
                    width=shape.width,
                    frames=shape.frames,
                    seconds=timing.seconds,
                    peak_bytes=timing.peak_bytes,
                )
            )
    return tuple(rows)


def _time_stages(family: Family, shape: Shape) -> dict[str, _Timing]:
    spec = _guided_spec(family, shape)
    state = family.begin(spec, family.encode(spec))

    def step() -> None:
        family.advance(state, family.predict([state])[0])

    return {
        ENCODE: _time(lambda: family.encode(spec), family.device),
        DIFFUSE: _time(step, family.device),
        DECODE: _time(lambda: family.decode(state), family.device),
    }


def _guided_spec(family: Family, shape: Shape) -> Spec:
    return Spec(
        prompt="calibration",
        negative_prompt="",
        height=shape.height,
        width=shape.width,
        steps=1 + _MAX_REPEATS,  # Each run of `_time` takes the next one.
        guidance_scale=max(family.info.default_guidance_scale, 2.0),
        seed=0,
    )


def _time(run: Callable[[], object], device: torch.device) -> _Timing:
    """The median of up to five runs after one to warm up; fewer, but at least one, once they have taken 0.1 s."""
    run()
    settle(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runs_ns: list[int] = []
    while not runs_ns or (len(runs_ns) < _MAX_REPEATS and sum(runs_ns) < _BUDGET_NS):
        start_ns = time.monotonic_ns()
        run()
        settle(device)
        runs_ns.append(time.monotonic_ns() - start_ns)
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return _Timing(s_from_ns(round(median(runs_ns))), peak_bytes)
