"""The models that `tilework fake` makes, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tilework.pipelines.fake.component import Component, FakeModel, Guider, Sampler, Weights
from tilework.pipelines.fake.parts import (
    BYT5_SMALL,
    BYT5_TOKENS,
    BYTES,
    CLIP_TOKENS,
    EULER,
    FEW_STEPS,
    FLOW,
    KL_FLUX,
    KL_FLUX2,
    KL_QWEN,
    KL_SD3,
    KL_SDXL,
    KL_WAN,
    KL_WAN_5B,
    QWEN3_4B,
    QWEN3_4B_WITH_HEAD,
    QWEN25_7B,
    SHIFTING_FLOW,
    SHIFTING_LTX,
    T5_TOKENS,
    T5_XXL,
    UMT5_XXL,
    UNIPC,
    clip_g,
    clip_l,
    gemma3_12b,
    mistral_small_24b,
    qwen25_vl_7b,
)


def _sdxl() -> FakeModel:
    unet = {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    }
    return FakeModel(
        source="stabilityai/stable-diffusion-xl-base-1.0",
        pipeline="StableDiffusionXLPipeline",
        components={
            "scheduler": EULER,
            "text_encoder": clip_l(),
            "text_encoder_2": clip_g(),
            "tokenizer": CLIP_TOKENS,
            "tokenizer_2": CLIP_TOKENS,
            "unet": Weights("diffusers", "UNet2DConditionModel", unet),
            "vae": KL_SDXL,
        },
        options={"force_zeros_for_empty_prompt": True},
    )


def _sd3(source: str, **transformer: Any) -> FakeModel:
    sizes = {"sample_size": 128, "in_channels": 16, "out_channels": 16, "attention_head_dim": 64}
    widths = {"joint_attention_dim": 4096, "pooled_projection_dim": 2048}
    return FakeModel(
        source=source,
        pipeline="StableDiffusion3Pipeline",
        components={
            "scheduler": FLOW,
            "text_encoder": clip_l(pooled=True),
            "text_encoder_2": clip_g(),
            "text_encoder_3": T5_XXL,
            "tokenizer": CLIP_TOKENS,
            "tokenizer_2": CLIP_TOKENS,
            "tokenizer_3": T5_TOKENS,
            "transformer": Weights("diffusers", "SD3Transformer2DModel", sizes | widths | transformer),
            "vae": KL_SD3,
        },
    )


def _flux(source: str, guidance_embeds: bool, scheduler: Sampler) -> FakeModel:
    return FakeModel(
        source=source,
        pipeline="FluxPipeline",
        components={
            "scheduler": scheduler,
            "text_encoder": clip_l(),
            "text_encoder_2": T5_XXL,
            "tokenizer": CLIP_TOKENS,
            "tokenizer_2": T5_TOKENS,
            "transformer": Weights("diffusers", "FluxTransformer2DModel", {"guidance_embeds": guidance_embeds}),
            "vae": KL_FLUX,
        },
    )


def _flux2() -> FakeModel:
    """Return FLUX.2 [dev]; its transformer and autoencoder have the model's sizes by default."""
    return FakeModel(
        source="black-forest-labs/FLUX.2-dev",
        pipeline="Flux2Pipeline",
        components={
            "scheduler": SHIFTING_FLOW,
            "text_encoder": mistral_small_24b(),
            "tokenizer": BYTES,
            "transformer": Weights("diffusers", "Flux2Transformer2DModel"),
            "vae": KL_FLUX2,
        },
    )


def _klein() -> FakeModel:
    sizes = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}
    return FakeModel(
        source="black-forest-labs/FLUX.2-klein-4B",
        pipeline="Flux2KleinPipeline",
        components={
            "scheduler": SHIFTING_FLOW,
            "text_encoder": QWEN3_4B_WITH_HEAD,
            "tokenizer": BYTES,
            "transformer": Weights("diffusers", "Flux2Transformer2DModel", sizes | {"guidance_embeds": False}),
            "vae": KL_FLUX2,
        },
        options={"is_distilled": True},
    )


def _qwen_image() -> FakeModel:
    return FakeModel(
        source="Qwen/Qwen-Image",
        pipeline="QwenImagePipeline",
        components={
            "scheduler": SHIFTING_FLOW,
            "text_encoder": qwen25_vl_7b(),
            "tokenizer": BYTES,
            "transformer": Weights("diffusers", "QwenImageTransformer2DModel"),
            "vae": KL_QWEN,
        },
    )


def _z_image() -> FakeModel:
    return FakeModel(
        source="Tongyi-MAI/Z-Image-Turbo",
        pipeline="ZImagePipeline",
        components={
            "scheduler": FLOW,
            "text_encoder": QWEN3_4B,
            "tokenizer": BYTES,
            "transformer": Weights("diffusers", "ZImageTransformer2DModel"),
            "vae": KL_FLUX,
        },
    )


