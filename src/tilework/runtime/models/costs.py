"""The cost table at the start of a server: earlier measurements of this machine and model, and new ones of the rest."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from random import Random
from typing import Protocol

import tilework
from tilework.core.cost_row import Batch, CostRow
from tilework.core.graph.graph import Graph
from tilework.core.lora import UsedLora
from tilework.core.model import ModelInfo, ModelSource, Source
from tilework.core.request import Shape
from tilework.core.wire.reports import LoadedModel
from tilework.cost.profile import Profile, ProfileKey, ProfileOrigin
from tilework.cost.profiles import Profiles, ProfilesUnavailable
from tilework.cost.rows import RowKey, merge_rows, row_key
from tilework.cost.table import CostTable, graphs_of
from tilework.runtime.executor import CannotRun, ExecutorModels

_log = logging.getLogger(__name__)
MAX_BATCH = 12
_MORE_ROUNDS = 2
_MOST_EFFICIENCY = 1.2  # Largest efficiency of a group, over one device.
_MOST_SPREAD, _LEAST_SPREAD_S = 0.2, 0.001  # Of the longest run beyond the median: share, and negligible time.
MEASURE_AGAIN = (
    "Measure again when the machine is idle: `tilework serve --recalibrate` without --cost, or `tilework profile`"
)


class Measurer(Protocol):
    """Measures a model on its devices."""

    @property
    def profile_key(self) -> ProfileKey:
        """Hardware, model and settings that identify the measurements."""

    async def calibrate(
        self,
        batches: tuple[Batch, ...],
        degree: int = 1,
        num_runs: int | None = None,
        loras: tuple[UsedLora, ...] = (),
        known: frozenset[str] = frozenset(),
    ) -> tuple[CostRow, ...]:
        """Measure in groups of this degree, on all devices or on some; returns the rows of all groups.

        The requests use these LoRAs. Stages that are `known` are not timed; with 0 runs all are only warmed up, and the
        last of these runs is timed.

        Raises CannotRun if no device can run any of the batches.
        """


@dataclass(frozen=True, slots=True)
class ModelMeasurer:
    """Measures one model of an executor that has started."""

    executor: ExecutorModels
    model: str

    @property
    def profile_key(self) -> ProfileKey:
        return self.executor.profile_key(self.model)

    async def calibrate(
        self,
        batches: tuple[Batch, ...],
        degree: int = 1,
        num_runs: int | None = None,
        loras: tuple[UsedLora, ...] = (),
        known: frozenset[str] = frozenset(),
    ) -> tuple[CostRow, ...]:
        return await self.executor.calibrate(self.model, batches, degree, num_runs, loras, known)


@dataclass(frozen=True, slots=True)
class CostCache:
    """The measurements of earlier starts. `refresh` ignores them and measures again."""

    profiles: Profiles
    refresh: bool = False


def profile_key(source: Source, num_workers: int, hardware: str, loaded: LoadedModel) -> ProfileKey:
    """Return the key of measurements. It has the number of CPU workers, which slow each other down, unlike GPUs."""
    return ProfileKey(
        hardware=hardware if loaded.info.cell == 1 else f"{loaded.info.cell} x {hardware}",
        architecture=loaded.architecture,
        model=loaded.identity,
        dtype=source.dtype if isinstance(source, ModelSource) else "modelled",
        threads=source.threads,
        workers=num_workers if source.device == "cpu" else 1,
        libraries=loaded.info.library,
    )


def calibration_shapes(info: ModelInfo) -> tuple[Shape, ...]:
    """Return squares of 0.5, 1 and 1.5 times the default size, within the model's limits; clips of default length."""
    sides = {round(info.default_height * share / info.side_multiple) * info.side_multiple for share in (0.5, 1.0, 1.5)}
    legal = (side for side in sorted(sides) if info.side_multiple <= side <= info.max_side)
    return tuple(Shape(side, side, info.default_frames) for side in legal)


def calibration_batches(info: ModelInfo) -> tuple[Batch, ...]:
    """Return batches of the calibration shapes.

    They are two and four of the smallest; the two smallest; and 3, 2, 1 of each by size. Empty if no stage of the model
    can be shared; no mixes if sharing takes one shape, or the model has only one.
    """
    shared = [stage for stage in info.stages if stage.batchable]
    if not shared:
        return ()
    shapes = calibration_shapes(info)
    alike = (shapes[:1] * 2, shapes[:1] * 4)
    if len(shapes) == 1 or all(stage.one_shape for stage in shared):
        return alike
    steps = tuple(shape for index, shape in enumerate(shapes) for _ in range(len(shapes) - index))
    return (*alike, shapes[:2], steps)


