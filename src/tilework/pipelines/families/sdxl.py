"""Stable Diffusion XL: diffusers' `StableDiffusionXLPipeline.__call__` in parts, over its own components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilework.core.wire import Spec
from tilework.pipelines import slices
from tilework.pipelines.defaults import Defaults, sides_of
from tilework.pipelines.families.u_net import UNetPipeline
from tilework.pipelines.family import Conditioning


class StableDiffusionXL(UNetPipeline):
    """The family of `StableDiffusionXLPipeline`, with its defaults: no cropping. See `UNetPipeline`.

    An empty negative prompt means none, as in a stock call without one: many such models then take zeros for it.
    """

    def __init__(self, pipeline: Any, name: str, overrides: Mapping[str, Any], library: str) -> None:
        super().__init__(pipeline, _stock_defaults(pipeline, name), overrides, library, family="sdxl")
        # Stock converts it to float32 and back for each picture, since it overflows in half precision.
        if pipeline.vae.dtype == torch.float16 and pipeline.vae.config.force_upcast:
            pipeline.vae.to(torch.float32)

    @torch.no_grad()
    def encode(self, spec: Spec) -> Conditioning:
        guided = self._is_guided(spec)
        text, negative_text, pooled, negative_pooled = self._pipeline.encode_prompt(
            prompt=spec.prompt,
            device=self.device,
            do_classifier_free_guidance=guided,
            negative_prompt=spec.negative_prompt or None,
        )
        size = (spec.height, spec.width)
        time_ids = torch.tensor([[*size, 0, 0, *size]], dtype=text.dtype, device=self.device)
        if guided:
            text = torch.cat([negative_text, text], dim=0)
            pooled = torch.cat([negative_pooled, pooled], dim=0)
            time_ids = torch.cat([time_ids] * 2, dim=0)
        tensors = {"encoder_hidden_states": text, "text_embeds": pooled, "time_ids": time_ids}
        return Conditioning({**tensors, **self._guidance(spec, text.dtype)})

    def _added(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: conditioning[name] for name in ("text_embeds", "time_ids")}

    def _decode(self, latents: Tensor, sliced: bool = False) -> Tensor:
        pipeline, config = self._pipeline, self._pipeline.vae.config
        latents = latents.to(pipeline.vae.dtype)
        if config.get("latents_mean") is not None and config.get("latents_std") is not None:
            mean, std = (
                torch.tensor(numbers).view(1, -1, 1, 1).to(latents.device, latents.dtype)
                for numbers in (config.latents_mean, config.latents_std)
            )
            latents = latents * std / config.scaling_factor + mean
        else:
            latents = latents / config.scaling_factor
        decoded = slices.decode(pipeline.vae, latents, sliced)
        return decoded if pipeline.watermark is None else pipeline.watermark.apply_watermark(decoded)


def _stock_defaults(pipeline: Any, name: str) -> Defaults:
    """The defaults of `StableDiffusionXLPipeline.__call__`. The U-Net could draw any size; twice this side is the
    limit.

    Beyond it pictures fall apart. The text encoders fix the text's length themselves.
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
