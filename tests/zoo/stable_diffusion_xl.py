"""Stable Diffusion XL, Kolors, and guidance by perturbed attention (PAG) for all versions of Stable Diffusion."""

from __future__ import annotations

from typing import Any

import diffusers

from tilework.pipelines.fake.tokenizers import clip_tokenizer
from zoo.autoencoders import ancestral, ddim, euler, kl
from zoo.model import GUIDED, SQUARE, STEPS, entry, mask, picture
from zoo.parts import WIDTH, clip_text
from zoo.stable_diffusion import UNET, controlnet, sd, unet

XL = {
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + WIDTH,
    "cross_attention_dim": 2 * WIDTH,
}
REFINER = {"projection_class_embeddings_input_dim": 5 * 8 + WIDTH, "cross_attention_dim": WIDTH}
"""The refiner has the second text encoder alone, and an aesthetic score in place of a size."""


def sdxl(sampler: Any = euler, unet_options: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return {
        "vae": kl(scaling_factor=0.13),
        "text_encoder": clip_text(),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": clip_text(pooled=True),
        "tokenizer_2": clip_tokenizer(),
        "unet": unet(**XL | (unet_options or {})),
        "scheduler": sampler(),
    } | others


def _refiner() -> dict[str, Any]:
    parts = sdxl(unet_options=REFINER, requires_aesthetics_score=True)
    return parts | {"text_encoder": None, "tokenizer": None}


def _control() -> dict[str, Any]:
    return sdxl(controlnet=controlnet(**XL))


def _union() -> dict[str, Any]:
    """A control network for several kinds of control."""
    levels = {name: value for name, value in UNET.items() if name != "sample_size"}
    sizes = {"conditioning_embedding_out_channels": (4, 8, 8, 8), "num_control_type": 6}
    union = {"projection_class_embeddings_input_dim": 6 * 8 + WIDTH, "num_trans_channel": 16, "num_trans_head": 2}
    union |= {"num_proj_channel": 16}
    control = diffusers.ControlNetUnionModel(**levels | sizes | XL | union)
    return sdxl(controlnet=control)


def _adapter_xl() -> dict[str, Any]:
    """Three levels: the adapter of version XL begins with the second one."""
    adapter = diffusers.T2IAdapter(
        channels=[16, 32, 32, 32], num_res_blocks=1, downscale_factor=16, adapter_type="full_adapter_xl"
    )
    levels = {
        "block_out_channels": (16, 32, 32),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": (2, 4, 4),
    }
    return sdxl(unet_options=levels, adapter=adapter)


def _adapter() -> dict[str, Any]:
    adapter = diffusers.T2IAdapter(channels=[16, 32], num_res_blocks=1, downscale_factor=8, adapter_type="full_adapter")
    levels = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return sd(unet_options=levels, adapter=adapter)


FROM_PICTURE = GUIDED | STEPS | {"image": picture(), "strength": 0.75}
MASKED = GUIDED | SQUARE | {"image": picture(), "mask_image": mask(), "strength": 0.75}
CONTROL = {"control_image": picture(seed=1)}
UNION = {"control_image": [picture(seed=1)], "control_mode": [1]}
PAG = {"pag_scale": 3.0}
PAG_LAYERS = {"pag_applied_layers": ["mid"]}

MODELS = (
    entry("sdxl", "StableDiffusionXL", "text to image", sdxl, GUIDED | SQUARE),
    entry("sdxl-ancestral", "StableDiffusionXL", "text to image", lambda: sdxl(ancestral), GUIDED | SQUARE),
    entry("sdxl-image", "StableDiffusionXLImg2Img", "image to image", sdxl, FROM_PICTURE),
    entry("sdxl-refiner", "StableDiffusionXLImg2Img", "image to image", _refiner, FROM_PICTURE | {"strength": 0.5}),
    entry("sdxl-inpaint", "StableDiffusionXLInpaint", "inpaint", lambda: sdxl(unet_options={"in_channels": 9}), MASKED),
    entry("sdxl-inpaint-blend", "StableDiffusionXLInpaint", "inpaint", sdxl, MASKED),
    entry(
        "sdxl-pix2pix",
        "StableDiffusionXLInstructPix2Pix",
        "edit",
        lambda: sdxl(unet_options={"in_channels": 8}),
        GUIDED | SQUARE | {"image": picture()},
    ),
    entry("sdxl-control", "StableDiffusionXLControlNet", "control", _control, GUIDED | SQUARE | {"image": picture()}),
    entry("sdxl-control-image", "StableDiffusionXLControlNetImg2Img", "control", _control, FROM_PICTURE | CONTROL),
    entry("sdxl-control-inpaint", "StableDiffusionXLControlNetInpaint", "control", _control, MASKED | CONTROL),
    entry("sdxl-union", "StableDiffusionXLControlNetUnion", "control", _union, GUIDED | SQUARE | UNION),
    entry("sdxl-union-image", "StableDiffusionXLControlNetUnionImg2Img", "control", _union, FROM_PICTURE | UNION),
    entry("sdxl-union-inpaint", "StableDiffusionXLControlNetUnionInpaint", "control", _union, MASKED | UNION),
    entry("sdxl-adapter", "StableDiffusionXLAdapter", "control", _adapter_xl, GUIDED | SQUARE | {"image": picture()}),
    entry("sd1-adapter", "StableDiffusionAdapter", "control", _adapter, GUIDED | SQUARE | {"image": picture()}),
    entry("sdxl-pag", "StableDiffusionXLPAG", "text to image", sdxl, GUIDED | SQUARE | PAG),
    entry("sdxl-pag-image", "StableDiffusionXLPAGImg2Img", "image to image", sdxl, FROM_PICTURE | PAG),
    entry("sdxl-pag-inpaint", "StableDiffusionXLPAGInpaint", "inpaint", sdxl, MASKED | PAG),
    entry(
        "sdxl-pag-control",
        "StableDiffusionXLControlNetPAG",
        "control",
        _control,
        GUIDED | SQUARE | PAG | {"image": picture()},
    ),
    entry(
        "sdxl-pag-control-image",
        "StableDiffusionXLControlNetPAGImg2Img",
        "control",
        _control,
        FROM_PICTURE | CONTROL | PAG,
    ),
    entry("sd1-pag", "StableDiffusionPAG", "text to image", sd, GUIDED | SQUARE | PAG),
    entry("sd1-pag-image", "StableDiffusionPAGImg2Img", "image to image", sd, FROM_PICTURE | PAG),
    entry("sd1-pag-inpaint", "StableDiffusionPAGInpaint", "inpaint", lambda: sd(ddim), MASKED | PAG),
    entry(
        "sd1-pag-control",
        "StableDiffusionControlNetPAG",
        "control",
        lambda: sd(controlnet=controlnet()),
        GUIDED | SQUARE | PAG | {"image": picture()},
    ),
    entry(
        "sd1-pag-control-inpaint",
        "StableDiffusionControlNetPAGInpaint",
        "control",
        lambda: sd(ddim, controlnet=controlnet()),
        MASKED | CONTROL | PAG,
    ),
)
