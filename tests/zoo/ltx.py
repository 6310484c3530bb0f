"""LTX Video."""

from __future__ import annotations

from typing import Any

import diffusers

from tilework.pipelines.fake.tokenizers import t5_tokenizer
from zoo.autoencoders import flow, shifting_flow
from zoo.model import CLIP, GUIDED, clip, entry, picture
from zoo.parts import t5_text

SIZES = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "cross_attention_dim": 64,
    "num_layers": 2,
    "caption_channels": 32,
}


def kl_ltx(timed: bool = False) -> Any:
    """A latent per 32 px and eight frames; the decoder of later versions is told how noisy its latents are."""
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        timestep_conditioning=timed,
    )


def ltx(timed: bool = False, sampler: Any = shifting_flow) -> dict[str, Any]:
    return {
        "scheduler": sampler(),
        "vae": kl_ltx(timed),
        "text_encoder": t5_text(),
        "tokenizer": t5_tokenizer(),
        "transformer": diffusers.LTXVideoTransformer3DModel(**SIZES),
    }


LONG = GUIDED | CLIP | {"num_frames": 9, "height": 64, "width": 64}
TIMED = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}


def _later() -> dict[str, Any]:
    """From version 0.9.5 on the shift is fixed."""
    return ltx(timed=True, sampler=flow)


NOISED = LONG | {"image": picture(), "image_cond_noise_scale": 0.15}
GIVEN = LONG | {"video": clip(9, 64), "strength": 0.75}

MODELS = (
    entry("ltx", "LTX", "text to video", ltx, LONG),
    entry("ltx-timed", "LTX", "text to video", lambda: ltx(timed=True), LONG | TIMED),
    entry("ltx-image", "LTXImageToVideo", "image to video", ltx, LONG | {"image": picture()}),
    entry(
        "ltx-condition",
        "LTXCondition",
        "image to video",
        _later,
        NOISED,
    ),
    entry("ltx-condition-video", "LTXCondition", "video to video", _later, GIVEN),
)
