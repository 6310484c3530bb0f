"""Text encoders, autoencoders and samplers at their real sizes, which several models share."""

from __future__ import annotations

from typing import Any

from tilework.pipelines.fake.component import Sampler, Tokenizer, Weights
from tilework.pipelines.fake.tokenizers import (
    byt5_tokenizer,
    byte_tokenizer,
    clip_tokenizer,
    clip_vocabulary,
    special_ids,
    t5_tokenizer,
)

CLIP_TOKENS = Tokenizer(clip_tokenizer, 77)
BYTES = Tokenizer(byte_tokenizer, 4096)
T5_TOKENS = Tokenizer(t5_tokenizer, 512)
BYT5_TOKENS = Tokenizer(byt5_tokenizer, 256)


def _clip(pooled: bool, **sizes: Any) -> Weights:
    last = len(clip_vocabulary()) - 1
    ends = {"vocab_size": 49408, "bos_token_id": last - 1, "eos_token_id": last, "pad_token_id": 1}
    return Weights("transformers", "CLIPTextModelWithProjection" if pooled else "CLIPTextModel", sizes | ends)


def clip_l(pooled: bool = False) -> Weights:
    """Return the text encoder of CLIP ViT-L/14."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    return _clip(pooled, **sizes, projection_dim=768, hidden_act="quick_gelu")


def clip_g() -> Weights:
    """Return the text encoder of OpenCLIP ViT-bigG/14."""
    sizes = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
    return _clip(True, **sizes, projection_dim=1280, hidden_act="gelu")


_T5_XXL: dict[str, Any] = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
T5_XXL = Weights("transformers", "T5EncoderModel", _T5_XXL | {"vocab_size": 32128})
UMT5_XXL = Weights("transformers", "UMT5EncoderModel", _T5_XXL | {"vocab_size": 256384})
BYT5_SMALL = Weights(
    "transformers",
    "T5EncoderModel",
    {
        "d_model": 1472,
        "d_kv": 64,
        "d_ff": 3584,
        "num_layers": 12,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "vocab_size": 1510,
    },
)
"""The encoder of ByT5 for glyphs, with tokens for colours and fonts."""

_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_QWEN3_4B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QWEN3_4B = Weights("transformers", "Qwen3Model", _QWEN3_4B | _ENDS)
QWEN3_4B_WITH_HEAD = Weights("transformers", "Qwen3ForCausalLM", _QWEN3_4B | _ENDS)


def _picture_tokens() -> dict[str, int]:
    ids = special_ids()
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


_QWEN25_TEXT: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
}


QWEN25_7B = Weights("transformers", "Qwen2_5_VLTextModel", _QWEN25_TEXT | _ENDS)
"""The language part of Qwen2.5-VL alone."""


def gemma3_12b() -> Weights:
    """Return the vision language model that reads the prompts of LTX-2."""
    text = {
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
    }
    vision = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    }
    sizes = {"text_config": text | _ENDS, "vision_config": vision, "mm_tokens_per_image": 256}
    return Weights("transformers", "Gemma3ForConditionalGeneration", sizes)


def mistral_small_24b() -> Weights:
    """Return the vision language model that reads the prompts of FLUX.2 [dev]."""
    text = {
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    vision = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "head_dim": 64,
        "image_size": 1540,
        "patch_size": 14,
    }
    sizes = {
        "text_config": {"model_type": "mistral", **text, **_ENDS},
        "vision_config": {"model_type": "pixtral", **vision},
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
    }
    return Weights("transformers", "Mistral3ForConditionalGeneration", sizes)


def qwen25_vl_7b() -> Weights:
    """Return the vision language model that reads the prompts of Qwen-Image."""
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    sizes = {"text_config": _QWEN25_TEXT | _ENDS, "vision_config": vision}
    return Weights("transformers", "Qwen2_5_VLForConditionalGeneration", sizes | _picture_tokens())


def _kl(channels: int, **options: Any) -> Weights:
    sizes = {
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
        "latent_channels": channels,
        "sample_size": 1024,
    }
    return Weights("diffusers", "AutoencoderKL", sizes | options)


KL_SDXL = _kl(4, scaling_factor=0.13025, force_upcast=True)
KL_SD3 = _kl(16, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False)
KL_FLUX = _kl(16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False)
KL_FLUX2 = Weights("diffusers", "AutoencoderKLFlux2")
KL_QWEN = Weights("diffusers", "AutoencoderKLQwenImage")
KL_WAN = Weights("diffusers", "AutoencoderKLWan")
KL_WAN_5B = Weights(
    "diffusers",
    "AutoencoderKLWan",
    {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "in_channels": 12,
        "out_channels": 12,
        "is_residual": True,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48,
    },
)
"""Autoencoder of Wan 5B. Its mean and deviation by channel are left at 0 and 1: they cost no time."""

EULER = Sampler(
    "EulerDiscreteScheduler",
    {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "steps_offset": 1,
        "timestep_spacing": "leading",
    },
)
FLOW = Sampler("FlowMatchEulerDiscreteScheduler", {"shift": 3.0})
SHIFTING_FLOW = Sampler(
    "FlowMatchEulerDiscreteScheduler",
    {
        "shift": 3.0,
        "use_dynamic_shifting": True,
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
        "base_shift": 0.5,
        "max_shift": 1.15,
    },
)
SHIFTING_LTX = Sampler(
    "FlowMatchEulerDiscreteScheduler",
    {
        "use_dynamic_shifting": True,
        "base_image_seq_len": 1024,
        "max_image_seq_len": 4096,
        "base_shift": 0.95,
        "max_shift": 2.05,
        "shift_terminal": 0.1,
    },
)
FEW_STEPS = Sampler("FlowMatchEulerDiscreteScheduler", {"shift": 1.0})
UNIPC = Sampler(
    "UniPCMultistepScheduler", {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
)
