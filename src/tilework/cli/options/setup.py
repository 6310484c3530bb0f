"""The options of how a model is set up, which all commands that run models have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilework.cli.options.common import (
    Attention,
    Compile,
    CopyStream,
    CudaGraphs,
    Device,
    Dtype,
    Offload,
    Quantize,
    VaeTiling,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupGroup:
    """What a model runs on, in which numbers, and what of it is where."""

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
