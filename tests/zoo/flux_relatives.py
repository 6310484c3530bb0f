"""Models of others whose transformers descend from that of FLUX.1: Bria, Ovis, LongCat."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers as tf

from tilework.pipelines.fake.tokenizers import byte_tokenizer, t5_tokenizer
from zoo.autoencoders import FLUX_LATENTS, kl, kl_flux, kl_wan, shifting_flow
from zoo.flux import SIZES as FLUX_SIZES
from zoo.model import GUIDED, SQUARE, entry, picture
from zoo.parts import decoder_sizes, qwen3, qwen25_vl, t5_text, vision_processor


def _bria() -> dict[str, Any]:
    sizes = FLUX_SIZES | {"in_channels": 16, "axes_dims_rope": [4, 6, 6]}
    return {
        "transformer": diffusers.BriaTransformer2DModel(**sizes),
        "scheduler": shifting_flow(),
        "vae": kl(),
        "text_encoder": t5_text(),
        "tokenizer": t5_tokenizer(),
    }


def _fibo() -> dict[str, Any]:
    """Each block of the transformer gets a hidden layer of the text encoder."""
    sizes = FLUX_SIZES | {"in_channels": 16, "joint_attention_dim": 64, "text_encoder_dim": 32}
    return {
        "transformer": diffusers.BriaFiboTransformer2DModel(**sizes),
        "scheduler": shifting_flow(),
        "vae": kl_wan(),
        "text_encoder": tf.SmolLM3ForCausalLM(tf.SmolLM3Config(**decoder_sizes(4))),
        "tokenizer": byte_tokenizer(),
    }


def _ovis() -> dict[str, Any]:
    return {
        "scheduler": shifting_flow(),
        "vae": kl_flux(),
        "text_encoder": qwen3(),
        "tokenizer": byte_tokenizer(),
        "transformer": diffusers.OvisImageTransformer2DModel(**FLUX_SIZES),
    }


def _longcat(vae: Any = None) -> dict[str, Any]:
    return {
        "scheduler": shifting_flow(),
        "vae": vae or kl_flux(),
        "text_encoder": qwen25_vl(),
        "tokenizer": byte_tokenizer(),
        "text_processor": vision_processor("Qwen2VLProcessor"),
        "transformer": diffusers.LongCatImageTransformer2DModel(**FLUX_SIZES, pooled_projection_dim=32),
    }


def _longcat_edit() -> dict[str, Any]:
    """The autoencoder has no attention: pictures to edit always get a million pixels."""
    return _longcat(kl(16, 6, **FLUX_LATENTS, mid_block_add_attention=False))


# Not loaded: the processor of Qwen 2 VL needs torchvision for its video processor.
ALONE = {"loads": False}

MODELS = (
    entry("bria", "Bria", "text to image", _bria, GUIDED | SQUARE),
    entry("bria-fibo", "BriaFibo", "text to image", _fibo, GUIDED | SQUARE),
    entry(
        "bria-fibo-edit",
        "BriaFiboEdit",
        "edit",
        _fibo,
        {
            "prompt": '{"edit_instruction": "a red fox"}',
            "negative_prompt": "blurry",
            "image": picture(),
            "_auto_resize": False,
        }
        | SQUARE,
    ),
    entry("ovis-image", "OvisImage", "text to image", _ovis, GUIDED | SQUARE),
    entry(
        "longcat-image",
        "LongCatImage",
        "text to image",
        _longcat,
        GUIDED | SQUARE | {"enable_prompt_rewrite": False},
        **ALONE,
    ),
    entry(
        "longcat-image-edit",
        "LongCatImageEdit",
        "edit",
        _longcat_edit,
        GUIDED | {"image": picture(), "num_inference_steps": 2},
        **ALONE,
    ),
)
