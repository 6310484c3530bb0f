"""Options that several commands have, amounts of memory as text, and examples below a command's help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

# Devices and setup of models.
Device = Annotated[str, typer.Option(envvar="TILEWORK_DEVICE", help="auto (CUDA if there is any), cpu or cuda.")]
Dtype = Annotated[
    str, typer.Option(help="auto (bfloat16 on cards that have it, float32 on CPUs), float32, bfloat16 or float16.")
]
WorkerThreads = Annotated[int, typer.Option(min=1, help="CPU threads of each worker.")]
VaeTiling = Annotated[
    bool,
    typer.Option("--vae-tiling", help="Decode in tiles: less memory, other images (docs/serving.md)."),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="int8|fp8|nf4|nvfp4|FILE.gguf[,NAME=...]",
        help="Quantise the weights of the denoiser, and of other components by name, or read quantised weights from a "
        "file: less memory, other images (docs/serving.md). Needs the extra quantize.",
    ),
]
Offload = Annotated[
    str,
    typer.Option(
        help="Weights to keep on the device: none: all; components: those of the running stage, as with "
        "--weights-memory; layers: those of the running layer, which is slow.",
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        help="Attention kernel, which decides last bits: native (torch chooses), cudnn, efficient, flash or math."
    ),
]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Compile the blocks of the denoiser: faster, after minutes at the first start."),
]
CudaGraphs = Annotated[
    bool,
    typer.Option(
        "--cuda-graphs",
        help="On CUDA, record the steps of each size and batch as graphs, so that the GPU never waits for Python.",
    ),
]
CopyStream = Annotated[
    bool,
    typer.Option(
        "--copy-stream",
        help="On CUDA, copy states and weights on a stream of their own while others run; not tried on a GPU yet.",
    ),
]
ProfilesFile = Annotated[
    Path | None,
    typer.Option("--profiles", envvar="TILEWORK_PROFILES", help="Profile database; default in the user's cache."),
]

Adapter = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:CLASS",
        help="Class that serves the model in place of the usual adapter: your own pipeline (docs/models.md), or an "
        "adapter, for example with one more stage (docs/change.md).",
    ),
]

# Options of simulations.
DevicesPerNode = Annotated[
    int | None,
    typer.Option(min=1, help="Devices per node; a group lies within one node. Default: the cost table's."),
]
SwitchMs = Annotated[
    float,
    typer.Option(min=0, help="Milliseconds lost when devices change to another job, or a job to other devices."),
]
Jitter = Annotated[float, typer.Option(min=0, max=1, help="Relative standard deviation of each duration.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Processes to use; default: one per core.")]


def examples(*commands: str) -> str:
    """Return the end of a command's help: one example per line, kept as written (that is what \\b asks for)."""
    lines = [line for command in commands for line in command.split("\n")]
    return "\b\n" + "\n".join(["Examples:" if len(commands) > 1 else "Example:", *(f"  {line}" for line in lines)])


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def parse_bytes(text: str) -> int:
    """Return the bytes of "800MB" (powers of 1000), "2GiB" (powers of 1024) and the like.

    Raises:
        typer.BadParameter: it is not such a text, or less than a mebibyte.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not an amount of memory; write one with its unit, as in 800MB or 2GiB")
    num_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
    if num_bytes < 1 << 20:
        raise typer.BadParameter(f"{text!r} is less than a mebibyte; give at least 1MiB")
    return num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupGroup:
    """Options of a model's device, its numbers, and the place of its weights."""

    heading: ClassVar[str] = "Setup"
    device: Device = "auto"
    dtype: Dtype = "auto"
    quantize: Quantize = None
    offload: Offload = "none"
    attention: Attention = "native"
    compiles: Compile = False
    cuda_graphs: CudaGraphs = False
    copy_stream: CopyStream = False
    vae_tiling: VaeTiling = False
