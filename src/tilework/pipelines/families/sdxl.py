"""Stable Diffusion XL: diffusers' `StableDiffusionXLPipeline.__call__` in parts, over its own components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilework.core.comm import Comm
from tilework.core.wire.spec import Spec
from tilework.pipelines import slices
from tilework.pipelines.arguments import SIZES, as_tuple, clip_layers
from tilework.pipelines.defaults import Defaults, sides_of
from tilework.pipelines.families.latent_state import Conditioning
from tilework.pipelines.families.u_net import UNetPipeline


class StableDiffusionXL(UNetPipeline):
    """The family of `StableDiffusionXLPipeline`. See `UNetPipeline`."""

    def __init__(self, pipeline: Any, name: str, overrides: Mapping[str, Any], library: str) -> None:
        arguments = {**dict.fromkeys(("prompt_2", "negative_prompt_2", *SIZES)), "clip_skip": clip_layers(pipeline)}
        super().__init__(
            pipeline, _stock_defaults(pipeline, name), overrides, library, family="sdxl", arguments=arguments
        )
        # Stock converts it to float32 and back for each image, since it overflows in half precision.
        if pipeline.vae.dtype == torch.float16 and pipeline.vae.config.force_upcast:
            pipeline.vae.to(torch.float32)

    @torch.no_grad()
    def encode(self, spec: Spec) -> Conditioning:
        guided = self._is_guided(spec)
        text, negative_text, pooled, negative_pooled = self._pipeline.encode_prompt(
            prompt=spec.prompt,
            prompt_2=spec.arguments.get("prompt_2"),
            device=self.device,
            do_classifier_free_guidance=guided,
            negative_prompt=spec.negative_prompt,
            negative_prompt_2=spec.arguments.get("negative_prompt_2"),
            clip_skip=spec.arguments.get("clip_skip"),
        )
        positive_sizes, negative_sizes = _sizes(spec)
        time_ids = torch.tensor([positive_sizes], dtype=text.dtype, device=self.device)
        if guided:
            text = torch.cat([negative_text, text], dim=0)
            pooled = torch.cat([negative_pooled, pooled], dim=0)
            negative_ids = torch.tensor([negative_sizes], dtype=text.dtype, device=self.device)
            time_ids = torch.cat([negative_ids, time_ids], dim=0)
        tensors = {"encoder_hidden_states": text, "text_embeds": pooled, "time_ids": time_ids}
        return Conditioning({**tensors, **self._guidance(spec, text.dtype)})

    def _added(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: conditioning[name] for name in ("text_embeds", "time_ids")}

    def _decode(self, latents: Tensor, sliced: bool = False, comm: Comm | None = None) -> Tensor:
        pipeline = self._pipeline
        config = self._pipeline.vae.config
        latents = latents.to(pipeline.vae.dtype)
        if config.get("latents_mean") is not None and config.get("latents_std") is not None:
            mean, std = (
                torch.tensor(numbers).view(1, -1, 1, 1).to(latents.device, latents.dtype)
                for numbers in (config.latents_mean, config.latents_std)
            )
            latents = latents * std / config.scaling_factor + mean
        else:
            latents = latents / config.scaling_factor
        decoded = slices.decode(pipeline.vae, latents, sliced, comm)
        return decoded if pipeline.watermark is None else pipeline.watermark.apply_watermark(decoded)


def _sizes(spec: Spec) -> tuple[list[float], list[float]]:
    """Return sizes and crops for the model, (height, width) each: for the positive and the negative pass."""
    given = spec.arguments
    size = (spec.height, spec.width)
    positive = [
        *as_tuple(given.get("original_size", size)),
        *as_tuple(given.get("crops_coords_top_left", (0, 0))),
        *as_tuple(given.get("target_size", size)),
    ]
    if "negative_original_size" not in given or "negative_target_size" not in given:
        return positive, positive
    return positive, [
        *as_tuple(given["negative_original_size"]),
        *as_tuple(given.get("negative_crops_coords_top_left", (0, 0))),
        *as_tuple(given["negative_target_size"]),
    ]


def _stock_defaults(pipeline: Any, name: str) -> Defaults:
    """Return the defaults of `StableDiffusionXLPipeline.__call__`; twice the side is the limit.

    The U-Net could draw any size, but images fall apart beyond that. The text encoders fix the text's length
    themselves.
    """
    height, width = sides_of(pipeline.default_sample_size, pipeline.vae_scale_factor, "unet/config.json")
    return Defaults(
        name=name,
        steps=50,
        guidance_scale=5.0,
        height=height,
        width=width,
        max_side=2 * max(height, width),
        max_sequence_length=0,
    )
