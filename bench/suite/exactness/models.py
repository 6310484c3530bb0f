"""Pipelines of all families with random weights, whose shapes are drawn from a seed, saved as users have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import diffusers
import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from tilework.pipelines.model_index import INDEX, shipped_directory

Make = Callable[[], Any]

U_NETS = ("sd", "sdxl")
TRANSFORMERS = ("sd3", "sd3.5", "flux", "schnell")
FAMILIES = (*U_NETS, *TRANSFORMERS)
TEXT_LENGTH = 16
"""`max_sequence_length` of TRANSFORMERS, for their T5."""

_SCALED_LINEAR = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
_U_NET_SAMPLERS: dict[str, Make] = {
    "euler": lambda: diffusers.EulerDiscreteScheduler(**_SCALED_LINEAR, timestep_spacing="leading", steps_offset=1),
    "dpm++2m": lambda: diffusers.DPMSolverMultistepScheduler(**_SCALED_LINEAR, steps_offset=1),
    "euler ancestral": lambda: diffusers.EulerAncestralDiscreteScheduler(**_SCALED_LINEAR, steps_offset=1),
    "edm": diffusers.EDMEulerScheduler,
}
_FLOW_SAMPLERS: dict[str, Make] = {
    "flow euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "flow dpm++2m": lambda: diffusers.DPMSolverMultistepScheduler(**_FLOW),
    "flow heun": lambda: diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0),
}
_FLUX_SAMPLERS: dict[str, Make] = {
    "flow euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    "flow dpm++2m": lambda: diffusers.DPMSolverMultistepScheduler(**_FLOW, use_dynamic_shifting=True),
    "flow unipc": lambda: diffusers.UniPCMultistepScheduler(**_FLOW, use_dynamic_shifting=True),
}


def samplers(family: str) -> dict[str, Make]:
    """The family's own first; then one that remembers predictions, and one of another kind. Flow has no EDM sampler."""
    if family in U_NETS:
        return _U_NET_SAMPLERS
    return _FLUX_SAMPLERS if family in ("flux", "schnell") else _FLOW_SAMPLERS


def save(family: str, seed: int, sampler: str, directory: Path) -> None:
    """A model of one of FAMILIES; its numbers of heads, channels and layers, and its weights, follow from `seed`."""
    torch.manual_seed(1000 * seed + FAMILIES.index(family))
    rng = Random(f"{family} {seed}")
    pipeline = {"sd": _sd, "sdxl": _sdxl, "sd3": _sd3, "sd3.5": _sd35, "flux": _flux, "schnell": _schnell}[family](rng)
    for module in pipeline.components.values():
        if isinstance(module, torch.nn.Module):
            _stir(module)
    pipeline.scheduler = samplers(family)[sampler]()
    pipeline.save_pretrained(directory, safe_serialization=True)
    defaults = {"name": family, "max_sequence_length": TEXT_LENGTH} if family in TRANSFORMERS else {"name": family}
    (directory / "tilework.json").write_text(json.dumps(defaults), encoding="utf-8")


