"""`tilework profile`: measures each stage on these devices, by size, degree and batch."""

from __future__ import annotations

import asyncio
import json as jsonlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import tilework
from tilework.cli.caches import CACHE_FILE, PROMPTS, cached_rows, check_caches, parse_caches, prompts_of, train_cache
from tilework.cli.console import UserError, console, print_json, progress, require_serve_extra, user_errors
from tilework.cli.devices import Devices, found_devices
from tilework.cli.measured import Scaling, in_order, open_profiles, parse_size, print_costs, row_json
from tilework.cli.models import model_source, options_of
from tilework.cli.options.common import AsJson, ProfilesFile, SetupGroup, examples
from tilework.cli.options.groups import grouped
from tilework.cli.options.serve import Cell, WeightsMemory, Workers
from tilework.core.cache import CacheChoice
from tilework.core.cost_row import Batch, CostRow
from tilework.core.graph.graph import Graph
from tilework.core.model import ModelInfo, ModelSource
from tilework.core.request import Shape
from tilework.cost.batch_latency import BatchLatencyModel
from tilework.cost.learning import MIN_MIXED, can_learn, learn
from tilework.cost.profile import Profile, ProfileKey, ProfileOrigin
from tilework.cost.profiles import Profiles, ProfilesUnavailable
from tilework.cost.rows import row_key
from tilework.cost.table import CostTable, graphs_of
from tilework.cost.table_file import table_json
from tilework.distribution import install_command
from tilework.worker.log_lines import log_to_stderr

if TYPE_CHECKING:
    from tilework.runtime.local_executor import LocalExecutor


EXAMPLE = examples(
    "tilework profile",
    "tilework profile ./flux-dev --device cuda --workers 4 \\\n  --degrees 1,2,4 --sizes 512,1024,1024x768",
    "tilework profile ./flux2-dev --device cuda --workers 4 --cell 2 \\\n  --weights-memory 40GB",
    "tilework profile ./sdxl --device cuda --mixed",
    "tilework profile ./sd3-medium --device cuda \\\n  --cache patch=0.003,patch=0.01 --prompts prompts.txt",
    "tilework profile ./sd3-medium --device cuda --train-cache prompts.txt \\\n  --out ./sd3-medium/cache_forest.json",
)
CachePrompts = Annotated[
    Path | None,
    typer.Option(
        "--train-cache",
        metavar="PROMPTS",
        help="Measure nothing: train the predictor of the patch cache with the prompts of this file, one on each line, "
        "and write it to --out. It belongs beside the model's model_index.json as cache_forest.json.",
    ),
]


Caches = Annotated[
    str | None,
    typer.Option(
        "--cache",
        metavar="KIND[=THRESHOLD],...",
        help="Measure steps with these caches, too, as in patch=0.003 (docs/sharing.md).",
    ),
]
Prompts = Annotated[
    Path | None, typer.Option("--prompts", help="Prompts to draw with --cache, one on each line; default: four.")
]


@grouped
def command(
    model: Annotated[str, typer.Argument(help="shapes, shapes-motion, a diffusers directory, or a hub id.")] = "shapes",
    workers: Workers = None,
    cell: Cell = "1",
    weights_memory: WeightsMemory = None,
    degrees: Annotated[
        str | None, typer.Option(help="Group sizes, such as 1,2,4; default: powers of two up to the number of devices.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Sizes, such as 512,1024x768; default: 0.5, 1 and 1.5 times the model's own.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, max=500, help="Timed runs of each stage, after three to warm up.")] = 20,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each worker.")] = 1,
    mixed: Annotated[bool, typer.Option("--mixed", help="Measure batches of several outputs, too.")] = False,
    combinations: Annotated[int, typer.Option(min=1, max=5000, help="Number of these batches, with --mixed.")] = 200,
    cache: Caches = None,
    prompts: Prompts = None,
    training: CachePrompts = None,
    profiles: ProfilesFile = None,
    export: Annotated[Path | None, typer.Option("--out", help="Write the rows as a cost table, too.")] = None,
    *,
    setup: SetupGroup,
    json: AsJson = False,
) -> None:
    """Measure each stage of a model on this machine, by size and degree, and save it for servers to start from.

    All workers measure at the same time. Ctrl-C keeps what was measured before. See docs/profiling.md.
    """
    require_serve_extra()
    from tilework.runtime.executor import WorkerStartFailed

    log_to_stderr()
    found = found_devices(setup.device)
    source = model_source(model, options_of(setup, found, threads=threads))
    if training is not None:
        train_cache(source, training, export or Path(CACHE_FILE), sizes, as_json=json)
        return
    asked = Devices.of(found.number(workers), cell, weights_memory).planned([source], found)
    plan = ProfilePlan(
        num_devices=asked.num_devices,
        shapes=None if sizes is None else tuple(dict.fromkeys(parse_size(size) for size in sizes.split(","))),
        degrees=None if degrees is None else _parse_degrees(degrees, asked.num_devices),
        num_runs=runs,
        combinations=combinations if mixed else 0,
        caches=() if cache is None else parse_caches(cache),
    )
    texts = PROMPTS if prompts is None else prompts_of(prompts)
    executor = _executor(source, asked)
    with user_errors(WorkerStartFailed, ProfilesUnavailable, OSError):
        store = open_profiles(profiles)
        measured = _completed(run(executor, plan, store, model, json), plan, source, texts, store, quiet=json)
        if export is not None:
            _export(export, measured, runs)
        found.show()
        _print(measured, json)
        store.save(_profile(measured))
    if len(measured.tried) < measured.num_wanted:
        done = f"{len(measured.tried)} of {measured.num_wanted} are measured"
        raise UserError(f"interrupted: {done}, and saved in {store.path}; to resume, run it again")
    console.print(f"saved in {store.path}", soft_wrap=True, style="dim")


