"""Wan 2.1 and 2.2, and the models of others that share its transformer: SkyReels V2, Lucy, ChronoEdit."""

from __future__ import annotations

from typing import Any

import diffusers

from tilework.pipelines.fake.tokenizers import t5_tokenizer
from zoo.autoencoders import flow, flow_unipc, kl_wan
from zoo.model import CLIP, GUIDED, clip, entry, picture
from zoo.parts import clip_pictures, clip_vision, umt5_text

SIZES = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "cross_attn_norm": True,
    "rope_max_seq_len": 64,
}
SEEN = {"image_dim": 32, "added_kv_proj_dim": 96}
"""Version 2.1 attends to what CLIP makes of the first picture."""


def transformer(**options: Any) -> Any:
    return diffusers.WanTransformer3DModel(**SIZES | options)


def wan(transformer_options: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """Wan 2.1."""
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": umt5_text(),
        "vae": kl_wan(),
        "scheduler": flow_unipc(),
        "transformer": transformer(**transformer_options or {}),
    } | others


def wan22(in_channels: int = 16) -> dict[str, Any]:
    """Wan 2.2: another transformer takes over for the last, less noisy steps."""
    return wan({"in_channels": in_channels}, transformer_2=transformer(in_channels=in_channels), boundary_ratio=0.6)


def _small(in_channels: int = 48) -> dict[str, Any]:
    """Wan 2.2 with five thousand million weights: one transformer, and an autoencoder that halves once more."""
    vae = kl_wan(
        z_dim=48,
        in_channels=12,
        out_channels=12,
        is_residual=True,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=[0.0] * 48,
        latents_std=[1.0] * 48,
        temperal_downsample=[False, True, True],
    )
    options = {"in_channels": in_channels, "out_channels": 48}
    return wan(options, vae=vae, expand_timesteps=True)


def seeing() -> dict[str, Any]:
    return {"image_encoder": clip_vision(projected=False), "image_processor": clip_pictures()}


def _image() -> dict[str, Any]:
    return wan({"in_channels": 36} | SEEN) | seeing()


def _last_image() -> dict[str, Any]:
    """First and last picture are given: CLIP sees both."""
    return wan({"in_channels": 36, "pos_embed_seq_len": 2 * 17} | SEEN) | seeing()


def _vace(two: bool = False) -> dict[str, Any]:
    def one() -> Any:
        return diffusers.WanVACETransformer3DModel(**SIZES, vace_layers=[0], vace_in_channels=96)

    more = {"transformer_2": one(), "boundary_ratio": 0.6} if two else {}
    return wan(transformer=one(), **more)


def _skyreels(**options: Any) -> dict[str, Any]:
    kind = diffusers.SkyReelsV2Transformer3DModel
    return wan(transformer=kind(**SIZES | options))


def _forcing() -> dict[str, Any]:
    """Diffusion forcing: each frame has its own noise level."""
    return _skyreels(inject_sample_info=True)


def _chrono() -> dict[str, Any]:
    kind = diffusers.ChronoEditTransformer3DModel
    return wan(transformer=kind(**SIZES | {"in_channels": 36} | SEEN), scheduler=flow()) | seeing()


FORCING = GUIDED | CLIP | {"num_frames": 9, "ar_step": 0, "overlap_history": None, "num_inference_steps": 3}

MODELS = (
    entry("wan21", "Wan", "text to video", wan, GUIDED | CLIP),
    entry("wan22", "Wan", "text to video", wan22, GUIDED | CLIP | {"guidance_scale": 5.0, "guidance_scale_2": 3.0}),
    entry("wan22-5b", "Wan", "text to video", _small, GUIDED | CLIP),
    entry("wan21-image", "WanImageToVideo", "image to video", _image, GUIDED | CLIP | {"image": picture(32)}),
    entry(
        "wan21-first-last",
        "WanImageToVideo",
        "image to video",
        _last_image,
        GUIDED | CLIP | {"image": picture(32), "last_image": picture(32, seed=1)},
    ),
    entry(
        "wan22-image", "WanImageToVideo", "image to video", lambda: wan22(36), GUIDED | CLIP | {"image": picture(32)}
    ),
    entry("wan22-5b-image", "WanImageToVideo", "image to video", _small, GUIDED | CLIP | {"image": picture(32)}),
    entry(
        "wan21-video",
        "WanVideoToVideo",
        "video to video",
        wan,
        GUIDED | {"video": clip(), "height": 32, "width": 32, "num_inference_steps": 4, "strength": 0.75},
    ),
    entry("wan21-vace", "WanVACE", "text to video", _vace, GUIDED | CLIP),
    entry(
        "wan21-vace-video",
        "WanVACE",
        "video to video",
        _vace,
        GUIDED | CLIP | {"video": clip(), "reference_images": [picture(32)]},
    ),
    entry("wan22-vace", "WanVACE", "text to video", lambda: _vace(two=True), GUIDED | CLIP),
    entry("skyreels2", "SkyReelsV2", "text to video", _skyreels, GUIDED | CLIP),
    entry(
        "skyreels2-image",
        "SkyReelsV2ImageToVideo",
        "image to video",
        lambda: _skyreels(in_channels=36, **SEEN) | seeing(),
        GUIDED | CLIP | {"image": picture(32)},
    ),
    entry("skyreels2-forcing", "SkyReelsV2DiffusionForcing", "text to video", _forcing, FORCING),
    entry(
        "skyreels2-forcing-image",
        "SkyReelsV2DiffusionForcingImageToVideo",
        "image to video",
        _forcing,
        FORCING | {"image": picture(32)},
    ),
    entry(
        "lucy-edit",
        "LucyEdit",
        "video to video",
        lambda: wan({"in_channels": 32}),
        GUIDED | CLIP | {"video": clip()},
    ),
    entry("chronoedit", "ChronoEdit", "edit", _chrono, GUIDED | CLIP | {"image": picture(32)}),
)
