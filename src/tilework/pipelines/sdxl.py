"""Stable Diffusion XL: diffusers' `StableDiffusionXLPipeline.__call__` in parts, over its own components."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import retrieve_timesteps
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from tilework.core.packing import Layout
from tilework.core.wire import Spec
from tilework.pipelines import slices
from tilework.pipelines.defaults import Defaults
from tilework.pipelines.estimate import clean_by_noise
from tilework.pipelines.family import Conditioning, StepState
from tilework.pipelines.hooks import share_passes
from tilework.pipelines.packing import pack_u_net
from tilework.pipelines.staged import Pieces, StagedPipeline, stack


class StableDiffusionXL(StagedPipeline):
    """The family of `StableDiffusionXLPipeline`, with its defaults: no cropping, eta 0, no rescaling of guidance.

    An empty negative prompt means none, as in a stock call without one: many such models then take zeros for it.
    `guidance_scale` above 1 adds the negative pass, except where it is an input of the model (distilled ones).

    The U-Net's picture is not split: two ranks share the passes of guidance, further ones repeat the work.
    """

    def __init__(self, pipeline: Any, name: str, overrides: Mapping[str, Any], library: str) -> None:
        two_passes = pipeline.unet.config.time_cond_proj_dim is None
        super().__init__(
            pipeline,
            pipeline.unet,
            _stock_defaults(pipeline, name),
            overrides,
            library,
            family="sdxl",
            side_multiple=pipeline.vae_scale_factor,
            two_passes=two_passes,
            max_degree=2 if two_passes else 1,
            cell_multiple=2**pipeline.unet.num_upsamplers,
        )
        share_passes(pipeline.unet, self._parallel, output="conv_out")
        pack_u_net(pipeline.unet, self._packing)
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
        if not self._info.two_passes:
            tensors["timestep_cond"] = self._embedded_guidance(spec).to(self.device, text.dtype)
        return Conditioning(tensors)

    def _embedded_guidance(self, spec: Spec) -> Tensor:
        embedding: Tensor = self._pipeline.get_guidance_scale_embedding(
            torch.tensor(spec.guidance_scale - 1).repeat(1),
            embedding_dim=self._pipeline.unet.config.time_cond_proj_dim,
        )
        return embedding

    def _set_timesteps(self, sampler: Any, spec: Spec) -> None:
        retrieve_timesteps(sampler, spec.steps, self.device)
        if hasattr(sampler, "set_begin_index"):
            sampler.set_begin_index(0)

    def _draw_latents(self, spec: Spec, dtype: torch.dtype, sampler: Any, generator: torch.Generator) -> Tensor:
        """As `prepare_latents`, which would scale by the sampler that all requests share."""
        pipeline, side = self._pipeline, self._info.side_multiple
        shape = (1, pipeline.unet.config.in_channels, spec.height // side, spec.width // side)
        noise: Tensor = randn_tensor(shape, generator=generator, device=self.device, dtype=dtype)
        scaled: Tensor = noise * sampler.init_noise_sigma
        return scaled

    def _forward(self, state: StepState, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        prediction: Tensor = self._pipeline.unet(
            state.sampler.scale_model_input(latents, state.timestep),
            state.timestep,
            encoder_hidden_states=conditioning["encoder_hidden_states"],
            timestep_cond=conditioning.get("timestep_cond"),
            added_cond_kwargs={name: conditioning[name] for name in ("text_embeds", "time_ids")},
            return_dict=False,
        )[0]
        return prediction

    def _forward_packed(self, layout: Layout, patches: Tensor, times: Tensor, conditioning: Pieces) -> Tensor:
        inputs = stack(layout, conditioning)
        text = inputs.pop("encoder_hidden_states")
        per_patch = {name: layout.per_patch(rows) for name, rows in inputs.items()}
        prediction: Tensor = self._pipeline.unet(
            patches,
            layout.per_patch(times),
            encoder_hidden_states=text,
            timestep_cond=per_patch.get("timestep_cond"),
            added_cond_kwargs={name: per_patch[name] for name in ("text_embeds", "time_ids")},
            return_dict=False,
        )[0]
        return prediction

    def _picture(self, state: StepState) -> Tensor:
        scaled: Tensor = state.sampler.scale_model_input(state.latents, state.timestep)
        return scaled[0]

    def _accepted_by(self, sampler: Any) -> Mapping[str, Any]:
        eta = {"eta": 0.0} if "eta" in inspect.signature(sampler.step).parameters else {}
        return {**super()._accepted_by(sampler), **eta}

    def _estimate(self, state: StepState, prediction: Tensor) -> Tensor:
        return clean_by_noise(state, prediction)

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
    """What `StableDiffusionXLPipeline.__call__` assumes. The U-Net could draw any size; twice this side is the limit.

    Beyond it pictures fall apart. The text encoders fix the text's length themselves.
    """
    side = pipeline.default_sample_size * pipeline.vae_scale_factor
    return Defaults(
        name=name,
        steps=50,
        guidance_scale=5.0,
        height=side,
        width=side,
        max_side=2 * side,
        max_sequence_length=0,
    )
