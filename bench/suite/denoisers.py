"""Families around small denoisers with random weights, and requests of theirs in the middle of denoising."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch

from tilework.core.wire.spec import Spec
from tilework.pipelines.draw import begin_steps
from tilework.pipelines.families.flux import Flux
from tilework.pipelines.families.latent_state import Conditioning, LatentState
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.families.sdxl import StableDiffusionXL
from tilework.pipelines.staged import StagedPipeline

TEXT_TOKENS, TEXT_WIDTH, POOLED_WIDTH = 77, 64, 32
FAMILIES = ("sd3", "flux", "sdxl")


def build(family: str, width: int = 1) -> StagedPipeline:
    """One of FAMILIES, without text encoders, with about half a million weights; latents have 1/8 of a picture's sides.

    Conditioning is drawn from the seed. With `width` above 1 the U-Net of sdxl has so many times the channels; the
    others stay.
    """
    torch.manual_seed(0)
    makers: dict[str, Callable[[], StagedPipeline]] = {"sd3": _sd3, "flux": _flux, "sdxl": lambda: _sdxl(width)}
    built = makers[family]()
    built.encode = lambda spec: _conditioning(built, spec)  # type: ignore[method-assign]
    return built


def begin(
    family: StagedPipeline, height: int, width: int, guidance_scale: float, seed: int, steps: int = 20
) -> LatentState:
    """A request with conditioning drawn from `seed`, before its first step."""
    spec = Spec(prompt="", height=height, width=width, steps=steps, guidance_scale=guidance_scale, seed=seed)
    state = begin_steps(family, spec)
    assert isinstance(state, LatentState)
    return state


def _conditioning(family: StagedPipeline, spec: Spec) -> Conditioning:
    generator = torch.Generator().manual_seed(spec.seed)
    rows = 2 if family.info.two_passes and spec.guidance_scale > 1 else 1

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    text, pooled = draw(rows, TEXT_TOKENS, TEXT_WIDTH), draw(rows, POOLED_WIDTH)
    match family.info.family:
        case "sdxl":
            size = (spec.height, spec.width)
            ids = torch.tensor([[*size, 0, 0, *size]] * rows, dtype=torch.float32)
            tensors = {"encoder_hidden_states": text, "text_embeds": pooled, "time_ids": ids}
        case "flux":
            side = family.info.side_multiple
            ids = diffusers.FluxPipeline._prepare_latent_image_ids(
                1, spec.height // side, spec.width // side, torch.device("cpu"), torch.float32
            )
            tensors = {
                "encoder_hidden_states": text,
                "pooled_projections": pooled,
                "txt_ids": torch.zeros(TEXT_TOKENS, 3),
                "img_ids": ids,
                "guidance": torch.full([1], spec.guidance_scale),
            }
        case _:
            tensors = {"encoder_hidden_states": text, "pooled_projections": pooled}
    return Conditioning(tensors)


def _sd3() -> StagedPipeline:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32,
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=16,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=64,
        pooled_projection_dim=POOLED_WIDTH,
        pos_embed_max_size=64,
    )
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_autoencoder(16),
        **dict.fromkeys(
            ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
        ),
    )
    return StableDiffusion3(pipeline, "sd3", {}, "")


def _flux() -> StagedPipeline:
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    pipeline = diffusers.FluxPipeline(
        transformer=transformer.eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_autoencoder(16),
        **dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")),
    )
    return Flux(pipeline, "flux", {}, "")


def _sdxl(width: int) -> StagedPipeline:
    unet = diffusers.UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(16 * width, 32 * width, 32 * width),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=6 * 32 + POOLED_WIDTH,
        cross_attention_dim=TEXT_WIDTH,
    )
    pipeline = diffusers.StableDiffusionXLPipeline(
        unet=unet.eval(),
        scheduler=diffusers.EulerDiscreteScheduler(),
        vae=_autoencoder(4),
        add_watermarker=False,
        **dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")),
    )
    return StableDiffusionXL(pipeline, "sdxl", {}, "")


def _autoencoder(channels: int) -> Any:
    """It says how much smaller latents are."""
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
        latent_channels=channels,
        shift_factor=0.0,
    ).eval()
