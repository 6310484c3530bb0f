"""Measurement of this device: seconds and peak memory of each stage for some shapes, alone or as one of a group."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from tilework.core.comm import Comm
from tilework.core.request import Shape
from tilework.core.time import NS_PER_MS, s_from_ns
from tilework.core.wire import CostRow, Spec
from tilework.core.work import DECODE, DIFFUSE, ENCODE
from tilework.pipelines.family import Family, StepState
from tilework.worker.settle import settle

_log = logging.getLogger(__name__)
_MAX_RUNS = 5
_BUDGET_NS = 100 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class _Timing:
    seconds: float
    p99_seconds: float
    peak_bytes: int | None
    num_runs: int


def calibrate(
    family: Family, shapes: tuple[Shape, ...], comm: Comm | None = None, num_runs: int | None = None
) -> tuple[CostRow, ...]:
    """Time the stages for every shape, with guidance; rows in the order of `shapes`.

    Alone: encode, a denoising step, and decode. A shape that cannot run here (no memory for it, say) is left out.
    With a `comm`: a step at the degree of the group, whose members all call this alike and get rows of their own. A
    shape that cannot run on one of them breaks the group, since the others wait for it; the rows so far are returned.

    `num_runs` runs follow three to warm up; None means one to warm up and then up to five within 0.1 s.
    """
    rows: list[CostRow] = []
    for shape in shapes:
        try:
            timings = _time_stages(family, shape, comm, num_runs)
        except Exception:
            _log.exception("%s cannot run here; it is left out of the calibration", shape)
            if comm is not None:
                comm.abort()
                break
            continue
        degree = 1 if comm is None else comm.size
        rows += [_row(family, stage, shape, degree, timing) for stage, timing in timings.items()]
    return tuple(rows)


def _time_stages(family: Family, shape: Shape, comm: Comm | None, num_runs: int | None) -> dict[str, _Timing]:
    spec = _guided_spec(family, shape, num_runs)
    state = family.begin(spec, family.encode(spec))
    clock = _Clock(family.device, comm, num_runs)
    if comm is not None:
        with _joined(family, comm):
            return {DIFFUSE: clock.time(lambda: _step(family, state))}
    return {
        ENCODE: clock.time(lambda: family.encode(spec)),
        DIFFUSE: clock.time(lambda: _step(family, state)),
        DECODE: clock.time(lambda: family.decode(state)),
    }


@contextmanager
def _joined(family: Family, comm: Comm) -> Iterator[None]:
    family.parallel.join(comm, guided=family.info.two_passes)
    try:
        yield
    finally:
        family.parallel.leave()


def _step(family: Family, state: StepState) -> None:
    """One step, which is as many iterations as the sampler takes for it."""
    steps_done = state.steps_done
    while state.steps_done == steps_done:
        family.advance(state, family.predict([state])[0])


def _guided_spec(family: Family, shape: Shape, num_runs: int | None) -> Spec:
    return Spec(
        prompt="calibration",
        negative_prompt="",
        height=shape.height,
        width=shape.width,
        steps=_num_warmups(num_runs) + (num_runs or _MAX_RUNS) + 1,  # The last one may be shorter: it is not timed.
        guidance_scale=max(family.info.default_guidance_scale, 2.0),
        seed=0,
    )


def _num_warmups(num_runs: int | None) -> int:
    return 1 if num_runs is None else 3


@dataclass(frozen=True, slots=True)
class _Clock:
    """Times one thing after another, with the same number of runs on every member of a group."""

    device: torch.device
    comm: Comm | None
    num_runs: int | None

    def time(self, run: Callable[[], object]) -> _Timing:
        for _ in range(_num_warmups(self.num_runs)):
            self._run_ns(run)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        runs_ns = [self._run_ns(run)]
        num_runs = self.num_runs or self._agreed_num_runs(runs_ns[0])
        runs_ns += [self._run_ns(run) for _ in range(num_runs - 1)]
        peak_bytes = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return _Timing(s_from_ns(round(median(runs_ns))), s_from_ns(_p99(runs_ns)), peak_bytes, num_runs)

    def _run_ns(self, run: Callable[[], object]) -> int:
        start_ns = time.monotonic_ns()
        run()
        settle(self.device)
        return time.monotonic_ns() - start_ns

    def _agreed_num_runs(self, run_ns: int) -> int:
        """As many as fit into the budget by the first member's clock: else one would wait for another for ever."""
        num_runs = min(_MAX_RUNS, max(1, _BUDGET_NS // max(1, run_ns)))
        if self.comm is None:
            return num_runs
        shared = torch.tensor([num_runs], dtype=torch.int64, device=self.device)
        self.comm.broadcast(shared, root=0)
        return int(shared.item())


def _p99(values: list[int]) -> int:
    """By nearest rank; the largest of fewer than 100."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def _row(family: Family, stage: str, shape: Shape, degree: int, timing: _Timing) -> CostRow:
    return CostRow(
        pipeline=family.info.name,
        stage=stage,
        height=shape.height,
        width=shape.width,
        frames=shape.frames,
        degree=degree,
        seconds=timing.seconds,
        p99_seconds=timing.p99_seconds,
        peak_bytes=timing.peak_bytes,
        num_runs=timing.num_runs,
    )
