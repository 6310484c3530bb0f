"""Stable Diffusion 3: diffusers' `StableDiffusion3Pipeline.__call__` in parts, over its own components."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift, retrieve_timesteps
from torch import Tensor

from tilework.core.wire import Image, ModelInfo, Spec
from tilework.pipelines import freight
from tilework.pipelines.defaults import Defaults, resolve
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.family import Conditioning, StepState

# Words in the class names of diffusers' samplers that draw noise in each step whatever their configuration.
_STOCHASTIC = ("Ancestral", "DDPM", "LCM", "SASolver", "SDE", "TCD")


class StableDiffusion3:
    """The family of `StableDiffusion3Pipeline`. `guidance_scale` above 1 adds the negative pass, as in stock.

    The stock pipeline hands its sampler no random generator, so a sampler that draws noise in a step would make the
    picture depend on what else the process drew: such samplers are refused.

    Raises:
        UnsupportedModel: the sampler is stochastic.
        InvalidDefaults: see `defaults.resolve`.
    """

    def __init__(self, pipeline: Any, name: str, overrides: Mapping[str, Any], library: str) -> None:
        _refuse_stochastic(pipeline.scheduler)
        self._pipeline = pipeline
        # diffusers' own property walks all modules on each read: 0.5 ms, and a worker reads it after every step.
        self._device: torch.device = pipeline.transformer.device
        self._side_multiple: int = pipeline.vae_scale_factor * pipeline.patch_size
        self._defaults = resolve(self._stock_defaults(name), overrides, self._side_multiple)
        self._info = self._describe(library)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def device(self) -> torch.device:
        return self._device

    @torch.no_grad()
    def encode(self, spec: Spec) -> Conditioning:
        guided = spec.guidance_scale > 1
        text, negative_text, pooled, negative_pooled = self._pipeline.encode_prompt(
            prompt=spec.prompt,
            prompt_2=None,
            prompt_3=None,
            negative_prompt=spec.negative_prompt,
            do_classifier_free_guidance=guided,
            device=self.device,
            max_sequence_length=self._defaults.max_sequence_length,
        )
        if guided:
            text = torch.cat([negative_text, text], dim=0)
            pooled = torch.cat([negative_pooled, pooled], dim=0)
        return Conditioning({"encoder_hidden_states": text, "pooled_projections": pooled})

    @torch.no_grad()
    def begin(self, spec: Spec, conditioning: Conditioning) -> StepState:
        pipeline = self._pipeline
        latents = pipeline.prepare_latents(
            1,
            pipeline.transformer.config.in_channels,
            spec.height,
            spec.width,
            conditioning.tensors["encoder_hidden_states"].dtype,
            self.device,
            torch.Generator("cpu").manual_seed(spec.seed),
        )
        sampler = copy.deepcopy(pipeline.scheduler)
        retrieve_timesteps(sampler, spec.steps, self.device, **self._shift(latents))
        num_iterations = len(sampler.timesteps)
        if num_iterations <= (spec.steps - 1) * sampler.order:
            name = type(sampler).__name__
            raise UnsupportedModel(f"{name} makes {num_iterations} iterations of {spec.steps} steps; ask for fewer")
        return StepState(spec=spec, conditioning=conditioning, latents=latents, sampler=sampler)

    def predict(self, states: Sequence[StepState]) -> list[Tensor]:
        return [self._predict_one(state) for state in states]

    @torch.no_grad()
    def advance(self, state: StepState, prediction: Tensor) -> None:
        state.latents = state.sampler.step(prediction, state.timestep, state.latents, return_dict=False)[0]
        state.iteration_index += 1

    @torch.no_grad()
    def decode(self, state: StepState) -> Image:
        vae = self._pipeline.vae
        latents = (state.latents / vae.config.scaling_factor) + vae.config.shift_factor
        decoded = vae.decode(latents, return_dict=False)[0]
        picture = self._pipeline.image_processor.postprocess(decoded, output_type="pil")[0]
        return Image(height=picture.height, width=picture.width, pixels=picture.tobytes())

    def export(self, state: StepState) -> bytes:
        return freight.pack((state.latents, state.sampler, state.iteration_index))

    def restore(self, blob: bytes, spec: Spec, conditioning: Conditioning) -> StepState:
        latents, sampler, iteration_index = freight.unpack(blob, self.device)
        return StepState(
            spec=spec, conditioning=conditioning, latents=latents, sampler=sampler, iteration_index=iteration_index
        )

    def export_conditioning(self, conditioning: Conditioning) -> bytes:
        return freight.pack(dict(conditioning.tensors))

    def restore_conditioning(self, blob: bytes) -> Conditioning:
        return Conditioning(freight.unpack(blob, self.device))

    @torch.no_grad()
    def _predict_one(self, state: StepState) -> Tensor:
        guided = state.spec.guidance_scale > 1
        latents = torch.cat([state.latents] * 2) if guided else state.latents
        prediction: Tensor = self._pipeline.transformer(
            hidden_states=latents,
            timestep=state.timestep.expand(latents.shape[0]),
            return_dict=False,
            **state.conditioning.tensors,
        )[0]
        if guided:
            negative, positive = prediction.chunk(2)
            prediction = negative + state.spec.guidance_scale * (positive - negative)
        return prediction

    def _shift(self, latents: Tensor) -> dict[str, float]:
        """Arguments of the sampler that depend on the size of the picture."""
        config = self._pipeline.scheduler.config
        if not config.get("use_dynamic_shifting", None):
            return {}
        patch_size = self._pipeline.transformer.config.patch_size
        num_tokens = (latents.shape[2] // patch_size) * (latents.shape[3] // patch_size)
        mu = calculate_shift(
            num_tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.16),
        )
        return {"mu": mu}

    def _stock_defaults(self, name: str) -> Defaults:
        """What `StableDiffusion3Pipeline.__call__` assumes, as far as the positional table of the model allows it."""
        max_side = self._pipeline.transformer.config.pos_embed_max_size * self._side_multiple
        side = min(self._pipeline.default_sample_size * self._pipeline.vae_scale_factor, max_side)
        return Defaults(
            name=name,
            steps=28,
            guidance_scale=7.0,
            height=side,
            width=side,
            max_side=max_side,
            max_sequence_length=256,
        )

    def _describe(self, library: str) -> ModelInfo:
        defaults = self._defaults
        modules = [part for part in self._pipeline.components.values() if isinstance(part, torch.nn.Module)]
        return ModelInfo(
            name=defaults.name,
            family="sd3",
            side_multiple=self._side_multiple,
            max_side=defaults.max_side,
            default_height=defaults.height,
            default_width=defaults.width,
            default_steps=defaults.steps,
            default_guidance_scale=float(defaults.guidance_scale),
            parameters=sum(parameter.numel() for module in modules for parameter in module.parameters()),
            library=library,
        )


def _refuse_stochastic(sampler: Any) -> None:
    name, config = type(sampler).__name__, sampler.config
    draws_noise = (
        config.get("stochastic_sampling", False)
        or config.get("algorithm_type", "").startswith("sde-")
        or any(word in name for word in _STOCHASTIC)
    )
    if draws_noise:
        raise UnsupportedModel(
            f"scheduler/scheduler_config.json: {name} so configured draws noise in each step that no seed decides; "
            "choose a deterministic sampler"
        )
