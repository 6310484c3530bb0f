"""Other models of pictures: Lumina, AuraFlow, CogView, HunyuanDiT, HiDream, PRX."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers as tf

from tilework.pipelines.fake.tokenizers import byte_tokenizer, clip_tokenizer, t5_tokenizer
from zoo.autoencoders import flow, kl, kl_flux, shifting_flow
from zoo.model import GUIDED, SQUARE, entry, picture
from zoo.parts import bert_text, bert_tokenizer, clip_text, decoder_sizes, t5_text, umt5_text
from zoo.sana import gemma2


def _lumina() -> dict[str, Any]:
    transformer = diffusers.LuminaNextDiT2DModel(
        sample_size=8,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        cross_attention_dim=32,
        learn_sigma=True,
    )
    encoder = tf.GemmaModel(tf.GemmaConfig(**decoder_sizes()))
    parts = {"tokenizer": byte_tokenizer(), "text_encoder": encoder, "vae": kl()}
    return parts | {"scheduler": flow(), "transformer": transformer}


def _lumina2() -> dict[str, Any]:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=16,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(300, 32, 32),
        cap_feat_dim=32,
    )
    parts = {"tokenizer": byte_tokenizer(), "text_encoder": gemma2(), "vae": kl_flux()}
    return parts | {"scheduler": flow(), "transformer": transformer}


def _aura() -> dict[str, Any]:
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pos_embed_max_size=64,
    )
    parts = {"tokenizer": t5_tokenizer(), "text_encoder": umt5_text(), "vae": kl()}
    return parts | {"scheduler": flow(), "transformer": transformer}


COGVIEW = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "text_embed_dim": 32,
    "time_embed_dim": 32,
    "condition_dim": 8,
    "pos_embed_max_size": 32,
    "sample_size": 8,
}


def _cogview3() -> dict[str, Any]:
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_text(),
        "vae": kl(),
        "scheduler": diffusers.CogVideoXDPMScheduler(),
        "transformer": diffusers.CogView3PlusTransformer2DModel(**COGVIEW),
    }


def _cogview4(in_channels: int = 4) -> dict[str, Any]:
    sizes = COGVIEW | {"in_channels": in_channels, "rope_axes_dim": (8, 8)}
    return {
        "tokenizer": byte_tokenizer(),
        "text_encoder": tf.GlmModel(tf.GlmConfig(**decoder_sizes())),
        "vae": kl(),
        "scheduler": shifting_flow(),
        "transformer": diffusers.CogView4Transformer2DModel(**sizes),
    }


DIT = {
    "sample_size": 8,
    "num_layers": 2,
    "patch_size": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "in_channels": 4,
    "cross_attention_dim": 32,
    "cross_attention_dim_t5": 32,
    "pooled_projection_dim": 16,
    "hidden_size": 32,
    "activation_fn": "gelu-approximate",
}


def _hunyuan_dit(**others: Any) -> dict[str, Any]:
    return {
        "vae": kl(),
        "text_encoder": bert_text(),
        "tokenizer": bert_tokenizer(),
        "text_encoder_2": t5_text(),
        "tokenizer_2": t5_tokenizer(256),
        "transformer": diffusers.HunyuanDiT2DModel(**DIT),
        "scheduler": diffusers.DDPMScheduler(),
        "requires_safety_checker": False,
    } | others


def _hunyuan_dit_control() -> dict[str, Any]:
    sizes = {name: value for name, value in DIT.items() if name != "num_layers"}
    return _hunyuan_dit(controlnet=diffusers.HunyuanDiT2DControlNetModel(transformer_num_layers=2, **sizes))


def _hidream() -> dict[str, Any]:
    """Four text encoders and a mixture of experts. Its pictures always have 16384 latents: here 256 px."""
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=[32, 16],
        text_emb_dim=64,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=(0, 1),
        force_inference_output=True,
    )
    llama = decoder_sizes(hidden_size=16, head_dim=4)
    return {
        "scheduler": flow(),
        "vae": kl(levels=2, scaling_factor=0.36, shift_factor=0.1),
        "text_encoder": clip_text(pooled=True, max_length=128),
        "tokenizer": clip_tokenizer(128),
        "text_encoder_2": clip_text(pooled=True, max_length=128),
        "tokenizer_2": clip_tokenizer(128),
        "text_encoder_3": t5_text(),
        "tokenizer_3": t5_tokenizer(),
        "text_encoder_4": tf.LlamaForCausalLM(tf.LlamaConfig(**llama)),
        "tokenizer_4": byte_tokenizer(),
        "transformer": transformer,
    }


def _prx() -> dict[str, Any]:
    sizes = decoder_sizes()
    encoder = tf.T5GemmaConfig(encoder=sizes, decoder=sizes, is_encoder_decoder=False)
    transformer = diffusers.PRXTransformer2DModel(
        in_channels=4, context_in_dim=32, hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=2, axes_dim=[8, 8]
    )
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    parts = {
        "tokenizer": byte_tokenizer(64),
        "text_encoder": T5GemmaEncoder(encoder.encoder),
        "vae": kl(shift_factor=0.1),
    }
    return parts | {"transformer": transformer, "scheduler": flow()}


def _dit() -> dict[str, Any]:
    """The transformer that the others descend from: its prompt is one of thousand classes."""
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
    )
    return {"transformer": transformer, "vae": kl(), "scheduler": diffusers.DDIMScheduler()}


CONTROLLED = GUIDED | SQUARE | {"control_image": picture()}
PAG = {"pag_scale": 2.0}
PLAIN = {"use_resolution_binning": False}

MODELS = (
    entry("lumina", "Lumina", "text to image", _lumina, GUIDED | SQUARE),
    entry("lumina2", "Lumina2", "text to image", _lumina2, GUIDED | SQUARE),
    entry("aura-flow", "AuraFlow", "text to image", _aura, GUIDED | SQUARE),
    entry("cogview3-plus", "CogView3Plus", "text to image", _cogview3, GUIDED | SQUARE),
    entry("cogview4", "CogView4", "text to image", _cogview4, GUIDED | SQUARE),
    entry(
        "cogview4-control",
        "CogView4Control",
        "control",
        lambda: _cogview4(8),
        GUIDED | SQUARE | {"control_image": picture()},
    ),
    entry("hunyuan-dit", "HunyuanDiT", "text to image", _hunyuan_dit, GUIDED | SQUARE | PLAIN),
    entry("hunyuan-dit-pag", "HunyuanDiTPAG", "text to image", _hunyuan_dit, GUIDED | SQUARE | PLAIN | PAG),
    entry(
        "hunyuan-dit-control",
        "HunyuanDiTControlNet",
        "control",
        _hunyuan_dit_control,
        CONTROLLED | PLAIN,
    ),
    entry("hidream", "HiDreamImage", "text to image", _hidream, GUIDED | SQUARE | {"num_inference_steps": 2}),
    # Not loaded: the sizes of an encoder of T5Gemma are not those that its saved configuration gives.
    entry("prx", "PRX", "text to image", _prx, GUIDED | SQUARE | PLAIN, loads=False),
    entry("dit", "DiT", "text to image", _dit, {"class_labels": [3], "num_inference_steps": 4}),
)