def random_batches(shapes: Sequence[Shape], number: int, seed: int = 0) -> tuple[Batch, ...]:
    """Return distinct random batches of 2 to MAX_BATCH of these shapes; fewer than `number` if there are no more.

    With the same seed, a larger number begins with the same batches.
    """
    rng = Random(seed)
    drawn: dict[Batch, None] = {}
    number = min(number, math.comb(MAX_BATCH + len(shapes), len(shapes)) - len(shapes) - 1)
    while len(drawn) < number:
        drawn[tuple(sorted(rng.choices(shapes, k=rng.randint(2, MAX_BATCH))))] = None
    return tuple(drawn)


async def measure(
    measurer: Measurer,
    model: str,
    wanted: Iterable[tuple[Batch, int]],
    num_runs: int | None = None,
    shared: Sequence[CostRow] = (),
) -> AsyncIterator[tuple[CostRow, ...]]:
    """Measure batches at degrees, one after another; yields the rows of each, merged over all groups.

    Degrees of one batch that follow each other are yielded together. While they are implausible (see
    `implausible_batches`), they are measured again in turns, and so are stages whose times vary (see `_varies`), at
    most `_MORE_ROUNDS` times. Each row is then that of its quickest round, since other work only adds time. Warnings
    name rows that are still implausible or still vary.

    Stages of which `shared` has a row are not timed. A batch that cannot run has no rows, and one line of the log says
    why, with the name `model`. A caller that is cancelled keeps the rows that it has received.
    """

    async def rows_of(batch: Batch, degree: int, steady: frozenset[str] = frozenset()) -> tuple[CostRow, ...]:
        known = _known_stages(shared, batch, degree) | steady
        try:
            return merge_rows(await measurer.calibrate((batch,), degree, num_runs, known=known))
        except CannotRun as error:
            refused.setdefault(degree, str(error))
            return ()

    found: list[CostRow] = []
    for batch, alike in groupby(wanted, key=lambda one: one[0]):
        refused: dict[int, str] = {}
        measured = {degree: await rows_of(batch, degree) for _, degree in alike}
        _warn_of_refused(model, refused)
        for _ in range(_MORE_ROUNDS):
            steady = _steady_stages(measured)
            for degree, stages in steady.items():
                measured[degree] = _quicker(measured[degree], await rows_of(batch, degree, stages))
            if not steady:
                break
        if implausible_batches(row for rows in measured.values() for row in rows):
            _log.warning(
                "%s: several devices seem faster than one by more than their number, also when measured again; other "
                "work has probably disturbed the measurement. %s",
                " + ".join(map(str, batch)),
                MEASURE_AGAIN,
            )
        for rows in measured.values():
            found += rows
            yield rows
    _warn_of_varying(found)


def _warn_of_refused(model: str, refused: Mapping[int, str]) -> None:
    """Log in one line at which degrees a batch is left out, and the first reason."""
    if refused:
        reason = next(iter(refused.values()))
        degrees = ", ".join(map(str, refused))
        devices = "one device" if degrees == "1" else f"{degrees} devices"
        _log.warning("%s: %s; its measurements on %s leave it out", model, reason, devices)


def _steady_stages(measured: Mapping[int, Sequence[CostRow]]) -> dict[int, frozenset[str]]:
    """Return by degree the stages of a batch that need not be timed again; without degrees at which none must be."""
    if implausible_batches(row for rows in measured.values() for row in rows):
        return dict.fromkeys(measured, frozenset())
    return {
        degree: frozenset(row.stage for row in rows if not _varies(row))
        for degree, rows in measured.items()
        if any(map(_varies, rows))
    }


def _varies(row: CostRow) -> bool:
    """Return whether the times of its runs differ by more than they do on an idle machine."""
    return _spread_s(row) > max(_MOST_SPREAD * row.seconds, _LEAST_SPREAD_S)


def _spread_s(row: CostRow) -> float:
    """Return how much longer the longest run took than the median, on any of the groups."""
    return (row.p99_seconds or row.seconds) - row.seconds


def _warn_of_varying(rows: Sequence[CostRow]) -> None:
    """Log how many rows vary, and which of them the most."""
    varying = [row for row in rows if _varies(row)]
    if varying:
        row = max(varying, key=lambda one: _spread_s(one) / one.seconds)
        _log.warning(
            "%s: %d of %d times vary by more than %.0f%% between runs, also when measured again; that of %s of %s on "
            "%d device%s by %.0f%%. Other work has probably disturbed them. %s",
            row.pipeline,
            len(varying),
            len(rows),
            100 * _MOST_SPREAD,
            row.stage,
            " + ".join(map(str, row.shapes)),
            row.degree,
            "" if row.degree == 1 else "s",
            100 * _spread_s(row) / row.seconds,
            MEASURE_AGAIN,
        )


