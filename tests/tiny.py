"""Builders of tiny models with random weights, and what the stock pipeline makes of them; for all tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from PIL import Image as Picture
from transformers import CLIPTextModel, T5Config, T5EncoderModel, T5Tokenizer

from tilework.core.model import ModelSource
from tilework.core.wire.spec import Image, Spec
from tilework.pipelines.draw import begin_steps
from tilework.pipelines.families.latent_state import LatentState
from tilework.pipelines.family import Family
from tilework.pipelines.loading import quiet
from tilework.pipelines.model_index import INDEX, shipped_directory
from tilework.pipelines.numerics import pin_numerics
from tilework.pipelines.serialization import deserialize, serialize
from tilework.pipelines.workflow.source import read_workflow
from training.shapes.model import build_text_encoder, build_tokenizer

_SCALED_LINEAR = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "timestep_spacing": "leading",
}
# By name: the sampler of Stable Diffusion 3, one that depends on the picture's size (that of FLUX), one with two
# forwards per step, one that remembers earlier predictions; that of Stable Diffusion XL, and one that draws noise.
SAMPLERS = {
    "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
    "shifting": lambda: FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=4, max_image_seq_len=64, base_shift=0.4, max_shift=1.2
    ),
    "heun": lambda: FlowMatchHeunDiscreteScheduler(shift=3.0),
    "dpm": lambda: DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=2
    ),
    "sdxl-euler": lambda: EulerDiscreteScheduler(**_SCALED_LINEAR),
    "sdxl-ancestral": lambda: EulerAncestralDiscreteScheduler(**_SCALED_LINEAR),
}
TEXT_LENGTH = 16
LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 167666902\n".encode()
"""What git leaves in place of a large file that was not pulled."""


def prepare() -> None:
    """One thread and no chatter, as in a worker process; call it before anything is computed."""
    pin_numerics(threads=1)
    quiet()


def build_sd3(sampler: str = "euler", max_side: int = 192, num_heads: int = 2, dual: bool = False) -> Any:
    """Stable Diffusion 3 in miniature (0.3M weights), with T5; SAMPLERS has the choices. 16 px per token.

    `dual` adds what version 3.5 has: a second attention over the image alone, and normalised queries and keys.
    """
    torch.manual_seed(0)
    tokenizer, t5_tokenizer = build_tokenizer(), _t5_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=_sd3_transformer(max_side // 16, num_heads, dual),
        scheduler=SAMPLERS[sampler](),
        vae=_autoencoder(shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=build_text_encoder(tokenizer).eval(),
        tokenizer=tokenizer,
        text_encoder_2=build_text_encoder(tokenizer).eval(),
        tokenizer_2=build_tokenizer(),
        text_encoder_3=_t5(len(t5_tokenizer)),
        tokenizer_3=t5_tokenizer,
    )


def build_flux(sampler: str = "shifting", guidance_embeds: bool = True) -> Any:
    """FLUX in miniature (0.5M weights, 5 heads); without `guidance_embeds` as its variant schnell. 16 px per token."""
    torch.manual_seed(0)
    tokenizer, t5_tokenizer = build_tokenizer(), _t5_tokenizer()
    return FluxPipeline(
        transformer=_flux_transformer(guidance_embeds),
        scheduler=SAMPLERS[sampler](),
        vae=_autoencoder(shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=CLIPTextModel(build_text_encoder(tokenizer).config).eval(),
        tokenizer=tokenizer,
        text_encoder_2=_t5(len(t5_tokenizer)),
        tokenizer_2=t5_tokenizer,
    )


def build_sdxl(sampler: str = "sdxl-euler", distilled: bool = False, deep: bool = False) -> Any:
    """Stable Diffusion XL in miniature (0.4M weights); `distilled` has the guidance scale as an input.

    `deep` has three levels, as the real one, and not two.
    """
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    return StableDiffusionXLPipeline(
        unet=_unet(
            deep=deep,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 64,
            cross_attention_dim=128,
            time_cond_proj_dim=8 if distilled else None,
        ),
        scheduler=SAMPLERS[sampler](),
        vae=_autoencoder(),
        text_encoder=CLIPTextModel(build_text_encoder(tokenizer).config).eval(),
        tokenizer=tokenizer,
        text_encoder_2=build_text_encoder(tokenizer).eval(),
        tokenizer_2=build_tokenizer(),
        add_watermarker=False,
    )


def build_sd(sampler: str = "sdxl-euler") -> Any:
    """Stable Diffusion 1 in miniature (0.3M weights), without a safety checker."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    return StableDiffusionPipeline(
        unet=_unet(cross_attention_dim=64),
        scheduler=SAMPLERS[sampler](),
        vae=_autoencoder(),
        text_encoder=CLIPTextModel(build_text_encoder(tokenizer).config).eval(),
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def save(pipeline: Any, directory: Path, name: str) -> None:
    """Save a tiny pipeline in `directory`, with defaults."""
    pipeline.save_pretrained(directory, safe_serialization=True)
    write_defaults(directory, name=name, steps=4, height=64, width=64, max_sequence_length=TEXT_LENGTH)


def save_sd3(directory: Path, sampler: str = "euler") -> None:
    save(build_sd3(sampler), directory, "tiny-sd3")


def write_defaults(directory: Path, **defaults: Any) -> None:
    (directory / "tilework.json").write_text(json.dumps(defaults), encoding="utf-8")


