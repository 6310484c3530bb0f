"""Models of clips with a U-Net: AnimateDiff, Stable Video Diffusion, I2VGen-XL, ModelScope's text to video, PIA."""

from __future__ import annotations

from typing import Any

import diffusers

from tilework.pipelines.fake.tokenizers import clip_tokenizer
from zoo.autoencoders import ancestral, ddim, kl
from zoo.model import CLIP, GUIDED, STEPS, clip, entry, picture
from zoo.parts import WIDTH, clip_pictures, clip_text, clip_vision
from zoo.stable_diffusion import UNET, controlnet, sd
from zoo.stable_diffusion_xl import sdxl


def _motion(**options: Any) -> Any:
    sizes = {"motion_layers_per_block": 1, "motion_norm_num_groups": 2, "motion_num_attention_heads": 4}
    return diffusers.MotionAdapter(block_out_channels=UNET["block_out_channels"], **sizes | options)


def _linear() -> Any:
    return ddim(beta_schedule="linear")


def _animate(**others: Any) -> dict[str, Any]:
    """Stable Diffusion 1 whose layers get attention between frames."""
    parts = sd(_linear, motion_adapter=_motion()) | others
    parts.pop("requires_safety_checker")
    return parts


def _animate_xl() -> dict[str, Any]:
    return sdxl(_linear, motion_adapter=_motion(use_motion_mid_block=False))


def _sparse() -> dict[str, Any]:
    """The control pictures are for some frames alone."""
    levels = {name: value for name, value in UNET.items() if name not in ("sample_size", "attention_head_dim")}
    control = diffusers.SparseControlNetModel(
        **levels | {"down_block_types": ("DownBlockMotion", "CrossAttnDownBlockMotion")},
        cross_attention_dim=WIDTH,
        num_attention_heads=(2, 4),
        conditioning_embedding_out_channels=(4, 8, 8, 8),
        conditioning_channels=3,
        use_simplified_condition_embedding=False,
    )
    return _animate(controlnet=control)


def _svd() -> dict[str, Any]:
    """From a picture, without a prompt."""
    unet = diffusers.UNetSpatioTemporalConditionModel(
        block_out_channels=(32, 32),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=WIDTH,
        num_attention_heads=(2, 4),
        projection_class_embeddings_input_dim=3 * 8,
        addition_time_embed_dim=8,
    )
    vae = diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, sample_size=64
    )
    sampler = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        timestep_spacing="leading",
        timestep_type="continuous",
        sigma_min=0.002,
        sigma_max=700.0,
        use_karras_sigmas=True,
        interpolation_type="linear",
        steps_offset=1,
    )
    seeing = {"image_encoder": clip_vision(image_size=224, patch_size=32), "feature_extractor": clip_pictures()}
    return seeing | {"vae": vae, "unet": unet, "scheduler": sampler}


def _levels3d() -> dict[str, Any]:
    return {
        "block_out_channels": (32, 32),
        "layers_per_block": 1,
        "sample_size": 8,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        "cross_attention_dim": WIDTH,
        "norm_num_groups": 4,
    }


def _i2vgen() -> dict[str, Any]:
    from diffusers.models.unets.unet_i2vgen_xl import I2VGenXLUNet

    parts = {"text_encoder": clip_text(), "tokenizer": clip_tokenizer(), "image_encoder": clip_vision()}
    unet = I2VGenXLUNet(**_levels3d(), attention_head_dim=4)
    return parts | {"feature_extractor": clip_pictures(), "unet": unet, "scheduler": _linear(), "vae": kl()}


def _text_to_video() -> dict[str, Any]:
    unet = diffusers.UNet3DConditionModel(**_levels3d(), attention_head_dim=4)
    parts = {"text_encoder": clip_text(), "tokenizer": clip_tokenizer()}
    return parts | {"unet": unet, "scheduler": _linear(), "vae": kl()}


CLIPS = GUIDED | CLIP
FROM_CLIP = GUIDED | STEPS | {"video": clip(), "strength": 0.75, "height": 32, "width": 32}
SPARSE = CLIPS | {"conditioning_frames": [picture(32)], "controlnet_frame_indices": [0]}
I2VGEN = CLIPS | {"image": picture(32), "target_fps": 16, "decode_chunk_size": 2, "clip_skip": None}

MODELS = (
    entry("animate-diff", "AnimateDiff", "text to video", _animate, CLIPS),
    entry("animate-diff-noise", "AnimateDiff", "text to video", lambda: _animate(scheduler=ancestral()), CLIPS),
    entry("animate-diff-xl", "AnimateDiffSDXL", "text to video", _animate_xl, CLIPS),
    entry("animate-diff-pag", "AnimateDiffPAG", "text to video", _animate, CLIPS | {"pag_scale": 2.0}),
    entry("animate-diff-video", "AnimateDiffVideoToVideo", "video to video", _animate, FROM_CLIP),
    entry(
        "animate-diff-control",
        "AnimateDiffControlNet",
        "control",
        lambda: _animate(controlnet=controlnet()),
        CLIPS | {"conditioning_frames": clip()},
    ),
    entry(
        "animate-diff-control-video",
        "AnimateDiffVideoToVideoControlNet",
        "control",
        lambda: _animate(controlnet=controlnet()),
        FROM_CLIP | {"conditioning_frames": clip()},
    ),
    entry("animate-diff-sparse", "AnimateDiffSparseControlNet", "control", _sparse, SPARSE),
    entry("svd", "StableVideoDiffusion", "image to video", _svd, CLIP | {"image": picture(32), "decode_chunk_size": 2}),
    entry("i2vgen", "I2VGenXL", "image to video", _i2vgen, I2VGEN),
    entry("text-to-video", "TextToVideoSD", "text to video", _text_to_video, CLIPS),
    entry(
        "text-to-video-video", "VideoToVideoSD", "video to video", _text_to_video, GUIDED | STEPS | {"video": clip()}
    ),
    entry(
        "pia",
        "PIA",
        "image to video",
        lambda: _animate(motion_adapter=_motion(conv_in_channels=9)),
        CLIPS | {"image": picture(32)},
    ),
)
