"""Stable Diffusion 1 and 2: diffusers' `StableDiffusionPipeline.__call__` in parts, over its own components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilework.core.comm import Comm
from tilework.core.wire.spec import Spec
from tilework.pipelines import slices
from tilework.pipelines.arguments import clip_layers
from tilework.pipelines.defaults import Defaults, sides_of
from tilework.pipelines.families.latent_state import Conditioning
from tilework.pipelines.families.u_net import UNetPipeline

_BLACK = -1.0


class StableDiffusion(UNetPipeline):
    """The family of `StableDiffusionPipeline`. See `UNetPipeline`.

    If the model has a safety checker, images that it rejects are black, as in stock.
    """

    def __init__(self, pipeline: Any, name: str, overrides: Mapping[str, Any], library: str) -> None:
        arguments = {"clip_skip": clip_layers(pipeline)}
        super().__init__(
            pipeline, _stock_defaults(pipeline, name), overrides, library, family="sd", arguments=arguments
        )

    @torch.no_grad()
    def encode(self, spec: Spec) -> Conditioning:
        guided = self._is_guided(spec)
        text, negative_text = self._pipeline.encode_prompt(
            prompt=spec.prompt,
            device=self.device,
            num_images_per_prompt=1,
            do_classifier_free_guidance=guided,
            negative_prompt=spec.negative_prompt,
            clip_skip=spec.arguments.get("clip_skip"),
        )
        if guided:
            text = torch.cat([negative_text, text])
        return Conditioning({"encoder_hidden_states": text, **self._guidance(spec, text.dtype)})

    def _added(self, conditioning: Mapping[str, Tensor]) -> None:
        return None

    def _decode(self, latents: Tensor, sliced: bool = False, comm: Comm | None = None) -> Tensor:
        pipeline = self._pipeline
        decoded = slices.decode(pipeline.vae, latents / pipeline.vae.config.scaling_factor, sliced, comm)
        checked: Tensor
        checked, found = pipeline.run_safety_checker(decoded, self.device, decoded.dtype)
        for index, is_unsafe in enumerate(found or ()):
            if is_unsafe:
                checked[index] = _BLACK
        return checked


def _stock_defaults(pipeline: Any, name: str) -> Defaults:
    """Return the defaults of `StableDiffusionPipeline.__call__`; as for SDXL, twice the side is the limit."""
    height, width = sides_of(pipeline.unet.config.sample_size, pipeline.vae_scale_factor, "unet/config.json")
    return Defaults(
        name=name,
        steps=50,
        guidance_scale=7.5,
        height=height,
        width=width,
        max_side=2 * max(height, width),
        max_sequence_length=0,
    )