def shapes_with_sampler(directory: Path, sampler: str) -> ModelSource:
    """A copy of the shipped model in `directory` with another sampler."""
    shutil.copytree(shipped_directory(), directory, dirs_exist_ok=True)
    replacement = SAMPLERS[sampler]()
    replacement.save_pretrained(directory / "scheduler")
    index = json.loads((directory / INDEX).read_text())
    index["scheduler"] = ["diffusers", type(replacement).__name__]
    (directory / INDEX).write_text(json.dumps(index))
    return ModelSource(path=str(directory))


def spec(**changes: Any) -> Spec:
    """A guided 64 px request of 4 steps."""
    defaults: dict[str, Any] = {
        "prompt": "a red circle on a blue background",
        "height": 64,
        "width": 64,
        "steps": 4,
        "guidance_scale": 4.0,
        "seed": 7,
    }
    return Spec(**(defaults | changes))


@dataclass(frozen=True)
class Stock:
    """What a stock pipeline does for a request: the latents after each of its iterations, and the picture."""

    latents: list[torch.Tensor]
    pixels: np.ndarray


def run_stock(
    pipeline: Any,
    request: Spec,
    max_sequence_length: int = TEXT_LENGTH,
    generator: torch.Generator | None = None,
    instead: Mapping[int, torch.Tensor] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Stock:
    """Run a stock pipeline of any family; `generator` is of the request's seed unless given.

    `arguments` are further ones of its call.

    `instead` are latents, by the index of an iteration, that it goes on from instead of those that it has made.
    """
    latents: list[torch.Tensor] = []

    def keep(_pipeline: Any, index: int, _time: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        latents.append(tensors["latents"].clone())
        return {"latents": instead[index]} if instead and index in instead else {}

    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline(
        request.prompt,
        height=request.height,
        width=request.width,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance_scale,
        generator=generator or torch.Generator("cpu").manual_seed(request.seed),
        callback_on_step_end=keep,
        **_text_arguments(pipeline, request, max_sequence_length) | dict(arguments or {}),
    ).images[0]
    return Stock(latents, np.asarray(picture))


def begin(family: Family, request: Spec) -> LatentState:
    return begin_steps(family, request)


def iterate(family: Family, *states: LatentState) -> None:
    """One iteration of each state, predicted together."""
    for state, prediction in zip(states, family.predict(states), strict=True):
        family.advance(state, prediction)


def finish(family: Family, *states: LatentState) -> None:
    """Iterate, all together, until each state has done its steps."""
    while running := [state for state in states if state.steps_done < state.spec.steps]:
        iterate(family, *running)


def move(source: Family, target: Family, state: LatentState) -> LatentState:
    """Carry a request, conditioning and all, from one instance of a model to another."""
    before, exported = (
        deserialize(serialize(values), target.device)
        for values in ({"conditioning": dict(state.conditioning.tensors)}, source.export(state))
    )
    return target.restore(state.stage, state.spec, before, exported)


def decode(family: Family, state: LatentState, sliced: bool = False) -> Image:
    """The picture of a state that has made all its steps."""
    (values,) = family.run(family.info.graph.stages[-1].name, [state.spec], [family.finish(state)], sliced)
    return family.image(state.spec, values)


def pixels(image: Image) -> np.ndarray:
    return np.frombuffer(image.pixels, dtype=np.uint8).reshape(image.height, image.width, 3)


def _text_arguments(pipeline: Any, request: Spec, max_sequence_length: int) -> dict[str, Any]:
    if isinstance(pipeline, FluxPipeline):
        return {"max_sequence_length": max_sequence_length}
    if isinstance(pipeline, StableDiffusionXLPipeline | StableDiffusionPipeline):
        return {"negative_prompt": request.negative_prompt}
    return {"negative_prompt": request.negative_prompt, "max_sequence_length": max_sequence_length}


def _sd3_transformer(pos_embed_max_size: int, num_heads: int, dual: bool) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=num_heads,
        joint_attention_dim=128,
        caption_projection_dim=16 * num_heads,
        pooled_projection_dim=128,
        pos_embed_max_size=pos_embed_max_size,
        dual_attention_layers=(0,) if dual else (),
        qk_norm="rms_norm" if dual else None,
    ).eval()


def _flux_transformer(guidance_embeds: bool) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=5,
        joint_attention_dim=128,
        pooled_projection_dim=64,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    ).eval()


def _unet(deep: bool = False, **options: Any) -> UNet2DConditionModel:
    num_levels = 3 if deep else 2
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32, 32)[:num_levels],
        layers_per_block=1,
        down_block_types=("DownBlock2D", *["CrossAttnDownBlock2D"] * (num_levels - 1)),
        up_block_types=(*["CrossAttnUpBlock2D"] * (num_levels - 1), "UpBlock2D"),
        attention_head_dim=(2, 4, 4)[:num_levels],
        norm_num_groups=4,
        **options,
    ).eval()


def _autoencoder(**options: Any) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=1.5,
        **options,
    ).eval()


def _t5_tokenizer() -> T5Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=[*pieces, *((letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz")], extra_ids=0)


def _t5(num_tokens: int) -> T5EncoderModel:
    config = T5Config(vocab_size=num_tokens, d_model=128, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return T5EncoderModel(config).eval()


def poster(stock: Any, path: str, request: Spec) -> Any:
    """The picture of `examples/poster.py`: its functions and the stock pipeline of shapes, called in a row."""
    long_prompt, large, checked = (one.make for one in read_workflow(path).functions)
    drawn = run_stock(stock, replace(request, prompt=long_prompt(request.prompt)), max_sequence_length=0).pixels
    return checked(large(Picture.fromarray(drawn)))
