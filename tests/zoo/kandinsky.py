"""Kandinsky 2.2, 3 and 5."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from tilework.pipelines.fake.tokenizers import clip_tokenizer, t5_tokenizer
from zoo.autoencoders import FLUX_LATENTS, flow, kl
from zoo.hunyuan import kl_hunyuan
from zoo.model import CLIP, GUIDED, SQUARE, STEPS, entry, mask, picture
from zoo.parts import WIDTH, clip_pictures, clip_text, clip_vision, qwen25_vl, t5_text, vision_processor
from zoo.stable_diffusion import UNET

EMBEDDING = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(3))
EMBEDDINGS = {"image_embeds": EMBEDDING, "negative_image_embeds": -EMBEDDING}


def _movq() -> Any:
    """An autoencoder whose decoder is told the latents at each level."""
    return diffusers.VQModel(
        block_out_channels=(32, 32, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 3 + ("AttnDownEncoderBlock2D",),
        up_block_types=("AttnUpDecoderBlock2D",) + ("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        norm_type="spatial",
        num_vq_embeddings=12,
        vq_embed_dim=4,
    )


def _unet22(in_channels: int = 4, **options: Any) -> Any:
    """A picture's embedding takes the place of the prompt; the prediction includes a variance."""
    levels = {
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    }
    embeddings = {
        "addition_embed_type": "image",
        "encoder_hid_dim_type": "image_proj",
        "encoder_hid_dim": WIDTH,
        "cross_attention_dim": 16,
        "resnet_time_scale_shift": "scale_shift",
        "attention_head_dim": 4,
        "class_embed_type": None,
    }
    channels = {"in_channels": in_channels, "out_channels": 8}
    return diffusers.UNet2DConditionModel(**UNET | levels | embeddings | channels | options)


def _linear(**options: Any) -> Any:
    betas = {"beta_schedule": "linear", "beta_start": 0.00085, "beta_end": 0.012, "clip_sample": False}
    return diffusers.DDPMScheduler(**betas | options)


def _kandinsky22(in_channels: int = 4, **options: Any) -> dict[str, Any]:
    unet = _unet22(in_channels, **options)
    return {"unet": unet, "scheduler": _linear(variance_type="learned_range"), "movq": _movq()}


def _prior22() -> dict[str, Any]:
    """The first of two pipelines: it makes a picture's embedding from a prompt."""
    prior = diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=12, embedding_dim=WIDTH, num_layers=1, num_embeddings=77
    )
    return {
        "prior": prior,
        "image_encoder": clip_vision(),
        "text_encoder": clip_text(pooled=True),
        "tokenizer": clip_tokenizer(),
        "scheduler": diffusers.UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", num_train_timesteps=1000, clip_sample_range=10.0
        ),
        "image_processor": clip_pictures(),
    }


def _combined22() -> dict[str, Any]:
    """Both pipelines in one; the prior runs inside as a pipeline of its own."""
    return _kandinsky22() | {f"prior_{name}": part for name, part in _prior22().items()}


def _kandinsky3() -> dict[str, Any]:
    unet = diffusers.Kandinsky3UNet(
        time_embedding_dim=4,
        groups=2,
        attention_head_dim=4,
        layers_per_block=3,
        block_out_channels=(16, 32),
        cross_attention_dim=4,
        encoder_hid_dim=WIDTH,
    )
    betas = {"beta_start": 0.00085, "beta_end": 0.02, "beta_schedule": "squaredcos_cap_v2", "clip_sample": True}
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_text(),
        "unet": unet,
        "scheduler": diffusers.DDPMScheduler(**betas, thresholding=False),
        "movq": _movq(),
    }


def _kandinsky5(vae: Any, conditioned: bool = False, channels: int = 4) -> dict[str, Any]:
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=channels,
        out_visual_dim=channels,
        in_text_dim=WIDTH,
        in_text_dim2=WIDTH,
        time_dim=16,
        model_dim=16,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(2, 2, 4),
        visual_cond=conditioned,
    )
    return {
        "transformer": transformer,
        "vae": vae,
        "text_encoder": qwen25_vl(),
        "tokenizer": vision_processor("Qwen2VLProcessor"),
        "text_encoder_2": clip_text(),
        "tokenizer_2": clip_tokenizer(),
        "scheduler": flow(shift=5.0),
    }


def _kl_plain() -> Any:
    """Without attention: pictures of version 5 always have a million pixels."""
    return kl(**FLUX_LATENTS, mid_block_add_attention=False)


def _picture5() -> dict[str, Any]:
    return _kandinsky5(_kl_plain())


def _edit5() -> dict[str, Any]:
    return _kandinsky5(_kl_plain(), conditioned=True)


def _image5() -> dict[str, Any]:
    return _kandinsky5(kl_hunyuan(), conditioned=True)


FROM_PICTURE = {"image": picture(), "strength": 0.75}
EMBEDDED = EMBEDDINGS | SQUARE | FROM_PICTURE
COMBINED = GUIDED | SQUARE | {"prior_num_inference_steps": 2}
LARGE = GUIDED | SQUARE | {"num_inference_steps": 2}
# The first four latent frames are scaled like the next ones, so there must be more than five.
LONG = GUIDED | CLIP | {"num_frames": 21, "image": picture(32)}
# Not loaded: the processor of Qwen 2 VL needs torchvision for its video processor.
ALONE = {"loads": False}

MODELS = (
    entry("kandinsky22", "KandinskyV22", "text to image", _kandinsky22, EMBEDDINGS | SQUARE),
    entry("kandinsky22-image", "KandinskyV22Img2Img", "image to image", _kandinsky22, EMBEDDED),
    entry(
        "kandinsky22-inpaint",
        "KandinskyV22Inpaint",
        "inpaint",
        lambda: _kandinsky22(9),
        EMBEDDINGS | SQUARE | {"image": picture(), "mask_image": mask()},
    ),
    entry(
        "kandinsky22-combined",
        "KandinskyV22Combined",
        "text to image",
        _combined22,
        COMBINED,
    ),
    entry("kandinsky3", "Kandinsky3", "text to image", _kandinsky3, GUIDED | SQUARE),
    entry("kandinsky3-image", "Kandinsky3Img2Img", "image to image", _kandinsky3, GUIDED | STEPS | FROM_PICTURE),
    entry(
        "kandinsky5-picture",
        "Kandinsky5T2I",
        "text to image",
        _picture5,
        LARGE,
        **ALONE,
    ),
    entry(
        "kandinsky5-edit",
        "Kandinsky5I2I",
        "edit",
        _edit5,
        LARGE | {"image": picture()},
        **ALONE,
    ),
    entry("kandinsky5", "Kandinsky5T2V", "text to video", lambda: _kandinsky5(kl_hunyuan()), GUIDED | CLIP, **ALONE),
    entry(
        "kandinsky5-image",
        "Kandinsky5I2V",
        "image to video",
        _image5,
        LONG,
        **ALONE,
    ),
)
