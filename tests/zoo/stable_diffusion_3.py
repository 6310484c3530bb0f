"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from typing import Any

import diffusers

from tilework.pipelines.fake.tokenizers import clip_tokenizer, t5_tokenizer
from zoo.autoencoders import FLUX_LATENTS, flow, kl
from zoo.model import GUIDED, SQUARE, entry, mask, picture
from zoo.parts import clip_text, t5_text

SIZES = {
    "sample_size": 8,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 64,
    "pos_embed_max_size": 32,
}
SD35 = {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}
"""What version 3.5 has besides: normalised queries and keys, and a second attention over the image alone."""


def sd3(transformer_options: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return {
        "transformer": diffusers.SD3Transformer2DModel(**SIZES | (transformer_options or {})),
        "scheduler": flow(),
        "vae": kl(16, **FLUX_LATENTS),
        "text_encoder": clip_text(pooled=True),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": clip_text(pooled=True),
        "tokenizer_2": clip_tokenizer(),
        "text_encoder_3": t5_text(64),
        "tokenizer_3": t5_tokenizer(),
    } | others


def _sd35() -> dict[str, Any]:
    return sd3(SD35)


def _control(extra_channels: int = 0) -> dict[str, Any]:
    return sd3(controlnet=diffusers.SD3ControlNetModel(**SIZES, extra_conditioning_channels=extra_channels))


FROM_PICTURE = GUIDED | SQUARE | {"image": picture(), "strength": 0.75}
MASKED = FROM_PICTURE | {"mask_image": mask()}
PAG = {"pag_scale": 3.0}

MODELS = (
    entry("sd3", "StableDiffusion3", "text to image", sd3, GUIDED | SQUARE),
    entry(
        "sd3-no-t5",
        "StableDiffusion3",
        "text to image",
        lambda: sd3(text_encoder_3=None, tokenizer_3=None),
        GUIDED | SQUARE,
        loads=False,  # from_pretrained insists on text_encoder_3=None as an argument.
    ),
    entry("sd35", "StableDiffusion3", "text to image", _sd35, GUIDED | SQUARE),
    entry(
        "sd35-skip-layers",
        "StableDiffusion3",
        "text to image",
        _sd35,
        GUIDED
        | SQUARE
        | {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 0.6},
    ),
    entry("sd3-image", "StableDiffusion3Img2Img", "image to image", _sd35, FROM_PICTURE),
    entry("sd3-inpaint", "StableDiffusion3Inpaint", "inpaint", _sd35, MASKED),
    entry(
        "sd3-control", "StableDiffusion3ControlNet", "control", _control, GUIDED | SQUARE | {"control_image": picture()}
    ),
    entry(
        "sd3-control-inpaint",
        "StableDiffusion3ControlNetInpainting",
        "control",
        lambda: _control(1),
        GUIDED | SQUARE | {"control_image": picture(), "control_mask": mask()},
    ),
    entry("sd3-pag", "StableDiffusion3PAG", "text to image", _sd35, GUIDED | SQUARE | PAG),
    entry("sd3-pag-image", "StableDiffusion3PAGImg2Img", "image to image", _sd35, FROM_PICTURE | PAG),
)