def _completed(
    measured: Measured, plan: ProfilePlan, source: ModelSource, prompts: Sequence[str], store: Profiles, *, quiet: bool
) -> Measured:
    """Add rows of caches, unless measuring was interrupted, and the model learned from batches."""
    if plan.caches and len(measured.tried) == measured.num_wanted:
        cached = cached_rows(source, measured.graph, measured.rows, plan.caches, prompts, quiet=quiet)
        measured = replace(measured, rows=(*measured.rows, *cached))
    return replace(measured, batch_model=_learned(measured, store)) if plan.combinations else measured


def _executor(source: ModelSource, workers: Devices) -> LocalExecutor:
    from tilework.runtime.local_config import LocalConfig
    from tilework.runtime.local_executor import LocalExecutor

    return LocalExecutor(
        LocalConfig(
            num_workers=workers.number,
            cell_size=workers.cell_size,
            sources=(source,),
            weights_bytes=workers.weights_bytes,
        )
    )


def _profile(measured: Measured) -> Profile:
    return Profile(
        key=measured.key,
        origin=ProfileOrigin.PROFILE,
        rows=measured.rows,
        tilework=tilework.__version__,
        created_unix_ns=time.time_ns(),
        batch_model=measured.batch_model,
    )


def _learned(measured: Measured, store: Profiles) -> BatchLatencyModel | None:
    """Return a batch model from all batches that are known; None, with the reason printed, if there cannot be one."""
    if not can_learn():
        console.print(
            f"nothing is learned from the batches without scikit-learn; run: {install_command('learn')}", markup=False
        )
        return None
    known = store.latest(measured.key, measured.graph.pipeline)
    rows = {row_key(row): row for row in (*(known.rows if known is not None else ()), *measured.rows)}
    batch_model = learn(rows.values(), measured.graph.stepped[0])
    if batch_model is None:
        console.print(f"nothing is learned from fewer than {MIN_MIXED} mixed batches")
    return batch_model


def _parse_degrees(text: str, num_devices: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= num_devices for part in parts):
        raise UserError(
            f"degrees is {text!r}; use whole numbers from 1 to {num_devices}, the number of devices, such as 1"
        )
    return tuple(sorted({int(part) for part in parts}))


def _print(measured: Measured, json: bool) -> None:
    key = measured.key
    rows = in_order(measured.rows)
    batch_model = measured.batch_model
    if json:
        scaling = Scaling(rows)
        learned = None if batch_model is None else {"error": batch_model.error, "num_rows": batch_model.num_rows}
        print_json(asdict(key) | {"rows": [row_json(row, scaling) for row in rows], "batch_model": learned})
    else:
        print_costs(measured.table, f"{key.model}, {key.dtype}, on {key.hardware}")
    found = {(tuple(sorted(row.shapes)), row.degree) for row in rows}
    for batch, degree in measured.tried:
        if (tuple(sorted(batch)), degree) not in found:
            what = " + ".join(map(str, batch))
            console.print(f"{what} does not run at degree {degree} here; the log says why")


def _export(path: Path, measured: Measured, num_runs: int) -> None:
    table = measured.table
    made = f"tilework {tilework.__version__} profile, {num_runs} runs, {datetime.now(UTC):%Y-%m-%d}; {table.source}"
    text = jsonlib.dumps(
        table_json(replace(table, sources=dict.fromkeys(table.pipelines, made))), ensure_ascii=False, indent=1
    )
    path.write_text(text + "\n", encoding="utf-8")


_MIXED_RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """Sizes, degrees and caches to measure. None means the model's usual sizes, and all degrees that it can run at.

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
    """Results of measuring: `tried` of `num_wanted` pairs of batch and degree; those that ran have `rows`.

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


def run(executor: LocalExecutor, plan: ProfilePlan, store: Profiles, model: str, quiet: bool) -> Measured:
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
    executor: LocalExecutor, plan: ProfilePlan, store: Profiles, on_progress: Callable[[int, int], None]
) -> Measured:
    """Measure. Raises CancelledError if cancelled before anything is measured."""
    from tilework.runtime.executor import Listener
    from tilework.runtime.models.calibration_weights import lacks_room
    from tilework.runtime.models.costs import ModelMeasurer, calibration_shapes, measure

    model = (await executor.start(Listener()))[0]  # The executor itself says when a worker is lost.
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
    """Return the batches to measure: two and four of each shape, and random combinations of all shapes."""
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
    """Return the batches that earlier profiles measured in the same circumstances; they are not measured again."""
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
