"""`tilework fake`: a model folder of real size with random weights, to measure time and memory without a download."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilework.cli.console import UserError, console, out, print_json, require_serve_extra
from tilework.cli.options.common import AsJson, examples
from tilework.ownership.own import NotOwn, make_own_folder

if TYPE_CHECKING:
    import torch

    from tilework.pipelines.fake.component import FakeModel

EXAMPLE = examples(
    "tilework fake FLUX.1-dev ./flux-dev",
    "tilework fake SD3.5-medium --in-memory",
    "tilework fake Qwen-Image ./qwen --empty",
    "tilework fake",
)
_DTYPES = ("bfloat16", "float16", "float32")
_DEVICES = ("auto", "cpu", "cuda")
_MEMORY = Path("/dev/shm")


def command(
    model: Annotated[str | None, typer.Argument(help="Model, such as FLUX.1-dev; without it, list the models.")] = None,
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", help="An empty or new directory.")] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}.")] = _DTYPES[0],
    in_memory: Annotated[
        bool, typer.Option("--in-memory", help=f"Write {_MEMORY}/tilework-MODEL, so that loading waits for no disk.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="Device that makes the weights: cpu, cuda, or auto (cuda if there is one).")
    ] = _DEVICES[0],
    empty: Annotated[
        bool, typer.Option("--empty", help="Write zeros that take no room on disk; enough for plans of memory.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Make a model folder of real size with random weights, to measure time and memory without a download.

    The configurations are those of the named model, so that steps and loads take as long and as much memory as its
    own. The model draws noise. Tokenizers make a token of each byte: prompts are longer than with the model's own.
    A folder in memory stays there until you remove it.
    """
    require_serve_extra()
    with console.status("importing diffusers"):
        from tilework.pipelines.fake.models import MODELS
    if model is None:
        _list(json)
        return
    if model not in MODELS:
        raise UserError(f"MODEL is {model!r}; choose one of {', '.join(MODELS)}")
    if (directory is None) != in_memory:
        if in_memory:
            raise UserError(f"DIR is {directory}, and --in-memory names a folder itself; leave one of them out")
        raise UserError("DIR is missing; name the directory to write, such as ./model, or give --in-memory")
    directory = directory or _in_memory(model)
    if dtype not in _DTYPES:
        raise UserError(f"dtype is {dtype!r}; choose one of {', '.join(_DTYPES)}")
    start_s = time.monotonic()
    num_bytes = _write(MODELS[model], directory, dtype, "meta" if empty else device)
    took_s = time.monotonic() - start_s
    if json:
        print_json({"model": model, "directory": str(directory), "weights_bytes": num_bytes, "seconds": took_s})
    else:
        text = f"{directory}: {num_bytes / 1e9:.1f} GB of weights in {took_s:.0f} s"
        hint = f"; remove it when you are done: rm -r {directory}" if in_memory else ""
        out.print(f"{text}{hint}", highlight=False, soft_wrap=True)


def _in_memory(model: str) -> Path:
    """Return the folder for a model in shared memory. Raises UserError if another user has made it first."""
    try:
        return make_own_folder(_MEMORY / f"tilework-{model}")
    except (NotOwn, OSError) as error:
        raise UserError(f"DIR: {error}, or name another directory") from error


def _write(model: FakeModel, directory: Path, dtype: str, device: str) -> int:
    import torch

    from tilework.pipelines.fake.write import bytes_of, write_model
    from tilework.pipelines.loading import quiet

    quiet()
    torch.manual_seed(0)
    if device != "meta":
        _require_room(directory, bytes_of(model, getattr(torch, dtype)))
    with console.status(f"writing {directory}") as status:

        def note(name: str, num_bytes: int) -> None:
            status.update(f"writing {directory}: {name}, {num_bytes / 1e9:.1f} GB, is written")

        try:
            return write_model(model, directory, getattr(torch, dtype), _device(device), note)
        except FileExistsError:
            raise UserError(f"DIR is {directory}, which has files; name an empty or new directory") from None


def _require_room(directory: Path, num_bytes: int) -> None:
    disk = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    free_bytes = shutil.disk_usage(disk).free
    if num_bytes > free_bytes:
        raise UserError(
            f"DIR is {directory}, where {free_bytes / 1e9:.1f} GB are free, and the weights take {num_bytes / 1e9:.1f} "
            "GB; name a directory with more room, or give --empty"
        )


def _device(name: str) -> torch.device:
    import torch

    if name not in (*_DEVICES, "meta"):
        raise UserError(f"device is {name!r}; choose one of {', '.join(_DEVICES)}")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
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
