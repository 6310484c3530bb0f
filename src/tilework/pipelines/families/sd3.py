"""Stable Diffusion 3: diffusers' `StableDiffusion3Pipeline.__call__` in parts, over its own components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift, retrieve_timesteps
from torch import Tensor

from tilework.core.comm import Comm
from tilework.core.packing import Layout
from tilework.core.wire.spec import Spec
from tilework.pipelines import slices
from tilework.pipelines.arguments import SKIPS, TEXTS, as_number, as_tuple, clip_layers
from tilework.pipelines.defaults import Defaults, sides_of
from tilework.pipelines.families.latent_state import Conditioning, LatentState
from tilework.pipelines.packing import pack_positions, pack_transformer
from tilework.pipelines.previews.estimate import clean_by_flow
from tilework.pipelines.sequence import share
from tilework.pipelines.staged import Pieces, StagedPipeline, stack


class StableDiffusion3(StagedPipeline):
    """The family of `StableDiffusion3Pipeline`. `guidance_scale` above 1 adds the negative pass, as in stock."""

    def __init__(self, pipeline: Any, name: str, overrides: Mapping[str, Any], library: str) -> None:
        transformer = pipeline.transformer
        super().__init__(
            pipeline,
            transformer,
            _stock_defaults(pipeline, name),
            overrides,
            library,
            family="sd3",
            side_multiple=pipeline.vae_scale_factor * pipeline.patch_size,
            two_passes=True,
            max_degree=2 * transformer.config.num_attention_heads,
            cell_multiple=pipeline.patch_size,
            arguments={
                **dict.fromkeys((*TEXTS, "max_sequence_length", "mu", *SKIPS)),
                "clip_skip": clip_layers(pipeline),
                "sigmas": 1.0,
                "skip_guidance_layers": transformer.config.num_layers - 1,
            },
        )
        shared = share(transformer, self._parallel)
        assert shared, f"{type(transformer).__name__} has no row in SEQUENCES, but a degree above 1 is offered"
        pack_transformer(transformer, self._packing, text_first=False)
        pack_positions(transformer.pos_embed, self._packing)

    @torch.no_grad()
    def encode(self, spec: Spec) -> Conditioning:
        guided, given = self._is_guided(spec), spec.arguments
        text, negative_text, pooled, negative_pooled = self._pipeline.encode_prompt(
            prompt=spec.prompt,
            prompt_2=given.get("prompt_2"),
            prompt_3=given.get("prompt_3"),
            negative_prompt=spec.negative_prompt,
            negative_prompt_2=given.get("negative_prompt_2"),
            negative_prompt_3=given.get("negative_prompt_3"),
            do_classifier_free_guidance=guided,
            device=self.device,
            clip_skip=given.get("clip_skip"),
            max_sequence_length=given.get("max_sequence_length", self._defaults.max_sequence_length),
        )
        if guided:
            text = torch.cat([negative_text, text], dim=0)
            pooled = torch.cat([negative_pooled, pooled], dim=0)
        return Conditioning({"encoder_hidden_states": text, "pooled_projections": pooled})

    def _set_timesteps(self, sampler: Any, spec: Spec) -> None:
        sigmas = spec.arguments.get("sigmas")
        retrieve_timesteps(
            sampler,
            spec.steps,
            self.device,
            sigmas=None if sigmas is None else list(as_tuple(sigmas)),
            **self._shift(sampler, spec),
        )

    def _shift(self, sampler: Any, spec: Spec) -> dict[str, float]:
        """Return arguments of the sampler that depend on the size of the image."""
        config = sampler.config
        side = self._info.side_multiple
        if not config.get("use_dynamic_shifting", None):
            return {}
        if "mu" in spec.arguments:
            return {"mu": as_number(spec.arguments["mu"])}
        mu = calculate_shift(
            (spec.height // side) * (spec.width // side),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.16),
        )
        return {"mu": mu}

    def _draw_latents(self, spec: Spec, dtype: torch.dtype, sampler: Any, generator: torch.Generator) -> Tensor:
        latents: Tensor = self._pipeline.prepare_latents(
            1,
            self._pipeline.transformer.config.in_channels,
            spec.height,
            spec.width,
            dtype,
            self.device,
            generator,
        )
        return latents

    def _guide(self, state: LatentState, negative: Tensor, positive: Tensor) -> Tensor:
        """Apply guidance. With skipped layers, steps in a window have a third pass, whole on each rank of a group."""
        prediction = super()._guide(state, negative, positive)
        given = state.spec.arguments
        if "skip_guidance_layers" not in given:
            return prediction
        num_steps = len(state.sampler.timesteps) if "sigmas" in given else state.spec.steps
        scale, start, stop = (as_number(given.get(name, default)) for name, default in SKIPS.items())
        if num_steps * start < state.iteration_index < num_steps * stop:
            with self._parallel.suspended():
                skipped: Tensor = self._pipeline.transformer(
                    hidden_states=state.latents,
                    timestep=state.timestep.expand(1),
                    return_dict=False,
                    skip_layers=list(as_tuple(given["skip_guidance_layers"])),
                    **{name: tensor[1:] for name, tensor in state.conditioning.tensors.items()},
                )[0]
            prediction = prediction + (positive - skipped) * scale
        return prediction

    def _forward(self, state: LatentState, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        return self._denoise(
            state, hidden_states=latents, timestep=state.timestep.expand(latents.shape[0]), **conditioning
        )

    def _forward_packed(self, layout: Layout, patches: Tensor, times: Tensor, conditioning: Pieces) -> Tensor:
        prediction: Tensor = self._pipeline.transformer(
            hidden_states=patches, timestep=times, return_dict=False, **stack(layout, conditioning)
        )[0]
        return prediction

    def _estimate(self, state: LatentState, prediction: Tensor) -> Tensor:
        return clean_by_flow(state.sampler, prediction, state.timestep, state.latents)

    def _decode(self, latents: Tensor, sliced: bool = False, comm: Comm | None = None) -> Tensor:
        vae = self._pipeline.vae
        return slices.decode(vae, (latents / vae.config.scaling_factor) + vae.config.shift_factor, sliced, comm)


def _stock_defaults(pipeline: Any, name: str) -> Defaults:
    """Return the defaults of `StableDiffusion3Pipeline.__call__`, as far as the positional table allows them."""
    max_side = pipeline.transformer.config.pos_embed_max_size * pipeline.vae_scale_factor * pipeline.patch_size
    sides = sides_of(pipeline.default_sample_size, pipeline.vae_scale_factor, "transformer/config.json")
    height, width = (min(side, max_side) for side in sides)
    return Defaults(
        name=name,
        steps=28,
        guidance_scale=7.0,
        height=height,
        width=width,
        max_side=max_side,
        max_sequence_length=256,
    )
