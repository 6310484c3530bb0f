"""Cosmos 1, 2 and 2.5, with a safety checker that lets everything pass: the real one is a package of its own.

The real transformers are told the padding of the picture, which is scaled with torchvision; these do without.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from tilework.pipelines.fake.tokenizers import byte_tokenizer, t5_tokenizer
from zoo.autoencoders import flow_unipc, kl_wan
from zoo.model import CLIP, GUIDED, SQUARE, entry, picture
from zoo.parts import qwen25_vl, t5_text

SIZES = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "mlp_ratio": 2,
    "text_embed_dim": 32,
    "adaln_lora_dim": 4,
    "max_size": (4, 32, 32),
    "patch_size": (1, 2, 2),
    "rope_scale": (2.0, 1.0, 1.0),
    "concat_padding_mask": False,
    "extra_pos_embed_type": "learnable",
}


class Unchecked(torch.nn.Module):
    """In place of `CosmosSafetyChecker`, which downloads its models in its constructor."""

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32


def _cosmos1(in_channels: int = 4) -> dict[str, Any]:
    vae = diffusers.AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=2,
        patch_size=4,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )
    return {
        "text_encoder": t5_text(),
        "tokenizer": t5_tokenizer(),
        "transformer": diffusers.CosmosTransformer3DModel(**SIZES | {"in_channels": in_channels}),
        "vae": vae,
        "scheduler": diffusers.EDMEulerScheduler(sigma_max=80.0, sigma_min=0.002, final_sigmas_type="sigma_min"),
        "safety_checker": Unchecked(),
    }


def wide(in_channels: int = 16, **options: Any) -> Any:
    """The transformer of version 2 for the latents of Wan."""
    sizes = SIZES | {"extra_pos_embed_type": None, "in_channels": in_channels, "out_channels": 16}
    return diffusers.CosmosTransformer3DModel(**sizes | options)


def _cosmos2(in_channels: int = 16) -> dict[str, Any]:
    sampler = diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    parts = {"transformer": wide(in_channels), "vae": kl_wan(), "scheduler": sampler}
    return _cosmos1() | parts


def _cosmos25() -> dict[str, Any]:
    options = {"use_crossattn_projection": True, "crossattn_proj_in_channels": 64, "encoder_hidden_states_channels": 32}
    return {
        "text_encoder": qwen25_vl(),
        "tokenizer": byte_tokenizer(),
        "transformer": wide(17, **options),
        "vae": kl_wan(),
        "scheduler": flow_unipc(),
        "safety_checker": Unchecked(),
    }


SHORT = {"max_sequence_length": 16}
LONG = GUIDED | CLIP | SHORT | {"num_frames": 9}
FROM_PICTURE = LONG | {"image": picture(32)}
# Not loaded: the safety checker is not a class of diffusers.
ALONE = {"loads": False}

MODELS = (
    entry("cosmos1", "CosmosTextToWorld", "text to video", _cosmos1, LONG, **ALONE),
    entry(
        "cosmos1-image",
        "CosmosVideoToWorld",
        "image to video",
        lambda: _cosmos1(5),
        FROM_PICTURE,
        **ALONE,
    ),
    entry("cosmos2", "Cosmos2TextToImage", "text to image", _cosmos2, GUIDED | SQUARE | SHORT, **ALONE),
    entry(
        "cosmos2-image",
        "Cosmos2VideoToWorld",
        "image to video",
        lambda: _cosmos2(17),
        FROM_PICTURE,
        **ALONE,
    ),
    entry("cosmos25", "Cosmos2_5_PredictBase", "text to video", _cosmos25, LONG, **ALONE),
)
