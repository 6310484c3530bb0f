"""Newer models of pictures: Krea 2, Qwen-Image 2.1, HunyuanImage, Ernie, Anima."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers as tf

from tilework.pipelines.fake.tokenizers import byte_tokenizer, t5_tokenizer
from zoo.autoencoders import flow, kl_flux2, kl_qwen, shifting_flow
from zoo.model import GUIDED, PROMPT, SQUARE, ZooModel, entry, picture
from zoo.modular import modular
from zoo.parts import WIDTH, decoder_sizes, qwen3, qwen3_vl, qwen25_vl, t5_text, vision_processor


def _krea(num_layers: int = 3) -> dict[str, Any]:
    """Hidden layers of the text encoder are mixed; the modular pipeline insists on twelve, the last the 35th."""
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=64,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        timestep_embed_dim=8,
        text_hidden_dim=WIDTH,
        num_text_layers=num_layers,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
    )
    return {
        "transformer": transformer,
        "vae": kl_qwen(),
        "scheduler": shifting_flow(),
        "text_encoder": qwen3_vl(with_head=False, num_layers=36 if num_layers == 12 else 2),
        "tokenizer": byte_tokenizer(),
        "text_encoder_select_layers": (0, 1, 2),
    }


def _krea_modular() -> dict[str, Any]:
    return {name: part for name, part in _krea(12).items() if name != "text_encoder_select_layers"}


def _hunyuan_image() -> dict[str, Any]:
    """A guider of the pipeline combines the passes."""
    transformer = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=(1, 1),
        text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH,
        rope_axes_dim=(4, 4),
    )
    vae = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=8,
        sample_size=64,
        scaling_factor=0.75,
    )
    guiders = {name: diffusers.AdaptiveProjectedMixGuidance(enabled=True) for name in ("guider", "ocr_guider")}
    return {
        "scheduler": flow(shift=7.0),
        "vae": vae,
        "text_encoder": qwen25_vl(),
        "tokenizer": byte_tokenizer(),
        "text_encoder_2": t5_text(num_tokens=400),
        "tokenizer_2": tf.ByT5Tokenizer(),
        "transformer": transformer,
    } | guiders


def _ernie() -> dict[str, Any]:
    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=48,
        num_attention_heads=3,
        num_layers=2,
        ffn_hidden_size=64,
        in_channels=32,
        out_channels=32,
        text_in_dim=WIDTH,
        rope_axes_dim=(4, 6, 6),
    )
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8, "head_dim": 8}
    config = tf.Mistral3Config(
        text_config=tf.MistralConfig(**decoder_sizes()), vision_config=tf.PixtralVisionConfig(**vision)
    )
    return {
        "transformer": transformer,
        "vae": kl_flux2(),
        "text_encoder": tf.Mistral3Model(config),
        "tokenizer": byte_tokenizer(),
        "scheduler": flow(),
    }


def _qwen21() -> dict[str, Any]:
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=8,
        out_channels=8,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=8,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.0] * 8,
        latents_std=[1.0] * 8,
    )
    return {
        "scheduler": shifting_flow(),
        "vae": vae,
        "text_encoder": qwen3_vl(),
        "processor": vision_processor("Qwen3VLProcessor", 16),
        "transformer": transformer,
    }


def _anima() -> dict[str, Any]:
    """The transformer of Cosmos 2; a small network joins what Qwen and the tokens of T5 say."""
    from zoo.cosmos import wide

    conditioner = diffusers.AnimaTextConditioner(
        source_dim=WIDTH,
        target_dim=WIDTH,
        model_dim=WIDTH,
        num_layers=1,
        num_attention_heads=4,
        target_vocab_size=100,
        min_sequence_length=16,
    )
    return {
        "text_encoder": qwen3(),
        "tokenizer": byte_tokenizer(),
        "t5_tokenizer": t5_tokenizer(),
        "text_conditioner": conditioner,
        "transformer": wide(),
        "vae": kl_qwen(),
        "scheduler": flow(),
    }


# Not loaded: the processor of Qwen 3 VL needs torchvision for its video processor.
ALONE = {"loads": False}
FROM_PICTURE = {"image": picture(), "strength": 0.75}

MODELS: tuple[ZooModel, ...] = (
    entry("krea2", "Krea2", "text to image", _krea, GUIDED | SQUARE),
    modular("krea2", "Krea2", "text to image", _krea_modular, GUIDED | SQUARE),
    entry("hunyuan-image", "HunyuanImage", "text to image", _hunyuan_image, GUIDED | SQUARE),
    entry("ernie-image", "ErnieImage", "text to image", _ernie, GUIDED | SQUARE),
    modular("ernie-image", "ErnieImage", "text to image", _ernie, PROMPT | SQUARE),
    entry("qwen-image21", "QwenImage21", "text to image", _qwen21, GUIDED | SQUARE, **ALONE),
    modular("qwen-image21", "QwenImage21", "text to image", _qwen21, GUIDED | SQUARE, **ALONE),
    modular("anima", "Anima", "text to image", _anima, GUIDED | SQUARE),
    modular("anima-image", "Anima", "image to image", _anima, GUIDED | SQUARE | FROM_PICTURE),
)
