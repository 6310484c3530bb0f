"""`tilework profile`: what each stage costs on these devices, at each size and degree."""

from __future__ import annotations

import asyncio
import json as jsonlib
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import tilework
from tilework.cli.generate import default_dtype
from tilework.cli.measured import ProfilesFile, Scaling, cost_table, in_order, open_profiles, parse_size, row_json
from tilework.cli.output import UserError, console, out, print_json, progress, require_serve_extra, user_errors
from tilework.core.request import Shape
from tilework.core.wire import Batch, CostRow, ModelInfo, ModelSource, Report
from tilework.cost.profiles import Kind, Profile, ProfileKey, ProfilesUnavailable

if TYPE_CHECKING:
    from tilework.runtime.costs import Progress
    from tilework.runtime.executor import LocalExecutor

EXAMPLE = (
    "Examples: tilework profile  |  "
    "tilework profile ./flux-dev --device cuda --workers 4 --degrees 1,2,4 --sizes 512,1024,1024x768"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What to measure; None is left to the model: its usual sizes, all degrees that it can."""

    workers: int
    shapes: tuple[Shape, ...] | None
    degrees: tuple[int, ...] | None
    num_runs: int


@dataclass(frozen=True, slots=True)
class _Measured:
    key: ProfileKey
    wanted: Sequence[tuple[Batch, int]]
    rows: tuple[CostRow, ...]


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
    profiles: ProfilesFile = None,
    export: Annotated[Path | None, typer.Option("--out", help="Write the rows as a cost table, too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure every stage of a model on this machine, at each size and degree, and keep it for servers to start from.

    All workers measure at the same time, as they will serve. See docs/profiling.md.
    """
    require_serve_extra()
    from tilework.runtime.executor import LocalConfig, LocalExecutor, WorkerStartFailed

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    wish = _Wish(
        workers=workers,
        shapes=None if sizes is None else tuple(dict.fromkeys(parse_size(size) for size in sizes.split(","))),
        degrees=None if degrees is None else _parse_degrees(degrees, workers),
        num_runs=runs,
    )
    source = ModelSource(path=model, device=device, dtype=dtype or default_dtype(device), threads=threads)
    executor = LocalExecutor(LocalConfig(num_workers=workers, source=source))
    with user_errors(WorkerStartFailed, ProfilesUnavailable, OSError):
        measured = _run(executor, wish, model, quiet=json)
        if export is not None:
            _export(export, measured, runs)
        _print(measured, json)
        store = open_profiles(profiles)
        store.save(
            Profile(
                key=measured.key,
                kind=Kind.PROFILE,
                rows=measured.rows,
                tilework=tilework.__version__,
                created_unix_ns=time.time_ns(),
            )
        )
        console.print(f"saved in {store.path}", soft_wrap=True, style="dim")


class _Listener:
    """Nothing is served meanwhile, and the executor itself says when a worker is lost while it measures."""

    def on_report(self, gpu: int, report: Report) -> None: ...
    def on_lost(self, gpu: int, reason: str) -> None: ...
    def on_joined(self, gpu: int) -> None: ...
    def on_given_up(self) -> None: ...


def _run(executor: LocalExecutor, wish: _Wish, model: str, quiet: bool) -> _Measured:
    with ExitStack() as stack:
        status = stack.enter_context(console.status(f"starting {wish.workers} workers with {model}"))
        bar = progress(quiet)
        task = bar.add_task("measuring", total=None)

        def on_progress(num_done: int, num_all: int) -> None:
            if num_done == 0:
                status.stop()
                stack.enter_context(bar)
            bar.update(task, completed=num_done, total=num_all)

        return asyncio.run(_measure(executor, wish, on_progress))


async def _measure(executor: LocalExecutor, wish: _Wish, on_progress: Progress) -> _Measured:
    from tilework.runtime.costs import calibration_shapes, measure

    info = await executor.start(_Listener())
    try:
        shapes = wish.shapes or calibration_shapes(info)
        _check_shapes(shapes, info)
        wanted = [((shape,), degree) for shape in shapes for degree in _degrees(wish, info)]
        rows = await measure(executor, wanted, wish.num_runs, on_progress)
        if not rows:
            raise UserError("the model ran at none of these sizes; the workers' messages say why")
        return _Measured(executor.profile_key, wanted, rows)
    finally:
        await executor.stop()


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
    key, rows = measured.key, in_order(measured.rows)
    if json:
        scaling = Scaling(rows)
        circumstances = asdict(key)
        print_json(circumstances | {"rows": [row_json(row, scaling) for row in rows]})
    else:
        title = f"{key.model}, {key.dtype}, on {key.hardware}"
        out.print(cost_table(rows, title))
    found = {(row.shapes, row.degree) for row in rows}
    for batch, degree in measured.wanted:
        if (batch, degree) not in found:
            console.print(
                f"{' + '.join(map(str, batch))} does not run at degree {degree} here; the workers' messages say why"
            )


def _export(path: Path, measured: _Measured, num_runs: int) -> None:
    table = measured.key.table(tuple(in_order(measured.rows)))
    made = f"tilework {tilework.__version__} profile, {num_runs} runs, {datetime.now(UTC):%Y-%m-%d}; {table.source}"
    text = jsonlib.dumps(replace(table, source=made).to_json(), ensure_ascii=False, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