def read_index(directory: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    return index


def _stir(module: torch.nn.Module) -> None:
    """Biases and normalisations of new modules have no effect; in trained ones they have."""
    for part in module.modules():
        if isinstance(part, torch.nn.GroupNorm | torch.nn.LayerNorm) and part.weight is not None:
            torch.nn.init.normal_(part.weight, 1.0, 0.2)
        bias = getattr(part, "bias", None)
        if isinstance(bias, torch.nn.Parameter):
            torch.nn.init.normal_(bias, 0.0, 0.05)


def _sd(rng: Random) -> Any:
    tokenizer = _tokenizer()
    return diffusers.StableDiffusionPipeline(
        unet=_unet(rng, cross_attention_dim=64),
        scheduler=_U_NET_SAMPLERS["euler"](),
        vae=_autoencoder(rng),
        text_encoder=CLIPTextModel(_text_config()).eval(),
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sdxl(rng: Random) -> Any:
    return diffusers.StableDiffusionXLPipeline(
        unet=_unet(
            rng,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 64,
            cross_attention_dim=128,
        ),
        scheduler=_U_NET_SAMPLERS["euler"](),
        vae=_autoencoder(rng),
        text_encoder=CLIPTextModel(_text_config()).eval(),
        tokenizer=_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(_text_config()).eval(),
        tokenizer_2=_tokenizer(),
        add_watermarker=False,
    )


def _sd3(rng: Random, dual: bool = False) -> Any:
    heads, head_width, layers = rng.choice((2, 3, 5)), rng.choice((8, 12, 16)), rng.choice((1, 2, 3))
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=head_width,
        num_attention_heads=heads,
        joint_attention_dim=128,
        caption_projection_dim=heads * head_width,
        pooled_projection_dim=128,
        pos_embed_max_size=16,
        dual_attention_layers=tuple(range(layers - 1)) or (0,) if dual else (),
        qk_norm="rms_norm" if dual else None,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=_FLOW_SAMPLERS["flow euler"](),
        vae=_autoencoder(rng, shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=CLIPTextModelWithProjection(_text_config()).eval(),
        tokenizer=_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(_text_config()).eval(),
        tokenizer_2=_tokenizer(),
        text_encoder_3=_t5(),
        tokenizer_3=_t5_tokenizer(),
    )


def _sd35(rng: Random) -> Any:
    return _sd3(rng, dual=True)


def _flux(rng: Random, guidance_embeds: bool = True) -> Any:
    head_width, axes = rng.choice(((16, (4, 6, 6)), (12, (4, 4, 4)), (20, (4, 8, 8))))
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=rng.choice((1, 2)),
        num_single_layers=rng.choice((1, 2, 3)),
        attention_head_dim=head_width,
        num_attention_heads=rng.choice((3, 4, 5)),
        joint_attention_dim=128,
        pooled_projection_dim=64,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=axes,
    )
    return diffusers.FluxPipeline(
        transformer=transformer.eval(),
        scheduler=_FLUX_SAMPLERS["flow euler"](),
        vae=_autoencoder(rng, shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=CLIPTextModel(_text_config()).eval(),
        tokenizer=_tokenizer(),
        text_encoder_2=_t5(),
        tokenizer_2=_t5_tokenizer(),
    )


def _schnell(rng: Random) -> Any:
    return _flux(rng, guidance_embeds=False)


def _unet(rng: Random, **options: Any) -> Any:
    """Two or three levels, whose numbers of channels are odd multiples of the number of groups."""
    levels, groups = rng.choice((2, 3)), 4
    widths = sorted(groups * rng.choice((3, 5, 7, 9)) for _ in range(levels))
    heads = [rng.choice([heads for heads in (1, 2, 3, 4, 5) if not width % heads]) for width in widths]
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=widths,
        layers_per_block=1,
        down_block_types=("DownBlock2D", *["CrossAttnDownBlock2D"] * (levels - 1)),
        up_block_types=(*["CrossAttnUpBlock2D"] * (levels - 1), "UpBlock2D"),
        attention_head_dim=heads,
        norm_num_groups=groups,
        **options,
    ).eval()


def _autoencoder(rng: Random, **options: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(rng.choice((4, 8, 12)),) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=1.5,
        **options,
    ).eval()


def _tokenizer() -> Any:
    return CLIPTokenizer.from_pretrained(shipped_directory() / "tokenizer")


def _text_config() -> Any:
    return CLIPTextConfig.from_pretrained(shipped_directory() / "text_encoder", dtype=torch.float32)


def _t5_tokenizer() -> Any:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=[*pieces, *((letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz")], extra_ids=0)


def _t5() -> Any:
    config = T5Config(vocab_size=30, d_model=128, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return T5EncoderModel(config).eval()
