"""CogVideoX, and ConsisID's siblings that share its transformer."""

from __future__ import annotations

from typing import Any

import diffusers

from tilework.pipelines.fake.tokenizers import t5_tokenizer
from zoo.model import CLIP, GUIDED, clip, entry, picture
from zoo.parts import t5_text

SIZES = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 32,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 9,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 16,
}
ROTARY = {"use_rotary_positional_embeddings": True}


def kl_cogvideox() -> Any:
    return diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )


def cogvideox(sampler: Any = None, **options: Any) -> dict[str, Any]:
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_text(),
        "vae": kl_cogvideox(),
        "transformer": diffusers.CogVideoXTransformer3DModel(**SIZES | options),
        "scheduler": (sampler or diffusers.CogVideoXDDIMScheduler)(),
    }


def _dpm() -> dict[str, Any]:
    """The sampler of the larger model remembers the last prediction and draws noise; its positions are rotary."""
    return cogvideox(diffusers.CogVideoXDPMScheduler, **ROTARY)


def _image() -> dict[str, Any]:
    return cogvideox(diffusers.CogVideoXDPMScheduler, in_channels=8, **ROTARY)


LONG = GUIDED | CLIP | {"num_frames": 9, "height": 64, "width": 64, "max_sequence_length": 16}
NO_FRAMES = {name: value for name, value in LONG.items() if name != "num_frames"}

MODELS = (
    entry("cogvideox", "CogVideoX", "text to video", cogvideox, LONG),
    entry("cogvideox-dpm", "CogVideoX", "text to video", _dpm, LONG),
    entry("cogvideox-image", "CogVideoXImageToVideo", "image to video", _image, LONG | {"image": picture()}),
    entry(
        "cogvideox-video",
        "CogVideoXVideoToVideo",
        "video to video",
        cogvideox,
        NO_FRAMES | {"video": clip(9, 64), "strength": 0.75},
    ),
    entry(
        "cogvideox-control",
        "CogVideoXFunControl",
        "control",
        lambda: cogvideox(in_channels=8),
        NO_FRAMES | {"control_video": clip(9, 64)},
    ),
)
