"""FLUX.1 and Chroma."""

from __future__ import annotations

from typing import Any

import diffusers

from tilework.pipelines.fake.tokenizers import clip_tokenizer, t5_tokenizer
from zoo.autoencoders import flow, kl_flux, shifting_flow
from zoo.model import GUIDED, PROMPT, SQUARE, entry, mask, picture
from zoo.parts import clip_text, t5_text

SIZES = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
DISTILLED = {"pooled_projection_dim": 32, "guidance_embeds": True}
"""FLUX.1 dev takes the guidance scale as an input of its transformer; schnell takes none."""


def flux(transformer_options: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return {
        "scheduler": shifting_flow(),
        "vae": kl_flux(),
        "text_encoder": clip_text(),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": t5_text(),
        "tokenizer_2": t5_tokenizer(),
        "transformer": diffusers.FluxTransformer2DModel(**SIZES | DISTILLED | (transformer_options or {})),
    } | others


def _schnell() -> dict[str, Any]:
    return flux({"guidance_embeds": False}, scheduler=flow(shift=1.0))


def _control() -> dict[str, Any]:
    """The latents of the control picture are further channels."""
    return flux({"in_channels": 128, "out_channels": 64})


def _fill() -> dict[str, Any]:
    """The masked picture's latents and the mask are further channels."""
    return flux({"in_channels": 64 + 64 + 256, "out_channels": 64})


def _controlnet() -> dict[str, Any]:
    sizes = SIZES | DISTILLED | {"num_layers": 1, "num_single_layers": 1}
    return flux(controlnet=diffusers.FluxControlNetModel(**sizes))


def chroma() -> dict[str, Any]:
    """Chroma: FLUX without CLIP; a small network makes the modulation of all layers."""
    sizes = SIZES | {"num_layers": 1, "num_single_layers": 1}
    approximator = {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}
    return {
        "scheduler": flow(),
        "vae": kl_flux(),
        "text_encoder": t5_text(),
        "tokenizer": t5_tokenizer(),
        "transformer": diffusers.ChromaTransformer2DModel(**sizes | approximator),
    }


FROM_PICTURE = SQUARE | {"image": picture(), "strength": 0.75}
MASKED = FROM_PICTURE | {"mask_image": mask()}
TRUE_GUIDANCE = {"negative_prompt": "blurry", "true_cfg_scale": 3.0}
"""Guidance with a negative prompt and two passes, which FLUX has besides the distilled one."""
KONTEXT = SQUARE | {"image": picture(), "_auto_resize": False, "max_area": 64 * 64}

MODELS = (
    entry("flux-dev", "Flux", "text to image", flux, PROMPT | SQUARE),
    entry("flux-schnell", "Flux", "text to image", _schnell, PROMPT | SQUARE | {"guidance_scale": 0.0}),
    entry("flux-true-guidance", "Flux", "text to image", flux, PROMPT | SQUARE | TRUE_GUIDANCE),
    entry("flux-image", "FluxImg2Img", "image to image", flux, PROMPT | FROM_PICTURE),
    entry("flux-inpaint", "FluxInpaint", "inpaint", flux, PROMPT | MASKED),
    entry("flux-fill", "FluxFill", "inpaint", _fill, PROMPT | SQUARE | {"image": picture(), "mask_image": mask()}),
    entry("flux-kontext", "FluxKontext", "edit", flux, PROMPT | KONTEXT | TRUE_GUIDANCE),
    entry("flux-kontext-inpaint", "FluxKontextInpaint", "inpaint", flux, PROMPT | KONTEXT | {"mask_image": mask()}),
    entry("flux-control", "FluxControl", "control", _control, PROMPT | SQUARE | {"control_image": picture()}),
    entry(
        "flux-control-image",
        "FluxControlImg2Img",
        "control",
        _control,
        PROMPT | FROM_PICTURE | {"control_image": picture(seed=1)},
    ),
    entry(
        "flux-control-inpaint",
        "FluxControlInpaint",
        "control",
        _control,
        PROMPT | MASKED | {"control_image": picture(seed=1)},
    ),
    entry(
        "flux-controlnet",
        "FluxControlNet",
        "control",
        _controlnet,
        PROMPT | SQUARE | {"control_image": picture(), "controlnet_conditioning_scale": 0.7},
    ),
    entry(
        "flux-controlnet-image",
        "FluxControlNetImg2Img",
        "control",
        _controlnet,
        PROMPT | FROM_PICTURE | {"control_image": picture(seed=1)},
    ),
    entry(
        "flux-controlnet-inpaint",
        "FluxControlNetInpaint",
        "control",
        _controlnet,
        PROMPT | MASKED | {"control_image": picture(seed=1)},
    ),
    entry("chroma", "Chroma", "text to image", chroma, GUIDED | SQUARE),
    entry("chroma-image", "ChromaImg2Img", "image to image", chroma, GUIDED | FROM_PICTURE),
)
