"""Qwen-Image and its siblings."""

from __future__ import annotations

from typing import Any

import diffusers

from tilework.pipelines.fake.tokenizers import byte_tokenizer
from zoo.autoencoders import kl_qwen, shifting_flow
from zoo.model import GUIDED, SQUARE, entry, mask, picture
from zoo.parts import qwen25_vl, vision_processor

SIZES = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}


def qwen(**others: Any) -> dict[str, Any]:
    return {
        "scheduler": shifting_flow(),
        "vae": kl_qwen(),
        "text_encoder": qwen25_vl(),
        "tokenizer": byte_tokenizer(),
        "transformer": diffusers.QwenImageTransformer2DModel(**SIZES),
    } | others


def qwen_edit(transformer_options: dict[str, Any] | None = None, channels: int = 3) -> dict[str, Any]:
    """The text encoder sees the picture too. Extra small: pictures are always scaled to a million pixels."""
    sizes = SIZES | {"num_layers": 1, "num_attention_heads": 1} | (transformer_options or {})
    vae = {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 0, "input_channels": channels}
    return qwen(
        processor=vision_processor("Qwen2VLProcessor"),
        vae=diffusers.AutoencoderKLQwenImage(**vae),
        transformer=diffusers.QwenImageTransformer2DModel(**sizes),
    )


def _plus() -> dict[str, Any]:
    return qwen_edit({"zero_cond_t": True})


def _control(**options: Any) -> dict[str, Any]:
    sizes = SIZES | {"num_layers": 1}
    return qwen(controlnet=diffusers.QwenImageControlNetModel(**sizes, **options))


def _layered() -> dict[str, Any]:
    """The autoencoder has a fourth channel: how opaque a layer is."""
    return qwen_edit({"use_additional_t_cond": True, "use_layer3d_rope": True}, channels=4)


QWEN = GUIDED | {"true_cfg_scale": 4.0}
FROM_PICTURE = QWEN | SQUARE | {"image": picture(), "strength": 0.75}
MASKED = FROM_PICTURE | {"mask_image": mask()}
TWO_STEPS = {"num_inference_steps": 2}
EDIT = QWEN | SQUARE | TWO_STEPS
# Not loaded: the processor of Qwen 2 VL needs torchvision for its video processor.
ALONE = {"loads": False}

MODELS = (
    entry("qwen-image", "QwenImage", "text to image", qwen, QWEN | SQUARE),
    entry("qwen-image-unguided", "QwenImage", "text to image", qwen, {"prompt": "a red fox", **SQUARE}),
    entry("qwen-image-image", "QwenImageImg2Img", "image to image", qwen, FROM_PICTURE),
    entry("qwen-image-inpaint", "QwenImageInpaint", "inpaint", qwen, MASKED),
    entry("qwen-image-edit", "QwenImageEdit", "edit", qwen_edit, EDIT | {"image": picture()}, **ALONE),
    entry("qwen-image-edit-inpaint", "QwenImageEditInpaint", "inpaint", qwen_edit, MASKED | TWO_STEPS, **ALONE),
    entry(
        "qwen-image-edit-plus",
        "QwenImageEditPlus",
        "edit",
        _plus,
        EDIT | {"image": [picture(), picture(32, seed=1)]},
        **ALONE,
    ),
    entry(
        "qwen-image-control", "QwenImageControlNet", "control", _control, QWEN | SQUARE | {"control_image": picture()}
    ),
    entry(
        "qwen-image-control-inpaint",
        "QwenImageControlNetInpaint",
        "control",
        lambda: _control(extra_condition_channels=4),
        QWEN | SQUARE | {"control_image": picture(), "control_mask": mask()},
    ),
    entry(
        "qwen-image-layered",
        "QwenImageLayered",
        "edit",
        _layered,
        QWEN | TWO_STEPS | {"image": picture().convert("RGBA"), "layers": 2, "resolution": 640},
        **ALONE,
    ),
)
