"""The common part of the families with a U-Net: Stable Diffusion and Stable Diffusion XL."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg, retrieve_timesteps
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from tilework.core.packing import Layout
from tilework.core.wire.spec import Spec
from tilework.pipelines.arguments import as_number, as_tuple
from tilework.pipelines.defaults import Defaults
from tilework.pipelines.families.latent_state import LatentState
from tilework.pipelines.hooks import share_passes
from tilework.pipelines.packing import pack_u_net
from tilework.pipelines.previews.estimate import clean_by_noise
from tilework.pipelines.staged import Pieces, StagedPipeline, stack


class UNetPipeline(StagedPipeline):
    """Denoising of a pipeline around a U-Net.

    `guidance_scale` above 1 adds the negative pass, unless the scale is an input of the model (distilled models).

    The U-Net's image is not split: two ranks share the passes of guidance, further ones repeat the work.
    """

    def __init__(
        self,
        pipeline: Any,
        stock: Defaults,
        overrides: Mapping[str, Any],
        library: str,
        *,
        family: str,
        arguments: Mapping[str, float | None],
    ) -> None:
        two_passes = pipeline.unet.config.time_cond_proj_dim is None
        super().__init__(
            pipeline,
            pipeline.unet,
            stock,
            overrides,
            library,
            family=family,
            side_multiple=pipeline.vae_scale_factor,
            two_passes=two_passes,
            max_degree=2 if two_passes else 1,
            cell_multiple=2**pipeline.unet.num_upsamplers,
            arguments={
                "eta": None,
                "guidance_rescale": None if two_passes else -1,
                "sigmas": None,
                "timesteps": pipeline.scheduler.config.num_train_timesteps - 1,
                **arguments,
            },
        )
        share_passes(pipeline.unet, self._parallel, output="conv_out")
        pack_u_net(pipeline.unet, self._packing)

    @abstractmethod
    def _added(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the inputs of the U-Net besides time, text and guidance."""

    def _guidance(self, spec: Spec, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the guidance scale as an input of distilled models; empty for others."""
        if self._info.two_passes:
            return {}
        embedding: Tensor = self._pipeline.get_guidance_scale_embedding(
            torch.tensor(spec.guidance_scale - 1).repeat(1),
            embedding_dim=self._pipeline.unet.config.time_cond_proj_dim,
        )
        return {"timestep_cond": embedding.to(self.device, dtype)}

    def _set_timesteps(self, sampler: Any, spec: Spec) -> None:
        timesteps, sigmas = (spec.arguments.get(name) for name in ("timesteps", "sigmas"))
        retrieve_timesteps(
            sampler,
            spec.steps,
            self.device,
            None if timesteps is None else list(as_tuple(timesteps)),
            None if sigmas is None else list(as_tuple(sigmas)),
        )
        if hasattr(sampler, "set_begin_index"):
            sampler.set_begin_index(0)

    def _draw_latents(self, spec: Spec, dtype: torch.dtype, sampler: Any, generator: torch.Generator) -> Tensor:
        """Draw latents as `prepare_latents`, which would scale by the sampler that all requests share."""
        pipeline = self._pipeline
        side = self._info.side_multiple
        shape = (1, pipeline.unet.config.in_channels, spec.height // side, spec.width // side)
        noise: Tensor = randn_tensor(shape, generator=generator, device=self.device, dtype=dtype)
        scaled: Tensor = noise * sampler.init_noise_sigma
        return scaled

    def _forward(self, state: LatentState, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        prediction: Tensor = self._pipeline.unet(
            state.sampler.scale_model_input(latents, state.timestep),
            state.timestep,
            encoder_hidden_states=conditioning["encoder_hidden_states"],
            timestep_cond=conditioning.get("timestep_cond"),
            added_cond_kwargs=self._added(conditioning),
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
            added_cond_kwargs=self._added(per_patch),
            return_dict=False,
        )[0]
        return prediction

    def _guide(self, state: LatentState, negative: Tensor, positive: Tensor) -> Tensor:
        prediction = super()._guide(state, negative, positive)
        rescale = as_number(state.spec.arguments.get("guidance_rescale", 0.0))
        if rescale > 0:
            prediction = rescale_noise_cfg(prediction, positive, guidance_rescale=rescale)
        return prediction

    def _picture(self, state: LatentState) -> Tensor:
        scaled: Tensor = state.sampler.scale_model_input(state.latents, state.timestep)
        return scaled[0]

    def _accepted_by(self, sampler: Any) -> Mapping[str, Any]:
        eta = {"eta": 0.0} if "eta" in inspect.signature(sampler.step).parameters else {}
        return {**super()._accepted_by(sampler), **eta}

    def _estimate(self, state: LatentState, prediction: Tensor) -> Tensor:
        return clean_by_noise(state.sampler, prediction, state.timestep, state.latents)
