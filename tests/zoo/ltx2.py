"""LTX 2, which makes a clip and its sound together."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers as tf

from tilework.pipelines.fake.tokenizers import byte_tokenizer
from zoo.autoencoders import flow
from zoo.model import CLIP, GUIDED, entry, picture
from zoo.parts import WIDTH, decoder_sizes

SIZES = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8,
    "num_layers": 2,
    "caption_channels": WIDTH,
    "rope_double_precision": False,
    "rope_type": "split",
}


def gemma3() -> Any:
    """A language model that could see; the pipeline takes the hidden layers of its text alone."""
    text = decoder_sizes(sliding_window=64)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8}
    return tf.Gemma3ForConditionalGeneration(
        tf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    )


def kl_ltx2() -> Any:
    """A latent per 2 px and frame pair."""
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
    )


def _kl_audio() -> Any:
    return diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=2,
        ch_mult=(1,),
        num_res_blocks=1,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        mid_block_add_attention=False,
        mel_bins=8,
    )


def _connectors() -> Any:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    sizes: dict[str, Any] = {}
    for stream in ("video", "audio"):
        sizes[f"{stream}_connector_num_attention_heads"] = 4
        sizes[f"{stream}_connector_attention_head_dim"] = 8
        sizes[f"{stream}_connector_num_layers"] = 1
        sizes[f"{stream}_connector_num_learnable_registers"] = None
    return LTX2TextConnectors(
        caption_channels=WIDTH,
        text_proj_in_factor=3,
        connector_rope_base_seq_len=32,
        rope_theta=10000.0,
        rope_double_precision=False,
        causal_temporal_positioning=False,
        rope_type="split",
        **sizes,
    )


def _vocoder() -> Any:
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    return LTX2Vocoder(
        in_channels=16,
        hidden_channels=32,
        out_channels=2,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )


def ltx2() -> dict[str, Any]:
    return {
        "scheduler": flow(),
        "vae": kl_ltx2(),
        "audio_vae": _kl_audio(),
        "text_encoder": gemma3(),
        "tokenizer": byte_tokenizer(),
        "connectors": _connectors(),
        "transformer": diffusers.LTX2VideoTransformer3DModel(**SIZES),
        "vocoder": _vocoder(),
    }


PLAIN = {
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
    "spatio_temporal_guidance_blocks": None,
    "use_cross_timestep": False,
    "max_sequence_length": 16,
    "frame_rate": 25.0,
}
"""Guidance by a negative prompt alone, for the clip and for its sound."""
LTX2 = GUIDED | CLIP | PLAIN | {"guidance_scale": 3.0, "audio_guidance_scale": 3.0}

MODELS = (
    entry("ltx2", "LTX2", "text to video", ltx2, LTX2),
    entry("ltx2-modality", "LTX2", "text to video", ltx2, LTX2 | {"modality_scale": 2.0, "audio_modality_scale": 2.0}),
    entry("ltx2-image", "LTX2ImageToVideo", "image to video", ltx2, LTX2 | {"image": picture(32), "image_crf": 0}),
)