def _wan(source: str, vae: Weights, transformer: Mapping[str, Any], two: bool = False, **options: Any) -> FakeModel:
    denoiser = Weights("diffusers", "WanTransformer3DModel", transformer)
    parts: dict[str, Component] = {
        "scheduler": UNIPC,
        "text_encoder": UMT5_XXL,
        "tokenizer": T5_TOKENS,
        "transformer": denoiser,
        "vae": vae,
    }
    if two:
        parts["transformer_2"] = denoiser
    return FakeModel(
        source=source,
        pipeline="WanPipeline",
        components=parts,
        options=options,
    )


def _hunyuan_video15() -> FakeModel:
    return FakeModel(
        source="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
        pipeline="HunyuanVideo15Pipeline",
        components={
            "guider": Guider("ClassifierFreeGuidance", {"guidance_scale": 6.0}),
            "scheduler": Sampler("FlowMatchEulerDiscreteScheduler", {"shift": 9.0}),
            "text_encoder": QWEN25_7B,
            "text_encoder_2": BYT5_SMALL,
            "tokenizer": BYTES,
            "tokenizer_2": BYT5_TOKENS,
            "transformer": Weights(
                "diffusers", "HunyuanVideo15Transformer3DModel", {"target_size": 960, "task_type": "t2v"}
            ),
            "vae": Weights("diffusers", "AutoencoderKLHunyuanVideo15"),
        },
    )


def _ltx2() -> FakeModel:
    """Return LTX-2; its classes have the model's sizes by default."""
    return FakeModel(
        source="Lightricks/LTX-2",
        pipeline="LTX2Pipeline",
        components={
            "audio_vae": Weights("diffusers", "AutoencoderKLLTX2Audio"),
            "connectors": Weights("ltx2", "LTX2TextConnectors"),
            "scheduler": SHIFTING_LTX,
            "text_encoder": gemma3_12b(),
            "tokenizer": BYTES,
            "transformer": Weights("diffusers", "LTX2VideoTransformer3DModel"),
            "vae": Weights("diffusers", "AutoencoderKLLTX2Video", {"decoder_causal": False}),
            "vocoder": Weights("ltx2", "LTX2Vocoder"),
        },
    )


_SMALL_WAN = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
_MIDDLE_WAN = {
    "num_attention_heads": 24,
    "ffn_dim": 14336,
    "num_layers": 30,
    "in_channels": 48,
    "out_channels": 48,
}
_QK_NORM = {"qk_norm": "rms_norm"}

MODELS: Mapping[str, FakeModel] = MappingProxyType(
    {
        "SDXL": _sdxl(),
        "SD3-medium": _sd3(
            "stabilityai/stable-diffusion-3-medium-diffusers",
            num_layers=24,
            num_attention_heads=24,
            caption_projection_dim=1536,
            pos_embed_max_size=192,
        ),
        "SD3.5-medium": _sd3(
            "stabilityai/stable-diffusion-3.5-medium",
            num_layers=24,
            num_attention_heads=24,
            caption_projection_dim=1536,
            pos_embed_max_size=384,
            dual_attention_layers=tuple(range(13)),
            **_QK_NORM,
        ),
        "SD3.5-large": _sd3(
            "stabilityai/stable-diffusion-3.5-large",
            num_layers=38,
            num_attention_heads=38,
            caption_projection_dim=2432,
            pos_embed_max_size=192,
            **_QK_NORM,
        ),
        "FLUX.1-dev": _flux("black-forest-labs/FLUX.1-dev", True, SHIFTING_FLOW),
        "FLUX.1-schnell": _flux("black-forest-labs/FLUX.1-schnell", False, FEW_STEPS),
        "FLUX.2-dev": _flux2(),
        "FLUX.2-klein-4B": _klein(),
        "Qwen-Image": _qwen_image(),
        "Z-Image-Turbo": _z_image(),
        "HunyuanVideo-1.5": _hunyuan_video15(),
        "LTX-2": _ltx2(),
        "Wan2.1-T2V-1.3B": _wan("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", KL_WAN, _SMALL_WAN),
        "Wan2.2-TI2V-5B": _wan("Wan-AI/Wan2.2-TI2V-5B-Diffusers", KL_WAN_5B, _MIDDLE_WAN, expand_timesteps=True),
        "Wan2.2-T2V-A14B": _wan("Wan-AI/Wan2.2-T2V-A14B-Diffusers", KL_WAN, {}, two=True, boundary_ratio=0.875),
    }
)
