"""Stable Diffusion 3 with one more stage: an upscaler that doubles the picture.

Try it: PYTHONPATH=examples tilework generate "a red circle" --adapter upscale_sd3:UpscaledStableDiffusion3 -o large.png

The stage is an entry of the pipeline's graph and a method. It is scheduled, measured, moved between devices and shown
in timelines like any other: nothing else knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import interpolate

from tilework.core.graph.stage import StageSpec
from tilework.core.wire.spec import Spec
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.family import Values
from tilework.pipelines.staged import one_by_one


class UpscaledStableDiffusion3(StableDiffusion3):
    """The stock picture, resized to twice its sides (bicubic, with antialiasing). Requests name the stock size."""

    stages = (*StableDiffusion3.stages, StageSpec(name="upscale", inputs=("picture",), outputs=("large_picture",)))

    def __init__(self, pipeline: Any, name: str, overrides: Mapping[str, Any], library: str) -> None:
        super().__init__(pipeline, name, overrides, library)
        self._at_once["upscale"] = one_by_one(self._run_upscale)

    def _run_upscale(self, spec: Spec, values: Values) -> Values:
        """(height, width, 3) to (2 height, 2 width, 3), 8 bits."""
        small = values["picture"].permute(2, 0, 1)[None].float()
        large = interpolate(small, scale_factor=2, mode="bicubic", antialias=True)
        return {"large_picture": large[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8).contiguous()}
