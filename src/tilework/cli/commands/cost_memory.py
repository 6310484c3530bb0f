"""`tilework cost memory`: plans the device memory of a model before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from tilework.cli.console import UserError, out, print_json, require_serve_extra, user_errors
from tilework.cli.measured import parse_size
from tilework.cli.options.common import AsJson, Offload, Quantize, VaeTiling, examples, parse_bytes
from tilework.cli.options.serve import CacheMemory, StatesMemory
from tilework.core.model import DTYPES, OFFLOADS, ModelSource
from tilework.core.request import Shape
from tilework.pipelines.fits.beside import Beside

EXAMPLE = examples(
    "tilework cost memory ./flux-dev --gpu-memory 24GB",
    "tilework cost memory ./flux-dev --gpu-memory 24GB \\\n  --quantize fp8 --offload components",
    "tilework cost memory ./wan2.1 --sizes 832x480x81,1280x720x81",
)


def command(
    model: Annotated[Path, typer.Argument(help="A diffusers directory; its configurations are enough.")],
    device_memory: Annotated[
        int | None,
        typer.Option(
            "--gpu-memory",
            parser=parse_bytes,
            metavar="SIZE",
            help="Free memory of a device, as in 24GB: plan all of it.",
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option("--sizes", help="WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, separated by commas; default: the model's."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    quantize: Quantize = None,
    offload: Offload = "none",
    vae_tiling: VaeTiling = False,
    no_previews: Annotated[
        bool, typer.Option("--no-previews", help="Draw no previews, so that steps do not need the autoencoder.")
    ] = False,
    states_memory: StatesMemory = None,
    cache_memory: CacheMemory = None,
    json: AsJson = False,
) -> None:
    """Plan the device memory of a model: what goes where, what is left, and what would fit.

    Without --gpu-memory: what the decode of a clip takes beside the weights, as a whole and in tiles. The plan comes
    from the shapes of tensors; see docs/profiling.md. The exit status is 1 if a plan does not fit.
    """
    require_serve_extra()
    for name, value, known in (("dtype", dtype, DTYPES), ("offload", offload, OFFLOADS)):
        if value not in known:
            raise UserError(f"{name} is {value!r}; choose one of {', '.join(known)}")
    shapes = [] if sizes is None else [parse_size(size) for size in sizes.split(",")]
    if device_memory is None:
        _show_decodes(model, shapes, dtype, json)
        return
    from tilework.pipelines.errors import ModelError
    from tilework.pipelines.setup.quantize import parse_schemes

    with user_errors(ModelError):
        source = ModelSource(
            path=str(model),
            device="cuda",
            dtype=dtype,
            quantize=() if quantize is None else parse_schemes(quantize),
            offload=offload,
            vae_tiling=vae_tiling,
            previews=not no_previews,
        )
        fits = _show_plans(source, device_memory, Beside.of(states_memory, cache_memory), shapes, json)
    if not fits:
        raise typer.Exit(1)


def _show_plans(source: ModelSource, memory_bytes: int, beside: Beside, shapes: Sequence[Shape], json: bool) -> bool:
    """Print a plan for each size, and say whether all fit."""
    from tilework.cli.memory_plan import plan_json, plan_lines, refusal
    from tilework.pipelines.fits.plan import Planner

    planner = Planner.of(source.path)
    shapes = shapes or [planner.default_shape]
    plans = [planner.plan(source, memory_bytes, shape, beside).fitted() for shape in shapes]
    documents = []
    for plan in plans:
        largest = planner.largest(plan) if plan.fits and plan.shape.frames == 1 else None
        problem = None if plan.fits else refusal(planner, plan)
        documents.append(plan_json(plan, largest) | {"problem": problem})
        if not json:
            for line in plan_lines(plan, largest):
                out.print(line, soft_wrap=True, highlight=False, markup=False)
            if problem is not None:
                out.print(f"  does not fit: it {problem}", soft_wrap=True, highlight=False, markup=False)
    if json:
        print_json({"model": source.path, "plans": documents})
    return all(plan.fits for plan in plans)


def _show_decodes(model: Path, shapes: Sequence[Shape], dtype: str, json: bool) -> None:
    if not shapes:
        raise UserError("give --gpu-memory, as in 24GB, for a plan of all; or --sizes, for the decodes of clips")
    import torch

    from tilework.pipelines.clips.memory import autoencoder_of, decode_bytes
    from tilework.pipelines.errors import ModelError
    from tilework.pipelines.model_index import model_directory

    with user_errors(ModelError):
        vae = autoencoder_of(model_directory(str(model)) or model, getattr(torch, dtype))
    planned: list[tuple[Shape, list[int | None]]] = []
    for shape in shapes:
        needs = list[int | None]()
        for vae.use_tiling in (False, True):
            needs.append(decode_bytes(vae, shape.frames, shape.height, shape.width))
        planned.append((shape, needs))
    if json:
        lines = [{"size": str(shape), "bytes": needs[0], "tiled_bytes": needs[1]} for shape, needs in planned]
        print_json({"autoencoder": type(vae).__name__, "dtype": dtype, "decodes": lines})
        return
    table = Table("size", "whole", "with --vae-tiling", title=f"{type(vae).__name__}, {dtype}", box=box.SIMPLE)
    for shape, needs in planned:
        table.add_row(str(shape), *(f"{(one or 0) / 1e9:.2f} GB" for one in needs))
    out.print(table)
