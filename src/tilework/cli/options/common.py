"""Options that several commands have, and how examples are written below a command's help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

# Where and how a model runs.
Device = Annotated[str, typer.Option(envvar="TILEWORK_DEVICE", help="auto (CUDA if there is any), cpu or cuda.")]
Dtype = Annotated[
    str, typer.Option(help="auto (bfloat16 on cards that have it, float32 on CPUs), float32, bfloat16 or float16.")
]
WorkerThreads = Annotated[int, typer.Option(min=1, help="CPU threads of each worker.")]
VaeTiling = Annotated[
    bool,
    typer.Option("--vae-tiling", help="Decode in tiles: less memory, other pictures (docs/serving.md)."),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="int8|fp8|nf4|nvfp4|FILE.gguf[,NAME=...]",
        help="Quantise the weights of the denoiser, and of other components by name, or take them from a file that has "
        "them quantised: less memory, other pictures "
        "(docs/serving.md). Needs the extra quantize.",
    ),
]
Offload = Annotated[
    str,
    typer.Option(
        help="What lies on the device: none: all weights; components: those of the stage that runs, as with "
        "--weights-memory; layers: those of the layer that runs, which is slow.",
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        help="Kernel of attention, which decides last bits: native (torch chooses), cudnn, efficient, flash or math."
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
        help="On CUDA, copy states and weights by a stream of their own, beside what runs; not tried on a GPU yet.",
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
        help="Serves the model in place of the usual adapter: a pipeline of your own (docs/models.md), or an "
        "adapter, for example with one more stage (docs/change.md).",
    ),
]

# What is simulated.
DevicesPerNode = Annotated[
    int | None,
    typer.Option(min=1, help="Devices of a node, which no group leaves; default: the cost table's."),
]
SwitchMs = Annotated[
    float,
    typer.Option(min=0, help="Time lost when devices change to another job, or a job to other devices."),
]
Jitter = Annotated[float, typer.Option(min=0, max=1, help="Relative standard deviation of each duration.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Processes to use; default: one per core.")]


def examples(*commands: str) -> str:
    """The end of a command's help: one example per line, kept as written (that is what \\b asks for)."""
    lines = [line for command in commands for line in command.split("\n")]
    return "\b\n" + "\n".join(["Examples:" if len(commands) > 1 else "Example:", *(f"  {line}" for line in lines)])