def implausible_batches(rows: Iterable[CostRow]) -> frozenset[Batch]:
    """Return the batches for which a stage takes less than one d-th of its time on one device at a degree d.
    The difference must be larger than that between measurements.
    """
    seconds = {(row.stage, row.shapes, row.degree): row.seconds for row in rows}
    return frozenset(
        shapes
        for (stage, shapes, degree), taken_s in seconds.items()
        if seconds.get((stage, shapes, 1), 0.0) > _MOST_EFFICIENCY * degree * taken_s
    )


def _quicker(rows: Sequence[CostRow], others: Sequence[CostRow]) -> tuple[CostRow, ...]:
    """Return the quicker one of two measurements of each row: by its median and its longest run together."""
    found: dict[RowKey, CostRow] = {}
    for row in (*rows, *others):
        before = found.setdefault(row_key(row), row)
        found[row_key(row)] = min(before, row, key=lambda one: one.seconds + (one.p99_seconds or one.seconds))
    return tuple(found.values())


def _known_stages(rows: Iterable[CostRow], batch: Batch, degree: int) -> frozenset[str]:
    """Return the stages that have a row of this batch at this degree."""
    return frozenset(row.stage for row in rows if row.degree == degree and sorted(row.shapes) == sorted(batch))


def trial_shapes(info: ModelInfo) -> tuple[Shape, ...]:
    """Return the shapes at which a model is tried: those of its calibration, and for clips first one of few frames.

    A clip of the default length may take minutes a step.
    """
    shapes = calibration_shapes(info)
    few = min(info.default_frames, 1 + info.frame_multiple)
    return tuple(dict.fromkeys((*(replace(one, frames=few) for one in shapes[:1]), *shapes)))


async def warm_up(measurer: Measurer, info: ModelInfo) -> tuple[CostRow, ...]:
    """Run every stage at the first of the trial shapes that can run; returns the rows of that run.

    Raises CannotRun, for the reason of the first one, if none can.
    """
    refused: CannotRun | None = None
    for shape in trial_shapes(info):
        try:
            return merge_rows(await measurer.calibrate(((shape,),), num_runs=0))
        except CannotRun as error:
            refused = refused or error
    if refused is not None:
        raise refused
    return ()


LORA_ROUNDS = 4


def lora_batch(info: ModelInfo) -> Batch:
    """Return the batch that is measured `LORA_ROUNDS` times for the cost of a LoRA: one of the default size."""
    shapes = calibration_shapes(info)
    return (shapes[len(shapes) // 2],)


async def lora_slowdown(measurer: Measurer, info: ModelInfo, name: str) -> float:
    """Return the factor by which a LoRA slows steps of the default size, from the quicker of two runs each."""
    batches = (lora_batch(info),)
    plain, changed = list[float](), list[float]()
    for _ in range(LORA_ROUNDS // 2):
        for seconds, loras in ((plain, ()), (changed, (UsedLora(name, 1.0),))):
            try:
                rows = merge_rows(await measurer.calibrate(batches, loras=loras))
            except CannotRun as error:
                _log.warning("%s: the cost of the LoRA %s is not measured: %s", info.name, name, error)
                return 1.0
            seconds.append(sum(row.seconds for row in rows if info.graph.stage(row.stage).has_steps))
    return max(1.0, min(changed) / min(plain)) if min(plain) and min(changed) else 1.0


def earlier_costs(cache: CostCache | None, key: ProfileKey, graph: Graph) -> CostTable | None:
    """Return what earlier starts have measured under a key, as a table of the pipeline of this graph.
    None without a usable cache, if it is to be refreshed, or if nothing was measured.

    Rows of stages that the graph does not have are left out.
    """
    if cache is None or cache.refresh:
        return None
    try:
        table = cache.profiles.latest(key, graph.pipeline)
    except ProfilesUnavailable as error:
        _log.warning("measured costs of earlier starts cannot be used: %s", error)
        return None
    return None if table is None else _of_graph(table, graph)


def _of_graph(table: CostTable, graph: Graph) -> CostTable | None:
    stages = {stage.name for stage in graph.stages}
    rows = tuple(row for row in table.rows if row.stage in stages)
    if len(rows) < len(table.rows):
        others = ", ".join(sorted({row.stage for row in table.rows}.difference(stages)))
        _log.warning(
            "%s: %d rows of the cost cache are not used; %s is no stage of it",
            graph.pipeline,
            len(table.rows) - len(rows),
            others,
        )
    return replace(table, rows=rows, graphs=graphs_of(graph)) if rows else None


def save(cache: CostCache | None, key: ProfileKey, rows: tuple[CostRow, ...]) -> None:
    """Keep measured rows for the next start. If that fails, a warning is logged."""
    if cache is None or not rows:
        return
    try:
        cache.profiles.save(
            Profile(
                key=key,
                origin=ProfileOrigin.CALIBRATION,
                rows=rows,
                tilework=tilework.__version__,
                created_unix_ns=time.time_ns(),
            )
        )
    except ProfilesUnavailable as error:
        _log.warning("the next start must measure again: %s", error)
