"""Memory of a denoiser's step beside the weights: a row for each class, with the inputs of its forward pass.

The denoiser itself runs on them, on tensors that have shapes and no values, and all tensors that exist at a time are
counted (`clips.memory.TensorMeter`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from tilework.core.request import Shape
from tilework.pipelines.clips.memory import TensorMeter

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Latents:
    """Size and type of a request's latents, before a denoiser makes tokens of them."""

    frames: int
    height: int
    width: int
    dtype: torch.dtype

    def make(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=_META)

    def ids(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=_META)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Calls of a class of denoisers.

    Attributes:
        inputs: of a forward pass of its stock pipeline, with guidance, by the configuration and the latents.
        shape: what its stock pipeline draws by default, by the configuration and the pixels of a latent.
        most: latents along the longest side that the class takes, by the configuration; None: any number.
    """

    inputs: Callable[[Any, Latents], Mapping[str, Any]]
    shape: Callable[[Any, int], Shape]
    most: Callable[[Any], int | None] = lambda _config: None


def step_bytes(denoiser: Any, latents: Latents) -> int | None:
    """Return the peak bytes of a step's tensors beside weights and inputs; None if there is no row.

    `denoiser` lies on the device "meta", without its repeated blocks (`shorten`). Attention counts as a kernel that
    keeps no scores, as those of CUDA do.
    """
    row = STEPS.get(type(denoiser).__name__)
    if row is None:
        return None
    inputs = row.inputs(denoiser.config, latents)
    with torch.no_grad(), _Attention(), TensorMeter(tensors_alone=True) as meter:
        denoiser(**inputs, return_dict=False)
    return int(meter.peak_bytes)


def shorten(module: nn.Module) -> None:
    """Leave two of equal blocks in a row: each takes the same memory while it runs, and keeps nothing.

    Blocks are equal if their classes and the shapes of their weights are.
    """
    for blocks in module.modules():
        if isinstance(blocks, nn.ModuleList):
            likes = [(type(one), *(weight.shape for weight in one.parameters())) for one in blocks]
            for i in reversed(range(2, len(likes))):
                if likes[i] == likes[i - 1] == likes[i - 2]:
                    del blocks[i]


class _Attention(TorchFunctionMode):
    """Lets attention allocate only its result, while entered."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            query, _key, value, *_ = args if len(args) > 2 else (kwargs[name] for name in ("query", "key", "value"))
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return func(*args, **(kwargs or {}))


_TEXT = 512  # Tokens that the pipelines of these models fill a prompt up to.
_CLIP = 77
_SD3_TEXT = _CLIP + 256


def _tokens(latents: Latents, patch: int = 2) -> int:
    return (latents.height // patch) * (latents.width // patch)


def _flux(config: Any, latents: Latents) -> Mapping[str, Any]:
    return {
        "hidden_states": latents.make(1, _tokens(latents), config.in_channels),
        "encoder_hidden_states": latents.make(1, _TEXT, config.joint_attention_dim),
        "pooled_projections": latents.make(1, config.pooled_projection_dim),
        "timestep": latents.make(1),
        "guidance": latents.make(1) if config.guidance_embeds else None,
        "img_ids": latents.ids(_tokens(latents), 3),
        "txt_ids": latents.ids(_TEXT, 3),
    }


def _flux_2(config: Any, latents: Latents) -> Mapping[str, Any]:
    return {
        "hidden_states": latents.make(1, _tokens(latents), config.in_channels),
        "encoder_hidden_states": latents.make(1, _TEXT, config.joint_attention_dim),
        "timestep": latents.make(1),
        "guidance": latents.make(1) if getattr(config, "guidance_embeds", True) else None,
        "img_ids": latents.ids(1, _tokens(latents), 4),
        "txt_ids": latents.ids(1, _TEXT, 4),
    }


def _sd3(config: Any, latents: Latents) -> Mapping[str, Any]:
    return {
        "hidden_states": latents.make(2, config.in_channels, latents.height, latents.width),
        "encoder_hidden_states": latents.make(2, _SD3_TEXT, config.joint_attention_dim),
        "pooled_projections": latents.make(2, config.pooled_projection_dim),
        "timestep": latents.make(2),
    }


def _u_net(config: Any, latents: Latents) -> Mapping[str, Any]:
    inputs = {
        "sample": latents.make(2, config.in_channels, latents.height, latents.width),
        "timestep": latents.ids(1),
        "encoder_hidden_states": latents.make(2, _CLIP, config.cross_attention_dim),
    }
    if config.addition_embed_type != "text_time":
        return inputs
    text = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {**inputs, "added_cond_kwargs": {"text_embeds": latents.make(2, text), "time_ids": latents.make(2, 6)}}


def _qwen(config: Any, latents: Latents) -> Mapping[str, Any]:
    return {
        "hidden_states": latents.make(1, _tokens(latents), config.in_channels),
        "encoder_hidden_states": latents.make(1, _TEXT, config.joint_attention_dim),
        "timestep": latents.make(1),
        "img_shapes": [[(1, latents.height // 2, latents.width // 2)]],
    }


def _wan(config: Any, latents: Latents) -> Mapping[str, Any]:
    return {
        "hidden_states": latents.make(1, config.in_channels, latents.frames, latents.height, latents.width),
        "encoder_hidden_states": latents.make(1, _TEXT, config.text_dim),
        "timestep": latents.make(1),
    }


def _square(side: int) -> Callable[[Any, int], Shape]:
    return lambda _config, _pixels: Shape(side, side)


def _configured(config: Any, pixels: int) -> Shape:
    return Shape(config.sample_size * pixels, config.sample_size * pixels)


STEPS: Mapping[str, StepRow] = {
    "FluxTransformer2DModel": StepRow(inputs=_flux, shape=_square(1024)),
    "Flux2Transformer2DModel": StepRow(inputs=_flux_2, shape=_square(1024)),
    "QwenImageTransformer2DModel": StepRow(inputs=_qwen, shape=_square(1024)),
    "SD3Transformer2DModel": StepRow(
        inputs=_sd3, shape=_configured, most=lambda config: config.pos_embed_max_size * config.patch_size
    ),
    "UNet2DConditionModel": StepRow(inputs=_u_net, shape=_configured),
    "WanTransformer3DModel": StepRow(inputs=_wan, shape=lambda _config, _pixels: Shape(480, 832, 81)),
}
