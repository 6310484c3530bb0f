"""The models of Hunyuan: video (1 and 1.5), pictures, and the older DiT."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers as tf

from tilework.pipelines.fake.tokenizers import byte_tokenizer, clip_tokenizer
from zoo.autoencoders import flow
from zoo.model import CLIP, GUIDED, PROMPT, entry, picture
from zoo.parts import clip_text, decoder_sizes, qwen25_sizes, siglip_pictures, siglip_vision, t5_text

SIZES_15 = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "text_embed_2_dim": 32,
    "image_embed_dim": 32,
    "rope_axes_dim": (4, 6, 6),
    "target_size": 32,
}
"""A part of the projection of the text has 2048 channels, whatever the configuration: 5M weights."""
SIZES = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "patch_size": 2,
    "patch_size_t": 1,
    "guidance_embeds": True,
    "text_embed_dim": 32,
    "pooled_projection_dim": 32,
    "rope_axes_dim": (4, 6, 6),
}


def hunyuan15(task: str = "t2v", **others: Any) -> dict[str, Any]:
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
    )
    return {
        "text_encoder": tf.Qwen2_5_VLTextModel(tf.Qwen2_5_VLTextConfig(**qwen25_sizes())),
        "tokenizer": byte_tokenizer(),
        "text_encoder_2": t5_text(num_tokens=400),
        "tokenizer_2": tf.ByT5Tokenizer(),
        "vae": vae,
        "scheduler": flow(),
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(**SIZES_15, task_type=task),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=4.0),
    } | others


def _image15() -> dict[str, Any]:
    return hunyuan15("i2v", image_encoder=siglip_vision(), feature_extractor=siglip_pictures())


def kl_hunyuan(latent_channels: int = 4) -> Any:
    """A latent per 8 px and four frames."""
    return diffusers.AutoencoderKLHunyuanVideo(
        in_channels=3,
        out_channels=3,
        latent_channels=latent_channels,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        act_fn="silu",
        norm_num_groups=4,
        scaling_factor=0.476986,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
        mid_block_add_attention=True,
    )


def hunyuan(transformer_options: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return {
        "text_encoder": tf.LlamaModel(tf.LlamaConfig(**decoder_sizes(4))),
        "tokenizer": byte_tokenizer(),
        "text_encoder_2": clip_text(),
        "tokenizer_2": clip_tokenizer(),
        "vae": kl_hunyuan(),
        "scheduler": flow(shift=7.0),
        "transformer": diffusers.HunyuanVideoTransformer3DModel(**SIZES | (transformer_options or {})),
    } | others


FEW = {"num_inference_steps": 3}

MODELS = (
    entry("hunyuan-video15", "HunyuanVideo15", "text to video", hunyuan15, GUIDED | CLIP | FEW),
    entry(
        "hunyuan-video15-image",
        "HunyuanVideo15ImageToVideo",
        "image to video",
        _image15,
        GUIDED | {"image": picture(32), "num_frames": 5} | FEW,
    ),
    entry("hunyuan-video", "HunyuanVideo", "text to video", hunyuan, PROMPT | CLIP),
    entry(
        "hunyuan-video-guided",
        "HunyuanVideo",
        "text to video",
        hunyuan,
        GUIDED | CLIP | {"true_cfg_scale": 3.0},
    ),
    entry(
        "hunyuan-skyreels-image",
        "HunyuanSkyreelsImageToVideo",
        "image to video",
        lambda: hunyuan({"in_channels": 8, "guidance_embeds": False}),
        PROMPT | CLIP | {"image": picture(32)},
    ),
)
