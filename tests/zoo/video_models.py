"""Other models of clips with a transformer: Latte, Allegro, Mochi, EasyAnimate, Sana Video, HunyuanVideo's siblings."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers as tf

from tilework.pipelines.fake.tokenizers import byte_tokenizer, t5_tokenizer
from zoo.autoencoders import flow, kl, kl_wan
from zoo.hunyuan import SIZES as HUNYUAN
from zoo.hunyuan import hunyuan
from zoo.model import CLIP, GUIDED, PROMPT, entry, picture
from zoo.parts import decoder_sizes, siglip_pictures, siglip_vision, t5_text
from zoo.sana import gemma2


def _latte() -> dict[str, Any]:
    transformer = diffusers.LatteTransformer3DModel(
        sample_size=8,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        video_length=2,
    )
    parts = {"tokenizer": t5_tokenizer(), "text_encoder": t5_text(), "vae": kl()}
    return parts | {"transformer": transformer, "scheduler": diffusers.DDIMScheduler()}


def _allegro() -> dict[str, Any]:
    transformer = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        cross_attention_dim=24,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        caption_channels=32,
    )
    vae = diffusers.AutoencoderKLAllegro(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2, sample_size=128
    )
    vae.enable_tiling()
    parts = {"tokenizer": t5_tokenizer(), "text_encoder": t5_text(), "vae": vae}
    return parts | {"transformer": transformer, "scheduler": diffusers.DDIMScheduler()}


def _mochi() -> dict[str, Any]:
    transformer = diffusers.MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        text_embed_dim=32,
        time_embed_dim=4,
        max_sequence_length=16,
    )
    vae = diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )
    parts = {"tokenizer": t5_tokenizer(), "text_encoder": t5_text(), "vae": vae}
    return parts | {"transformer": transformer, "scheduler": flow(invert_sigmas=True)}


def _easy(in_channels: int = 16) -> dict[str, Any]:
    transformer = diffusers.EasyAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=in_channels,
        out_channels=16,
        time_embed_dim=2,
        text_embed_dim=32,
        num_layers=1,
        sample_width=16,
        sample_height=16,
        patch_size=2,
    )
    vae = diffusers.AutoencoderKLMagvit(
        down_block_types=("SpatialDownBlock3D", "SpatialTemporalDownBlock3D", "SpatialTemporalDownBlock3D"),
        up_block_types=("SpatialUpBlock3D", "SpatialTemporalUpBlock3D", "SpatialTemporalUpBlock3D"),
        block_out_channels=(8, 8, 8),
        latent_channels=16,
        layers_per_block=1,
        norm_num_groups=2,
        spatial_group_norm=False,
    )
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}
    text = decoder_sizes(rope_parameters=rope)
    text.pop("head_dim")
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    encoder = tf.Qwen2VLForConditionalGeneration(tf.Qwen2VLConfig(text_config=text, vision_config=vision))
    parts = {"tokenizer": byte_tokenizer(), "text_encoder": encoder, "vae": vae}
    return parts | {"transformer": transformer, "scheduler": flow()}


def _sana_video() -> dict[str, Any]:
    transformer = diffusers.SanaVideoTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=32,
        sample_size=8,
        rope_max_seq_len=32,
    )
    parts = {"tokenizer": byte_tokenizer(), "text_encoder": gemma2(), "vae": kl_wan()}
    return parts | {"transformer": transformer, "scheduler": flow()}


def _framepack() -> dict[str, Any]:
    """Clips of any length, one section after another, from the last section to the first."""
    options = {"has_image_proj": True, "image_proj_dim": 32, "has_clean_x_embedder": True}
    transformer = diffusers.HunyuanVideoFramepackTransformer3DModel(**HUNYUAN | options)
    seeing = {"image_encoder": siglip_vision(), "feature_extractor": siglip_pictures()}
    return hunyuan(transformer=transformer) | seeing


SANA = {"use_resolution_binning": False, "complex_human_instruction": None, "frames": 5}
SANA |= {name: value for name, value in CLIP.items() if name != "num_frames"}
LATTE = {name: value for name, value in CLIP.items() if name != "num_frames"} | {"video_length": 2}
# Not loaded: the autoencoder decodes tiles alone, and that it shall do so is not saved.
# Its tiles overlap by 120 px and 8 frames: they must be larger than that, and the clip as large as a tile.
ALLEGRO = GUIDED | CLIP | {"num_frames": 24, "height": 128, "width": 128}
# Two sections, each with a loop and a decode of its own, as with the default number of frames.
FRAMEPACK = PROMPT | CLIP | {"image": picture(32), "num_frames": 17, "latent_window_size": 3, "num_inference_steps": 2}
SANA_IMAGE = GUIDED | SANA | {"image": picture(32)}
EASY = GUIDED | CLIP | {"height": 64, "width": 64}

MODELS = (
    entry("latte", "Latte", "text to video", _latte, GUIDED | LATTE | {"height": 64, "width": 64}),
    entry("allegro", "Allegro", "text to video", _allegro, ALLEGRO, loads=False),
    entry("mochi", "Mochi", "text to video", _mochi, GUIDED | CLIP | {"num_frames": 7, "max_sequence_length": 16}),
    entry("easy-animate", "EasyAnimate", "text to video", _easy, EASY),
    entry(
        "easy-animate-inpaint",
        "EasyAnimateInpaint",
        "image to video",
        lambda: _easy(33),
        EASY,
    ),
    entry("sana-video", "SanaVideo", "text to video", _sana_video, GUIDED | SANA),
    entry("sana-video-image", "SanaImageToVideo", "image to video", _sana_video, SANA_IMAGE),
    entry(
        "hunyuan-framepack",
        "HunyuanVideoFramepack",
        "image to video",
        _framepack,
        FRAMEPACK,
    ),
)
