"""The measuring of `tilework profile`: workers, sizes, degrees and batches, with a progress bar."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tilework.cli.caching.measuring import check_caches
from tilework.cli.console import UserError, console, progress
from tilework.cli.measured import in_order
from tilework.core.cache import CacheChoice
from tilework.core.cost_row import Batch, CostRow
from tilework.core.graph.graph import Graph
from tilework.core.model import ModelInfo
from tilework.core.request import Shape
from tilework.core.wire.reports import Report, WeightsRead
from tilework.cost.batch_latency import BatchLatencyModel
from tilework.cost.profile import ProfileKey, ProfileOrigin
from tilework.cost.profiles import Profiles
from tilework.cost.table import CostTable, graphs_of

if TYPE_CHECKING:
    from tilework.runtime.cell_executor import CellExecutor
    from tilework.runtime.local_executor import LocalExecutor

_MIXED_RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """What to measure. None means the model's usual sizes, and all degrees that it can run at.

    `combinations` is how many batches of several outputs are measured beside single outputs. The model must be able to
    have `caches`.
    """

    num_devices: int
    shapes: tuple[Shape, ...] | None
    degrees: tuple[int, ...] | None
    num_runs: int
    combinations: int
    caches: tuple[CacheChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured: `tried` of `num_wanted` pairs of batch and degree; those that ran have `rows`.

    `batch_model` is learned from them."""

    key: ProfileKey
    graph: Graph
    tried: Sequence[tuple[Batch, int]]
    num_wanted: int
    rows: tuple[CostRow, ...]
    batch_model: BatchLatencyModel | None = None

    @property
    def table(self) -> CostTable:
        batch_models = {} if self.batch_model is None else {self.graph.pipeline: self.batch_model}
        table = self.key.table(tuple(in_order(self.rows)), batch_models)
        return replace(table, graphs=graphs_of(self.graph))


class _Listener:
    """Ignores all reports: nothing is served, and the executor itself says when a worker is lost while it measures."""

    def on_report(self, device_id: int, report: Report) -> None: ...
    def on_lost(self, device_id: int, reason: str) -> None: ...
    def on_joined(self, device_id: int) -> None: ...
    def on_links_changed(self) -> None: ...
    def on_read(self, read: WeightsRead) -> None: ...
    def on_given_up(self, left: Collection[int]) -> None: ...
    def on_loading(self, num_ready: int) -> None: ...


def run(
    executor: CellExecutor | LocalExecutor, plan: ProfilePlan, store: Profiles, model: str, quiet: bool
) -> Measured:
    with ExitStack() as stack:
        status = stack.enter_context(console.status(f"starting {plan.num_devices} devices with {model}"))
        bar = progress(quiet)
        task = bar.add_task("measuring", total=None)

        def on_progress(num_done: int, num_all: int) -> None:
            if num_done == 0:
                status.stop()
                stack.enter_context(bar)
            bar.update(task, completed=num_done, total=num_all)

        return asyncio.run(_measure(executor, plan, store, on_progress))


async def _measure(
    executor: CellExecutor | LocalExecutor, plan: ProfilePlan, store: Profiles, on_progress: Callable[[int, int], None]
) -> Measured:
    """Raises CancelledError if it is cancelled before anything is measured."""
    from tilework.runtime.models.calibration_weights import lacks_room
    from tilework.runtime.models.costs import ModelMeasurer, calibration_shapes, measure

    model = (await executor.start(_Listener()))[0]
    info = model.info
    measurer = ModelMeasurer(executor, info.name)
    rows: list[CostRow] = []
    num_tried = 0
    try:
        if reason := lacks_room(model, executor.weights_bytes):
            raise UserError(f"{info.name} cannot run here: {reason}")
        shapes = plan.shapes or calibration_shapes(info)
        _check_shapes(shapes, info)
        check_caches(plan.caches, info)
        singles = [((shape,), degree) for shape in shapes for degree in _degrees(plan, info)]
        profiled = _profiled(store, measurer.profile_key) if plan.combinations else ()
        batches = [(batch, 1) for batch in _batches(plan, shapes, info) if batch not in profiled]
        wanted = [*singles, *batches]
        on_progress(0, len(wanted))
        try:
            for part, num_runs in ((singles, plan.num_runs), (batches, min(plan.num_runs, _MIXED_RUNS))):
                async for found in measure(measurer, info.name, part, num_runs):
                    rows += found
                    num_tried += 1
                    on_progress(num_tried, len(wanted))
        except asyncio.CancelledError:
            if not rows:
                raise
        if not rows:
            raise UserError("the model ran at none of these sizes; the log says why")
        return Measured(measurer.profile_key, info.graph, wanted[:num_tried], len(wanted), tuple(rows))
    finally:
        await executor.stop()


def _batches(plan: ProfilePlan, shapes: Sequence[Shape], info: ModelInfo) -> list[Batch]:
    """The batches to measure: two and four of each shape, and random combinations of all shapes."""
    from tilework.runtime.models.costs import random_batches

    if not plan.combinations:
        return []
    if not any(stage.batchable and not stage.one_shape for stage in info.stages):
        raise UserError(f"requests of {info.name} of several sizes cannot share a forward pass; leave out --mixed")
    if plan.degrees is not None and plan.degrees[0] != 1:
        raise UserError(
            "with --mixed --degrees must have 1: batches run on one device, and so must their members alone"
        )
    alike = [(shape,) * number for shape in shapes for number in (2, 4)]
    return list(dict.fromkeys((*alike, *random_batches(shapes, plan.combinations))))


def _profiled(store: Profiles, key: ProfileKey) -> set[Batch]:
    """The batches that earlier profiles measured in the same circumstances; they are not measured again."""
    entries = (one for one in store.entries() if one.key.covers(key) and one.origin is ProfileOrigin.PROFILE)
    return {tuple(sorted(row.shapes)) for entry in entries for row in entry.rows if row.cache is None}


def _degrees(plan: ProfilePlan, info: ModelInfo) -> tuple[int, ...]:
    most = min(info.max_degree, plan.num_devices)
    if plan.degrees is None:
        return tuple(1 << power for power in range(most.bit_length()))
    if plan.degrees[-1] > most:
        raise UserError(f"{info.name} runs on at most {info.max_degree} devices at once, not {plan.degrees[-1]}")
    return plan.degrees


def _check_shapes(shapes: Sequence[Shape], info: ModelInfo) -> None:
    for shape in shapes:
        if any(side % info.side_multiple or side > info.max_side for side in (shape.height, shape.width)):
            raise UserError(
                f"size is {shape}; sides of {info.name} are multiples of {info.side_multiple} up to {info.max_side}"
            )
