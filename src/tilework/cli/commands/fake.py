"""`tilework fake`: a model folder of real size with random weights, to measure time and memory without a download."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilework.cli.console import UserError, console, out, print_json, require_serve_extra
from tilework.cli.options.common import AsJson, examples

if TYPE_CHECKING:
    import torch

    from tilework.pipelines.fake.component import FakeModel

EXAMPLE = examples("tilework fake FLUX.1-dev ./flux-dev", "tilework fake Qwen-Image ./qwen --empty", "tilework fake")
_DTYPES = ("bfloat16", "float16", "float32")


def command(
    model: Annotated[str | None, typer.Argument(help="Such as FLUX.1-dev; without it the models are listed.")] = None,
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", help="An empty or new directory.")] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}.")] = _DTYPES[0],
    device: Annotated[str, typer.Option(help="cpu or cuda: where the weights are made; cuda takes seconds.")] = "cpu",
    empty: Annotated[
        bool, typer.Option("--empty", help="Weights are zeros that take no room on disk; enough for plans of memory.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Make a model folder of real size with random weights, to measure time and memory without a download.

    The configurations are those of the named model, so that steps and loads take as long and as much memory as its
    own. It draws noise. Tokenizers make a token of each byte: prompts are longer than with the model's own.
    A folder in /dev/shm lies in memory.
    """
    require_serve_extra()
    with console.status("importing diffusers"):
        from tilework.pipelines.fake.models import MODELS
    if model is None:
        _list(json)
        return
    if model not in MODELS:
        raise UserError(f"MODEL is {model!r}; choose one of {', '.join(MODELS)}")
    if directory is None:
        raise UserError("DIR is missing; name the directory to write, such as ./model")
    if dtype not in _DTYPES:
        raise UserError(f"dtype is {dtype!r}; choose one of {', '.join(_DTYPES)}")
    start_s = time.monotonic()
    num_bytes = _write(MODELS[model], directory, dtype, "meta" if empty else device)
    took_s = time.monotonic() - start_s
    if json:
        print_json({"model": model, "directory": str(directory), "weights_bytes": num_bytes, "seconds": took_s})
    else:
        out.print(
            f"{directory}: {num_bytes / 1e9:.1f} GB of weights in {took_s:.0f} s", highlight=False, soft_wrap=True
        )


def _write(model: FakeModel, directory: Path, dtype: str, device: str) -> int:
    import torch

    from tilework.pipelines.fake.write import write_model
    from tilework.pipelines.loading import quiet

    quiet()
    torch.manual_seed(0)
    with console.status(f"writing {directory}") as status:

        def note(name: str, num_bytes: int) -> None:
            status.update(f"writing {directory}: {name}, {num_bytes / 1e9:.1f} GB, is written")

        try:
            return write_model(model, directory, getattr(torch, dtype), _device(device), note)
        except FileExistsError:
            raise UserError(f"DIR is {directory}, which has files; name an empty or new directory") from None


def _device(name: str) -> torch.device:
    import torch

    if name not in ("cpu", "cuda", "meta"):
        raise UserError(f"device is {name!r}; choose cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but torch sees no such device; choose cpu")
    return torch.device(name)


def _list(json: bool) -> None:
    from tilework.pipelines.fake.models import MODELS

    if json:
        print_json([{"model": name, "pipeline": one.pipeline, "source": one.source} for name, one in MODELS.items()])
        return
    for name, one in MODELS.items():
        out.print(f"{name:18} {one.pipeline:26} {one.source}", highlight=False, soft_wrap=True)
