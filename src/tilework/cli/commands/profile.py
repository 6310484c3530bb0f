"""`tilework profile`: what each stage costs on these devices, at each size and degree."""

from __future__ import annotations

import asyncio
import json as jsonlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import tilework
from tilework.cli.console import UserError, console, print_json, progress, require_serve_extra, user_errors
from tilework.cli.measured import Scaling, in_order, open_profiles, parse_size, print_costs, row_json
from tilework.cli.models import model_source
from tilework.cli.options.common import AsJson, ProfilesFile, examples
from tilework.core.request import Shape
from tilework.core.wire import Batch, CostRow, ModelInfo, Report
from tilework.cost.batch_latency import BatchLatencyModel
from tilework.cost.learning import MIN_MIXED, can_learn, learn
from tilework.cost.profile import Profile, ProfileKey, ProfileOrigin
from tilework.cost.profiles import Profiles, ProfilesUnavailable
from tilework.cost.rows import row_key
from tilework.cost.table import CostTable
from tilework.cost.table_file import table_json

if TYPE_CHECKING:
    from tilework.runtime.executor import LocalExecutor

EXAMPLE = examples(
    "tilework profile",
    "tilework profile ./flux-dev --device cuda --workers 4 \\\n  --degrees 1,2,4 --sizes 512,1024,1024x768",
    "tilework profile ./sdxl --device cuda --mixed",
)
_MIXED_RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What to measure; None is left to the model: its usual sizes, all degrees that it can.

    Beside single outputs this many `combinations` of several are measured.
    """

    workers: int
    shapes: tuple[Shape, ...] | None
    degrees: tuple[int, ...] | None
    num_runs: int
    combinations: int


@dataclass(frozen=True, slots=True)
class _Measured:
    """`tried` of `num_wanted` batches at degrees; those that run have `rows`. `batch_model` is what they teach."""

    key: ProfileKey
    tried: Sequence[tuple[Batch, int]]
    num_wanted: int
    rows: tuple[CostRow, ...]
    batch_model: BatchLatencyModel | None = None

    @property
    def table(self) -> CostTable:
        batch_models = {} if self.batch_model is None else {self.rows[0].pipeline: self.batch_model}
        return self.key.table(tuple(in_order(self.rows)), batch_models)


def command(
    model: Annotated[str, typer.Argument(help="shapes, a diffusers directory, or a hub id.")] = "shapes",
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Worker processes, one per device.")] = 2,
    degrees: Annotated[
        str | None, typer.Option(help="Group sizes, such as 1,2,4; default: powers of two up to --workers.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Such as 512,1024x768; default: 0.5, 1 and 1.5 times the model's own.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, max=500, help="Timed runs of each stage, after three to warm up.")] = 20,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default by device.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each worker.")] = 1,
    mixed: Annotated[bool, typer.Option("--mixed", help="Measure batches of several outputs, too.")] = False,
    combinations: Annotated[int, typer.Option(min=1, max=5000, help="How many of them, with --mixed.")] = 200,
    profiles: ProfilesFile = None,
    export: Annotated[Path | None, typer.Option("--out", help="Write the rows as a cost table, too.")] = None,
    json: AsJson = False,
) -> None:
    """Measure every stage of a model on this machine, at each size and degree, and keep it for servers to start from.

    All workers measure at the same time, as they will serve. What was measured before Ctrl-C is kept. See
    docs/profiling.md.
    """
    require_serve_extra()
    from tilework.runtime.executor import LocalConfig, LocalExecutor, WorkerStartFailed

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    wish = _Wish(
        workers=workers,
        shapes=None if sizes is None else tuple(dict.fromkeys(parse_size(size) for size in sizes.split(","))),
        degrees=None if degrees is None else _parse_degrees(degrees, workers),
        num_runs=runs,
        combinations=combinations if mixed else 0,
    )
    source = model_source(model, device=device, dtype=dtype, threads=threads)
    executor = LocalExecutor(LocalConfig(num_workers=workers, source=source))
    with user_errors(WorkerStartFailed, ProfilesUnavailable, OSError):
        store = open_profiles(profiles)
        measured = _run(executor, wish, store, model, quiet=json)
        if mixed:
            measured = replace(measured, batch_model=_learned(measured, store))
        if export is not None:
            _export(export, measured, runs)
        _print(measured, json)
        store.save(
            Profile(
                key=measured.key,
                origin=ProfileOrigin.PROFILE,
                rows=measured.rows,
                tilework=tilework.__version__,
                created_unix_ns=time.time_ns(),
                batch_model=measured.batch_model,
            )
        )
    if len(measured.tried) < measured.num_wanted:
        done = f"{len(measured.tried)} of {measured.num_wanted} are measured"
        raise UserError(f"interrupted: {done}, and saved in {store.path}; to go on, run it again")
    console.print(f"saved in {store.path}", soft_wrap=True, style="dim")


class _Listener:
    """Nothing is served meanwhile, and the executor itself says when a worker is lost while it measures."""

    def on_report(self, device_id: int, report: Report) -> None: ...
    def on_lost(self, device_id: int, reason: str) -> None: ...
    def on_joined(self, device_id: int) -> None: ...
    def on_given_up(self) -> None: ...
    def on_loading(self, num_ready: int) -> None: ...


def _run(executor: LocalExecutor, wish: _Wish, store: Profiles, model: str, quiet: bool) -> _Measured:
    with ExitStack() as stack:
        status = stack.enter_context(console.status(f"starting {wish.workers} workers with {model}"))
        bar = progress(quiet)
        task = bar.add_task("measuring", total=None)

        def on_progress(num_done: int, num_all: int) -> None:
            if num_done == 0:
                status.stop()
                stack.enter_context(bar)
            bar.update(task, completed=num_done, total=num_all)

        return asyncio.run(_measure(executor, wish, store, on_progress))


async def _measure(
    executor: LocalExecutor, wish: _Wish, store: Profiles, on_progress: Callable[[int, int], None]
) -> _Measured:
    """Raises CancelledError if it is cancelled before anything is measured."""
    from tilework.runtime.costs import calibration_shapes, measure

    info = await executor.start(_Listener())
    rows: list[CostRow] = []
    num_tried = 0
    try:
        shapes = wish.shapes or calibration_shapes(info)
        _check_shapes(shapes, info)
        singles = [((shape,), degree) for shape in shapes for degree in _degrees(wish, info)]
        profiled = _profiled(store, executor.profile_key) if wish.combinations else ()
        batches = [(batch, 1) for batch in _batches(wish, shapes, info) if batch not in profiled]
        wanted = [*singles, *batches]
        on_progress(0, len(wanted))
        try:
            for part, num_runs in ((singles, wish.num_runs), (batches, min(wish.num_runs, _MIXED_RUNS))):
                async for found in measure(executor, part, num_runs):
                    rows += found
                    num_tried += 1
                    on_progress(num_tried, len(wanted))
        except asyncio.CancelledError:
            if not rows:
                raise
        if not rows:
            raise UserError("the model ran at none of these sizes; the workers' messages say why")
        return _Measured(executor.profile_key, wanted[:num_tried], len(wanted), tuple(rows))
    finally:
        await executor.stop()


def _batches(wish: _Wish, shapes: Sequence[Shape], info: ModelInfo) -> list[Batch]:
    """Two and four of each shape, and the combinations that are wished for, of any shapes."""
    from tilework.runtime.costs import random_batches

    if not wish.combinations:
        return []
    if not info.packs:
        raise UserError(f"requests of {info.name} cannot share a forward pass; leave out --mixed")
    if wish.degrees is not None and wish.degrees[0] != 1:
        raise UserError(
            "with --mixed --degrees must have 1: batches run on one device, and so must their members alone"
        )
    alike = [(shape,) * number for shape in shapes for number in (2, 4)]
    return list(dict.fromkeys((*alike, *random_batches(shapes, wish.combinations))))


def _profiled(store: Profiles, key: ProfileKey) -> set[Batch]:
    """What earlier profiles have measured in the same circumstances; an interrupted one is so gone on with."""
    entries = (entry for entry in store.entries() if (entry.key, entry.origin) == (key, ProfileOrigin.PROFILE))
    return {tuple(sorted(row.shapes)) for entry in entries for row in entry.rows}


def _learned(measured: _Measured, store: Profiles) -> BatchLatencyModel | None:
    """From all batches that are known, of which these are the latest; None, with the reason told, if it cannot be."""
    if not can_learn():
        console.print("nothing is learned from the batches without scikit-learn; run: pip install 'tilework\\[learn]'")
        return None
    known = store.latest(measured.key)
    rows = {row_key(row): row for row in (*(known.rows if known is not None else ()), *measured.rows)}
    batch_model = learn(rows.values(), measured.rows[0].pipeline)
    if batch_model is None:
        console.print(f"nothing is learned from fewer than {MIN_MIXED} mixed batches")
    return batch_model


def _parse_degrees(text: str, workers: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= workers for part in parts):
        raise UserError(f"degrees is {text!r}; use whole numbers from 1 to the number of --workers, such as 1,2")
    return tuple(sorted({int(part) for part in parts}))


def _degrees(wish: _Wish, info: ModelInfo) -> tuple[int, ...]:
    most = min(info.max_degree, wish.workers)
    if wish.degrees is None:
        return tuple(1 << power for power in range(most.bit_length()))
    if wish.degrees[-1] > most:
        raise UserError(f"{info.name} runs on at most {info.max_degree} devices at once, not {wish.degrees[-1]}")
    return wish.degrees


def _check_shapes(shapes: Sequence[Shape], info: ModelInfo) -> None:
    for shape in shapes:
        if any(side % info.side_multiple or side > info.max_side for side in (shape.height, shape.width)):
            raise UserError(
                f"size is {shape}; sides of {info.name} are multiples of {info.side_multiple} up to {info.max_side}"
            )


def _print(measured: _Measured, json: bool) -> None:
    key, rows, batch_model = measured.key, in_order(measured.rows), measured.batch_model
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
            console.print(f"{what} does not run at degree {degree} here; the workers' messages say why")


def _export(path: Path, measured: _Measured, num_runs: int) -> None:
    table = measured.table
    made = f"tilework {tilework.__version__} profile, {num_runs} runs, {datetime.now(UTC):%Y-%m-%d}; {table.source}"
    text = jsonlib.dumps(table_json(replace(table, source=made)), ensure_ascii=False, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
