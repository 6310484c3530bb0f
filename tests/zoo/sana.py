"""Sana and its siblings, PixArt, Lumina: small transformers that take their prompt by cross attention."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers as tf

from tilework.pipelines.fake.tokenizers import byte_tokenizer, t5_tokenizer
from zoo.autoencoders import dc, dpm, flow, kl
from zoo.model import GUIDED, PROMPT, SQUARE, entry, picture
from zoo.parts import decoder_sizes, t5_text

SIZES = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_cross_attention_heads": 4,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 64,
    "caption_channels": 32,
    "sample_size": 32,
    "patch_size": 1,
}
SPRINT = {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}
PIXART = {
    "sample_size": 8,
    "num_layers": 2,
    "patch_size": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "in_channels": 4,
    "cross_attention_dim": 64,
    "out_channels": 8,
    "caption_channels": 32,
    "norm_type": "ada_norm_single",
    "interpolation_scale": 1,
}
ALPHA = {"sample_size": 128, "use_additional_conditions": True, "num_attention_heads": 3, "cross_attention_dim": 48}
"""Its time embedding is a third of height, width and their ratio each: the width must be divisible by three."""


def gemma2() -> Any:
    return tf.Gemma2Model(tf.Gemma2Config(**decoder_sizes()))


def sana(transformer_options: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return {
        "tokenizer": byte_tokenizer(),
        "text_encoder": gemma2(),
        "vae": dc(),
        "transformer": diffusers.SanaTransformer2DModel(**SIZES | (transformer_options or {})),
        "scheduler": flow(),
    } | others


def _dpm() -> dict[str, Any]:
    return sana(scheduler=dpm(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0))


def _sprint() -> dict[str, Any]:
    return sana(SPRINT, scheduler=diffusers.SCMScheduler())


def _control() -> dict[str, Any]:
    return sana(controlnet=diffusers.SanaControlNetModel(**SIZES | {"num_layers": 1}))


def pixart(sampler: Any = dpm, alpha: bool = False) -> dict[str, Any]:
    """PixArt; alpha is told the picture's size, if its pictures are large."""
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_text(),
        "vae": kl(),
        "scheduler": sampler(),
        "transformer": diffusers.PixArtTransformer2DModel(
            **PIXART | (ALPHA if alpha else {"use_additional_conditions": False})
        ),
    }


PLAIN = {"use_resolution_binning": False}
SANA = SQUARE | PLAIN | {"height": 32, "width": 32, "complex_human_instruction": None}
SHORT = SANA | {"num_inference_steps": 2}

MODELS = (
    entry("sana", "Sana", "text to image", sana, GUIDED | SANA),
    entry("sana-dpm", "Sana", "text to image", _dpm, GUIDED | SANA),
    entry("sana-pag", "SanaPAG", "text to image", sana, GUIDED | SANA | {"pag_scale": 2.0}),
    entry("sana-control", "SanaControlNet", "control", _control, GUIDED | SANA | {"control_image": picture(32)}),
    entry("sana-sprint", "SanaSprint", "text to image", _sprint, PROMPT | SHORT),
    entry(
        "sana-sprint-four",
        "SanaSprint",
        "text to image",
        _sprint,
        PROMPT | SANA | {"intermediate_timesteps": None},
    ),
    entry(
        "sana-sprint-image",
        "SanaSprintImg2Img",
        "image to image",
        _sprint,
        PROMPT | SANA | {"image": picture(32), "strength": 0.75, "intermediate_timesteps": None},
    ),
    entry("pixart-sigma", "PixArtSigma", "text to image", pixart, GUIDED | SQUARE | PLAIN),
    entry("pixart-alpha", "PixArtAlpha", "text to image", lambda: pixart(alpha=True), GUIDED | SQUARE | PLAIN),
    entry("pixart-pag", "PixArtSigmaPAG", "text to image", pixart, GUIDED | SQUARE | PLAIN | {"pag_scale": 2.0}),
)
