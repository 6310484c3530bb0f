"""FLUX.2, FLUX.2 klein, and Z-Image."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers as tf

from tilework.pipelines.fake.tokenizers import byte_tokenizer
from zoo.autoencoders import kl_flux, kl_flux2, shifting_flow
from zoo.model import GUIDED, PROMPT, SQUARE, entry, mask, picture
from zoo.parts import decoder_sizes, qwen3

SIZES = {
    "in_channels": 32,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 96,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}
Z_SIZES = {
    "in_channels": 16,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "cap_feat_dim": 32,
    "axes_dims": [4, 6, 6],
    "axes_lens": [1024, 64, 64],
}


def klein(distilled: bool = True) -> dict[str, Any]:
    """The pipeline takes three hidden layers of the text encoder, the last of them the 27th."""
    return {
        "scheduler": shifting_flow(),
        "vae": kl_flux2(),
        "text_encoder": qwen3(with_head=True, num_layers=28),
        "tokenizer": byte_tokenizer(),
        "transformer": diffusers.Flux2Transformer2DModel(**SIZES, guidance_embeds=False),
        "is_distilled": distilled,
    }


def flux2() -> dict[str, Any]:
    """The large one: three hidden layers of Mistral, the last the 30th. A tokenizer stands in for its processor."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = tf.Mistral3Config(
        text_config=tf.MistralConfig(**decoder_sizes(31)),
        vision_config=tf.PixtralVisionConfig(**vision, image_size=32, patch_size=8, head_dim=8),
    )
    return {
        "scheduler": shifting_flow(),
        "vae": kl_flux2(),
        "text_encoder": tf.Mistral3ForConditionalGeneration(config),
        "tokenizer": byte_tokenizer(),
        "transformer": diffusers.Flux2Transformer2DModel(**SIZES),
    }


def _base() -> dict[str, Any]:
    return klein(distilled=False)


def z_image(**others: Any) -> dict[str, Any]:
    return {
        "scheduler": shifting_flow(),
        "vae": kl_flux(),
        "text_encoder": qwen3(),
        "tokenizer": byte_tokenizer(),
        "transformer": diffusers.ZImageTransformer2DModel(**Z_SIZES),
    } | others


def _control(channels: int = 16) -> dict[str, Any]:
    """The control network adds what it finds after some layers of the transformer, whose parts it shares."""
    control = diffusers.ZImageControlNetModel(
        control_layers_places=[0],
        control_refiner_layers_places=[0],
        control_in_dim=channels,
        dim=48,
        n_refiner_layers=1,
        n_heads=3,
        n_kv_heads=3,
    )
    return z_image(controlnet=control)


FROM_PICTURE = SQUARE | {"image": picture(), "strength": 0.75}
MASKED = FROM_PICTURE | {"mask_image": mask()}
TURBO = PROMPT | {"guidance_scale": 0.0}
REAL = GUIDED | {"guidance_scale": 4.0}

MODELS = (
    entry("flux2", "Flux2", "text to image", flux2, PROMPT | SQUARE),
    entry("flux2-edit", "Flux2", "edit", flux2, PROMPT | SQUARE | {"image": picture()}),
    entry("flux2-klein", "Flux2Klein", "text to image", klein, PROMPT | SQUARE),
    entry("flux2-klein-base", "Flux2Klein", "text to image", _base, PROMPT | SQUARE | {"guidance_scale": 4.0}),
    entry("flux2-klein-edit", "Flux2Klein", "edit", klein, PROMPT | SQUARE | {"image": picture()}),
    entry(
        "flux2-klein-edit-two",
        "Flux2Klein",
        "edit",
        _base,
        PROMPT | SQUARE | {"image": [picture(), picture(seed=1)], "guidance_scale": 4.0},
    ),
    entry("flux2-klein-inpaint", "Flux2KleinInpaint", "inpaint", _base, PROMPT | MASKED),
    entry("flux2-klein-kv", "Flux2KleinKV", "edit", klein, PROMPT | SQUARE | {"image": picture()}),
    entry("z-image-turbo", "ZImage", "text to image", z_image, TURBO | SQUARE),
    entry("z-image", "ZImage", "text to image", z_image, REAL | SQUARE),
    entry("z-image-image", "ZImageImg2Img", "image to image", z_image, REAL | FROM_PICTURE),
    entry("z-image-inpaint", "ZImageInpaint", "inpaint", z_image, REAL | MASKED),
    entry("z-image-control", "ZImageControlNet", "control", _control, TURBO | SQUARE | {"control_image": picture()}),
    entry(
        "z-image-control-inpaint",
        "ZImageControlNetInpaint",
        "control",
        lambda: _control(33),
        TURBO | SQUARE | {"image": picture(), "mask_image": mask(), "control_image": picture(seed=1)},
    ),
)
