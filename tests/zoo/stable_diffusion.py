"""Stable Diffusion 1 and 2, and latent consistency models."""

from __future__ import annotations

from typing import Any

import diffusers

from tilework.pipelines.fake.tokenizers import clip_tokenizer
from zoo.autoencoders import ancestral, ddim, euler, kl, lcm, pndm
from zoo.model import GUIDED, PROMPT, SQUARE, STEPS, entry, mask, picture
from zoo.parts import WIDTH, clip_pictures, clip_text, clip_vision

UNET = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "attention_head_dim": (2, 4),
    "norm_num_groups": 4,
}


def unet(**options: Any) -> Any:
    up = {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": WIDTH}
    return diffusers.UNet2DConditionModel(**UNET | up | options)


def controlnet(**options: Any) -> Any:
    sizes = {"cross_attention_dim": WIDTH, "conditioning_embedding_out_channels": (4, 8, 8, 8)}
    unet_sizes = {name: value for name, value in UNET.items() if name != "sample_size"}
    # Each level of the small embedding halves the picture but for the first: three halvings give 8 px per latent.
    return diffusers.ControlNetModel(**unet_sizes | sizes | options)


def sd(sampler: Any = pndm, unet_options: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """The components of Stable Diffusion 1, without a safety checker."""
    return {
        "vae": kl(),
        "text_encoder": clip_text(),
        "tokenizer": clip_tokenizer(),
        "unet": unet(**unet_options or {}),
        "scheduler": sampler(),
        "requires_safety_checker": False,
    } | others


def _sd2() -> dict[str, Any]:
    """Version 2: linear projections in the attention, and a prediction of the velocity."""
    parts = sd(unet_options={"use_linear_projection": True})
    return parts | {"scheduler": ddim(prediction_type="v_prediction")}


def _safe() -> dict[str, Any]:
    """Version 1 with its safety checker, and with an image encoder for image prompts."""
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker

    vision = clip_vision()
    checker = StableDiffusionSafetyChecker(
        diffusers.pipelines.stable_diffusion.safety_checker.CLIPConfig(
            projection_dim=WIDTH, vision_config=vision.config.to_dict(), text_config=clip_text().config.to_dict()
        )
    )
    checker.concept_embeds_weights.data.fill_(1.0)
    checker.special_care_embeds_weights.data.fill_(1.0)
    return sd(euler) | {
        "safety_checker": checker,
        "feature_extractor": clip_pictures(),
        "requires_safety_checker": True,
    }


def _upscaler() -> dict[str, Any]:
    levels = {"in_channels": 7, "num_class_embeds": 1000}
    parts = sd(ddim, levels) | {"low_res_scheduler": diffusers.DDPMScheduler(), "max_noise_level": 350}
    parts.pop("requires_safety_checker")
    return parts


def _lcm() -> dict[str, Any]:
    return sd(lcm, {"time_cond_proj_dim": 8})


def _variation() -> dict[str, Any]:
    parts = {"image_encoder": clip_vision(), "feature_extractor": clip_pictures()}
    return {"vae": kl(), "unet": unet(), "scheduler": pndm(), "requires_safety_checker": False} | parts


def _depth() -> dict[str, Any]:
    import transformers as tf

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    backbone = tf.DPTConfig(
        image_size=32,
        patch_size=16,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        backbone_out_indices=[0, 1, 2, 3],
        **sizes,
    )
    parts = sd(pndm, {"in_channels": 5})
    parts.pop("requires_safety_checker")
    pictures = tf.DPTImageProcessorPil(size={"height": 32, "width": 32})
    return parts | {"depth_estimator": tf.DPTForDepthEstimation(backbone), "feature_extractor": pictures}


FROM_PICTURE = GUIDED | STEPS | {"image": picture(), "strength": 0.75}
MASKED = GUIDED | SQUARE | {"image": picture(), "mask_image": mask()}
CONTROL = {"control_image": picture(seed=1)}
REPAINT = {"in_channels": 9}
"""An inpainting model proper sees the mask and the masked picture besides the latents."""


MODELS = (
    entry("sd1", "StableDiffusion", "text to image", sd, GUIDED | SQUARE),
    entry("sd1-ancestral", "StableDiffusion", "text to image", lambda: sd(ancestral), GUIDED | SQUARE),
    entry("sd1-safe", "StableDiffusion", "text to image", _safe, GUIDED | SQUARE),
    entry("sd2", "StableDiffusion", "text to image", _sd2, GUIDED | SQUARE | {"guidance_rescale": 0.7}),
    entry("sd1-image", "StableDiffusionImg2Img", "image to image", sd, FROM_PICTURE),
    entry(
        "sd1-variation", "StableDiffusionImageVariation", "image to image", _variation, SQUARE | {"image": picture()}
    ),
    entry("sd2-depth", "StableDiffusionDepth2Img", "image to image", _depth, FROM_PICTURE),
    entry("sd1-inpaint", "StableDiffusionInpaint", "inpaint", lambda: sd(pndm, REPAINT), MASKED),
    entry("sd1-inpaint-blend", "StableDiffusionInpaint", "inpaint", sd, MASKED | {"strength": 0.75}),
    entry(
        "sd1-control",
        "StableDiffusionControlNet",
        "control",
        lambda: sd(controlnet=controlnet()),
        GUIDED | SQUARE | {"image": picture()},
    ),
    entry(
        "sd1-control-two",
        "StableDiffusionControlNet",
        "control",
        lambda: sd(controlnet=[controlnet(), controlnet()]),
        GUIDED | SQUARE | {"image": [picture(), picture(seed=1)]},
    ),
    entry(
        "sd1-control-image",
        "StableDiffusionControlNetImg2Img",
        "control",
        lambda: sd(controlnet=controlnet()),
        FROM_PICTURE | CONTROL,
    ),
    entry(
        "sd1-control-inpaint",
        "StableDiffusionControlNetInpaint",
        "control",
        lambda: sd(controlnet=controlnet()),
        MASKED | CONTROL,
    ),
    entry(
        "sd1-pix2pix",
        "StableDiffusionInstructPix2Pix",
        "edit",
        lambda: sd(ancestral, {"in_channels": 8}),
        GUIDED | STEPS | {"image": picture()},
    ),
    entry(
        "sd2-upscale", "StableDiffusionUpscale", "image to image", _upscaler, GUIDED | STEPS | {"image": picture(16)}
    ),
    entry("lcm", "LatentConsistencyModel", "text to image", _lcm, PROMPT | SQUARE),
    entry(
        "lcm-image",
        "LatentConsistencyModelImg2Img",
        "image to image",
        _lcm,
        PROMPT | STEPS | {"image": picture(), "strength": 0.75},
    ),
)
