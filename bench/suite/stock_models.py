"""Pipelines of the zoo (`tests/zoo`) with denoisers that are large enough to measure, and as tiny as they are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import diffusers

from zoo import flux, qwen, stable_diffusion_3, stable_diffusion_xl, wan
from zoo.model import ZooModel
from zoo.registry import ZOO, build

_SIDE = {"height": 256, "width": 256}
_CLIP = {"height": 128, "width": 128, "num_frames": 9}


def large(name: str, steps: int) -> ZooModel:
    """A model of the zoo whose step takes 50 to 200 ms on one CPU core."""
    parts, size = _LARGE[name]
    return replace(ZOO[name], components=parts, inputs={**ZOO[name].inputs, **size, "num_inference_steps": steps})


def tiny(name: str, steps: int) -> ZooModel:
    """The model of the zoo itself, whose step takes a few milliseconds."""
    return replace(ZOO[name], inputs={**ZOO[name].inputs, "num_inference_steps": steps})


def pipeline(model: ZooModel) -> Any:
    """A new pipeline of a model, with the same random weights each time."""
    return build(model)


def _qwen() -> Any:
    sizes = {"num_layers": 6, "num_attention_heads": 6, "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12)}
    return qwen.qwen(transformer=diffusers.QwenImageTransformer2DModel(**qwen.SIZES | sizes))


def _wan() -> Any:
    return wan.wan({"num_layers": 6, "num_attention_heads": 6, "attention_head_dim": 36, "ffn_dim": 864})


def _sdxl() -> Any:
    widths = {"block_out_channels": (64, 128), "attention_head_dim": (4, 8), "norm_num_groups": 16}
    return stable_diffusion_xl.sdxl(unet_options=widths)


def _flux() -> Any:
    sizes = {"num_layers": 4, "num_single_layers": 8, "num_attention_heads": 8, "attention_head_dim": 32}
    return flux.flux(sizes | {"axes_dims_rope": (8, 12, 12)})


def _sd3() -> Any:
    sizes = {"num_layers": 6, "num_attention_heads": 8, "attention_head_dim": 32, "caption_projection_dim": 256}
    return stable_diffusion_3.sd3(sizes)


_LARGE: Mapping[str, tuple[Callable[[], Mapping[str, Any]], Mapping[str, int]]] = {
    "qwen-image": (_qwen, _SIDE),
    "wan21": (_wan, _CLIP),
    "sdxl": (_sdxl, _SIDE),
    "flux-dev": (_flux, _SIDE),
    "sd3": (_sd3, _SIDE),
}
