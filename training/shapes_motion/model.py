"""The parts of the `shapes-motion` model, untrained: stock diffusers and transformers classes, small configs."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from training.shapes_motion.drawing import BACKGROUNDS, DRAWN, FRONTS, MOTIONS, SHAPES

_FIRST = ("a", "an", *FRONTS)
WORDS = (
    *(*_FIRST, *(word.capitalize() for word in _FIRST)),
    *("on", "background", "moves", "moving", "stands", "standing", *BACKGROUNDS, *SHAPES, *MOTIONS),
)
TEXT_WIDTH = 96
LATENT_CHANNELS = 16
# The autoencoder makes one latent of 8 x 8 pixels of the first frame, and of each four frames after it.
PIXELS_PER_LATENT, FRAMES_PER_LATENT = 8, 4
# How far the sampler's noise levels are shifted towards noise; training draws its noise levels alike.
SHIFT = 3.0


def build_tokenizer() -> T5Tokenizer:
    """A T5 tokenizer that keeps each of WORDS whole and spells any other word letter by letter."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(f"▁{word}", -1.0) for word in WORDS]
    letters = [(letter, -8.0) for letter in ("▁", *string.ascii_letters, *string.digits, *string.punctuation)]
    return T5Tokenizer(vocab=[*special, *words, *letters], extra_ids=0, model_max_length=512)


def build_text_encoder(tokenizer: T5Tokenizer) -> UMT5EncoderModel:
    config = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=24,
        d_ff=192,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return UMT5EncoderModel(config)


def build_autoencoder() -> AutoencoderKLWan:
    """Of the kind of Wan 2.2: squares of 2 x 2 pixels become channels, before two levels halve sides and frames."""
    return AutoencoderKLWan(
        base_dim=16,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        is_residual=True,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * LATENT_CHANNELS,  # Mean and deviation are fixed after training, on real clips.
        latents_std=[1.0] * LATENT_CHANNELS,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=FRAMES_PER_LATENT,
        scale_factor_spatial=PIXELS_PER_LATENT,
    )


def build_transformer() -> WanTransformer3DModel:
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=64,
        ffn_dim=384,
        num_layers=5,
        rope_max_seq_len=64,
    )
    for parameter in transformer.proj_out.parameters():
        torch.nn.init.zeros_(parameter)
    return transformer


def build_pipeline() -> WanPipeline:
    """An untrained pipeline in the shape of Wan 2.1."""
    tokenizer = build_tokenizer()
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=build_text_encoder(tokenizer),
        vae=build_autoencoder(),
        transformer=build_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
    )


# What a request gets that asks for nothing else.
DEFAULTS: dict[str, Any] = {
    "name": "shapes-motion",
    "steps": 16,
    "guidance_scale": 4.0,
    "height": 64,
    "width": 64,
    "num_frames": 17,
    "max_side": 64,
    "max_frames": 17,
    "words": DRAWN,
}


def save_half(pipeline: WanPipeline, directory: Path) -> None:
    """Save as fp16 safetensors in the ordinary diffusers layout, with Tilework's defaults beside them.

    Configs name the directory that a part was loaded from; here they do not.
    """
    pipeline.to(torch.float16).save_pretrained(directory, safe_serialization=True)
    pipeline.to(torch.float32)
    for file in directory.rglob("*.json"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if '"_name_or_path"' not in line))
    (directory / "tilework.json").write_text(json.dumps(DEFAULTS, indent=2) + "\n")
