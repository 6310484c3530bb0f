"""Measurement of this device: seconds and peak memory of each stage, alone, as one of a group, and in batches."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from tilework.comm.groups import Groups
from tilework.core.comm import Comm, GroupBroken
from tilework.core.cost_row import Batch, CostRow
from tilework.core.graph.stage import ResultKind, Stage
from tilework.core.model import ModelInfo
from tilework.core.request import Shape
from tilework.core.time import NS_PER_S, s_from_ns
from tilework.core.wire.commands import Calibrate
from tilework.core.wire.reports import Calibrated
from tilework.core.wire.spec import Image, Spec, VideoFormat
from tilework.patches.layout import pack
from tilework.pipelines.family import LIVE, Family, Values
from tilework.pipelines.serialization import serialize
from tilework.worker.memory import Budget
from tilework.worker.models.models import Models
from tilework.worker.synchronize import synchronize

_log = logging.getLogger(__name__)
_MAX_RUNS = 5
_BUDGET_NS = NS_PER_S


@dataclass(frozen=True, slots=True)
class _Timing:
    seconds: float
    p99_seconds: float
    peak_bytes: int | None
    num_runs: int
    state_bytes: int | None = None


def execute_calibrate(command: Calibrate, models: Models, groups: Groups, budget: Budget) -> Calibrated:
    """Time a model's stages within the budget, with the command's group if it has one."""
    errors: list[str] = []
    try:
        comm = None if command.group is None else groups.open(command.group)
        with models.running(comm, command.group), budget.hold():
            rows = calibrate(
                models[command.model],
                command.batches,
                comm,
                command.num_runs,
                partial(_prepare, command, models),
                models.cell_size,
                command.known,
                errors.append,
            )
    except GroupBroken as error:
        return Calibrated((), str(error))
    finally:
        groups.rest()
    return Calibrated(rows, "; ".join(errors))


def _prepare(command: Calibrate, models: Models, stage: str) -> None:
    """Bring the weights of a stage to the device, if it has no room for all, and compute with the LoRAs."""
    if command.weights:
        needed = command.weights[stage]
        models.drop({one for some in command.weights.values() for one in some}.difference(needed))
        models.load(needed)
    models.use(command.model, stage, command.loras)


def calibrate(
    family: Family,
    batches: Sequence[Batch],
    comm: Comm | None = None,
    num_runs: int | None = None,
    prepare: Callable[[str], None] = lambda _stage: None,
    cell_size: int = 1,
    known: frozenset[str] = frozenset(),
    on_error: Callable[[str], None] = lambda _error: None,
) -> tuple[CostRow, ...]:
    """Time the stages for every batch, with guidance; return rows in the order of `batches`.

    Without a `comm`: every stage for a single output, and for a batch the stages that take one. A single output that
    cannot run here (for lack of memory, for example) is left out; of a batch, the stage that cannot and those after it.
    `on_error` gets the reason in one line; the traceback goes to the debug log.

    With a `comm`: stages that several devices may share, for single outputs, at the degree of the group. The group of a
    single cell, which has `cell_size` ranks and counts as one device, times every stage. All ranks make the same call,
    and each returns its own rows. If a batch cannot run on one rank, that rank breaks the group and calls `on_error`:
    the others may wait for it until the group is broken off for them, too. The rows so far are returned.

    `num_runs` runs follow three warm-up runs; None means one warm-up run, two on CUDA, and then up to five within a
    second; 0 means these warm-up runs alone, of which the last is timed, and rows of 0 runs. `prepare` is called with
    the name of each stage before it runs, and is not timed. Stages that are `known` are not timed either.
    """
    rows: list[CostRow] = []
    degree = 1 if comm is None else comm.size // cell_size
    for batch in batches:
        timings: dict[str, _Timing] = {}
        try:
            _time_stages(family, batch, comm, degree, num_runs, timings, prepare, known)
        except GroupBroken as error:
            on_error(str(error))
            break
        except Exception as error:
            shapes = " + ".join(map(str, batch))
            _log.debug("%s: %s cannot run here", family.info.name, shapes, exc_info=True)
            on_error(f"{shapes} cannot run here ({type(error).__name__}: {_first_line(error)})")
            if comm is not None:
                comm.abort()
                break
            if len(batch) == 1:
                continue
        rows += [_row(family, stage, batch, degree, timing) for stage, timing in timings.items()]
    return tuple(rows)


def _time_stages(
    family: Family,
    batch: Batch,
    comm: Comm | None,
    degree: int,
    num_runs: int | None,
    timings: dict[str, _Timing],
    prepare: Callable[[str], None],
    known: frozenset[str],
) -> None:
    """Run each stage with the outputs of earlier ones, and add the times of the stages that are wanted.

    A stage reads what another device would have of the outputs: a live call can be continued only once, not timed
    often. The values of a single output are serialized once, to know their size; those of the last stage are not moved.
    """
    specs = [_guided_spec(family, shape, num_runs) for shape in batch]
    values: dict[Spec, Values] = {spec: {} for spec in specs}  # Equal shapes share them.
    clock = _Clock(family.device, comm, num_runs)
    wanted = {
        stage.name
        for stage in family.info.graph.stages
        if (stage.is_parallel if degree > 1 else stage.spec.takes(batch))
    } - known
    left = set(wanted)
    for stage in family.info.graph.stages:
        timing: _Timing | None = None
        prepare(stage.name)
        if stage.has_steps:
            steps = _Steps(family, stage, specs, values)
            if stage.name in wanted:
                with nullcontext() if comm is None else _joined(family, partial(family.join, comm, specs[0])):
                    timing = clock.time(steps.step, steps.ensure)
            write: Callable[[], dict[Spec, Values]] = steps.finish
        else:
            write = partial(_run, family, stage.name, values)
            if stage.name in wanted:
                read = [values[spec] for spec in specs]
                with nullcontext() if comm is None else _joined(family, partial(family.parallel.join, comm, False)):
                    timing = clock.time(partial(family.run, stage.name, specs, read))
        if timing is not None:
            timings[stage.name] = timing
        left.discard(stage.name)
        if not left:
            break
        state = steps.export() if stage.has_steps and stage.name in wanted else None  # It has made a step.
        outputs = {spec: _moved(of_spec) for spec, of_spec in write().items()}
        if degree == 1 and len(batch) == 1 and stage.name in timings:
            size = serialize(outputs[specs[0]] if state is None else state).num_bytes
            timings[stage.name] = replace(timings[stage.name], state_bytes=size)
        values = {spec: {**values[spec], **of_spec} for spec, of_spec in outputs.items()}


def _moved(values: Values) -> Values:
    """Return the part of outputs that another device would have."""
    return {name: value for name, value in values.items() if name != LIVE}


@contextmanager
def _joined(family: Family, join: Callable[[], None]) -> Iterator[None]:
    join()
    try:
        yield
    finally:
        family.parallel.leave()


class _Steps:
    """Steps of a stage for a batch. They begin anew before the last one, which may be shorter than the others."""

    def __init__(self, family: Family, stage: Stage, specs: Sequence[Spec], values: Mapping[Spec, Values]) -> None:
        assert stage.spec.steps is not None
        self._family = family
        self._stage = stage
        self._specs = specs
        self._values = values
        self._num_steps = stage.spec.steps.of(specs[0].steps)
        self._begin()

    def _begin(self) -> None:
        self._states = [self._family.begin(self._stage.name, spec, self._values[spec]) for spec in self._specs]

    def ensure(self) -> None:
        """Make sure that a whole step is left."""
        if self._states[0].steps_done >= max(1, self._num_steps - 1):
            self._begin()

    def step(self) -> None:
        """Make one step of each state."""
        self._family.step(self._states, pack if len(self._states) > 1 else None)

    def export(self) -> Values:
        """Return the first state between two steps, exported."""
        return self._family.export(self._states[0])

    def finish(self) -> dict[Spec, Values]:
        """Make the steps that are left; some models write nothing without them."""
        while self._states[0].steps_done < self._num_steps:
            self.step()
        return {state.spec: self._family.finish(state) for state in self._states}


def _run(family: Family, stage: str, values: Mapping[Spec, Values]) -> dict[Spec, Values]:
    return dict(zip(values, family.run(stage, list(values), list(values.values())), strict=True))


def _guided_spec(family: Family, shape: Shape, num_runs: int | None) -> Spec:
    """Return a request with the required inputs and, if the model allows, one step more than are surely timed.

    This leaves few steps before the decode; if more are timed, the steps begin anew. It has no more steps than the
    model has by default: a model of few steps may refuse more.
    """
    pictures = {
        one.name: (_noise(shape),) * (shape.frames if one.is_clip else 1)
        for one in family.info.pictures
        if one.required
    }
    num_warmups = _num_warmups(num_runs, family.device)
    num_timed = 1 if num_runs is None else num_runs
    least = whole_steps = min(num_warmups + num_timed + 1, family.info.default_steps)
    while (steps := _steps_of(whole_steps, family.info, bool(pictures))) < least:
        whole_steps += 1
    return Spec(
        prompt="calibration",
        height=shape.height,
        width=shape.width,
        frames=shape.frames,
        steps=steps,
        whole_steps=whole_steps,
        guidance_scale=max(family.info.default_guidance_scale, 2.0),
        seed=0,
        arguments={one.name: int(one.low) for one in family.info.arguments if one.required},
        pictures=pictures,
        video=VideoFormat(family.info.default_fps) if family.info.graph.makes(ResultKind.VIDEO) else None,
    )


def _steps_of(whole_steps: int, info: ModelInfo, has_pictures: bool) -> int:
    """Return the steps that are made of these, at the default strength of the stock call."""
    for one in info.arguments:
        if has_pictures and one.strength is not None and one.default:
            return one.strength.steps(whole_steps, one.default)
    return whole_steps


def _noise(shape: Shape) -> Image:
    """Return a random image for models that require one."""
    pixels = torch.randint(0, 256, (shape.height * shape.width * 3,), dtype=torch.uint8, generator=torch.Generator())
    return Image(height=shape.height, width=shape.width, pixels=pixels.numpy().tobytes())


def _num_warmups(num_runs: int | None, device: torch.device) -> int:
    """Return the number of warm-up runs. On CUDA the second call of a kind is recorded (`pipelines.cuda.graphs`)."""
    return 3 if num_runs else 2 if device.type == "cuda" else 1


@dataclass(frozen=True, slots=True)
class _Clock:
    """Times calls, with the same number of runs on every rank of a group."""

    device: torch.device
    comm: Comm | None
    num_runs: int | None

    def time(self, run: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> _Timing:
        """Time `run`, without `prepare`, which is called before each; with 0 runs the last warm-up is timed."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # The first run is eager, and allocates what a step takes.
        runs_ns = [self._run_ns(run, prepare) for _ in range(_num_warmups(self.num_runs, self.device))][-1:]
        num_runs = 0
        if self.num_runs != 0:
            runs_ns = [self._run_ns(run, prepare)]
            num_runs = self.num_runs or self._agreed_num_runs(runs_ns[0])
            runs_ns += [self._run_ns(run, prepare) for _ in range(num_runs - 1)]
        peak_bytes = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return _Timing(s_from_ns(round(median(runs_ns))), s_from_ns(_p99(runs_ns)), peak_bytes, num_runs)

    def _run_ns(self, run: Callable[[], object], prepare: Callable[[], object]) -> int:
        prepare()
        start_ns = time.monotonic_ns()
        run()
        synchronize(self.device, self.comm)
        return time.monotonic_ns() - start_ns

    def _agreed_num_runs(self, run_ns: int) -> int:
        """Return the number of runs that fit into the budget by the clock of rank 0: all ranks need the same number."""
        num_runs = min(_MAX_RUNS, max(1, _BUDGET_NS // max(1, run_ns)))
        if self.comm is None:
            return num_runs
        shared = torch.tensor([num_runs], dtype=torch.int64, device=self.device)
        self.comm.broadcast(shared, root=0)
        agreed = int(shared.item())
        synchronize(self.device, self.comm)
        return agreed


def _p99(values: list[int]) -> int:
    """Return the 99th percentile by nearest rank; for fewer than 100 values the largest."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _row(family: Family, stage: str, batch: Batch, degree: int, timing: _Timing) -> CostRow:
    return CostRow.of(
        batch,
        pipeline=family.info.name,
        stage=stage,
        degree=degree,
        seconds=timing.seconds,
        p99_seconds=timing.p99_seconds,
        peak_bytes=timing.peak_bytes,
        state_bytes=timing.state_bytes,
        num_runs=timing.num_runs,
    )
