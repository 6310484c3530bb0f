"""FLUX: diffusers' `FluxPipeline.__call__` in parts, over its own components."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps
from torch import Tensor

from tilework.core.comm import Comm
from tilework.core.packing import Layout, Size
from tilework.core.wire.spec import Spec
from tilework.pipelines import slices
from tilework.pipelines.arguments import as_number, as_tuple
from tilework.pipelines.defaults import Defaults
from tilework.pipelines.families.latent_state import Conditioning, LatentState
from tilework.pipelines.packing import pack_transformer
from tilework.pipelines.previews.estimate import clean_by_flow
from tilework.pipelines.sequence import share
from tilework.pipelines.staged import Pieces, StagedPipeline, stack

_NEGATIVE = "negative_"  # Prefix of tensors that only the second pass has.


class Flux(StagedPipeline):
    """The family of `FluxPipeline` (dev, and schnell, which has no guidance).

    The guidance scale is an input of the model. With `true_cfg_scale` above 1 there is a second pass, after the first
    one as in stock, away from the negative prompt. Latents are packed: (1, tokens, channels x 4).
    """

    def __init__(self, pipeline: Any, name: str, overrides: Mapping[str, Any], library: str) -> None:
        transformer = pipeline.transformer
        super().__init__(
            pipeline,
            transformer,
            _stock_defaults(pipeline, name),
            overrides,
            library,
            family="flux",
            side_multiple=pipeline.vae_scale_factor * 2,
            two_passes=False,
            max_degree=transformer.config.num_attention_heads,
            cell_multiple=1,
            arguments={
                **dict.fromkeys(("prompt_2", "negative_prompt_2", "true_cfg_scale", "max_sequence_length")),
                "sigmas": 1.0,
            },
        )
        shared = share(transformer, self._parallel)
        assert shared, f"{type(transformer).__name__} has no row in SEQUENCES, but a degree above 1 is offered"
        pack_transformer(transformer, self._packing, text_first=True)

    @torch.no_grad()
    def encode(self, spec: Spec) -> Conditioning:
        text, pooled, text_ids = self._encode(spec, spec.prompt, "prompt_2")
        # Given latents, stock draws none and only adds the ids that belong to the size.
        _, image_ids = self._prepare(spec, text.dtype, latents=torch.empty(0))
        tensors = {
            "encoder_hidden_states": text,
            "pooled_projections": pooled,
            "txt_ids": text_ids,
            "img_ids": image_ids,
        }
        if spec.negative_prompt is not None and _true_scale(spec) > 1:
            negative = self._encode(spec, spec.negative_prompt, "negative_prompt_2")
            names = ("encoder_hidden_states", "pooled_projections", "txt_ids")
            tensors |= {f"{_NEGATIVE}{name}": tensor for name, tensor in zip(names, negative, strict=True)}
        if self._pipeline.transformer.config.guidance_embeds:
            tensors["guidance"] = torch.full([1], spec.guidance_scale, device=self.device, dtype=torch.float32)
        return Conditioning(tensors)

    def _encode(self, spec: Spec, prompt: str, other: str) -> tuple[Tensor, Tensor, Tensor]:
        """Encode a text, whose part for T5 may be the argument `other`; return tokens, pooled form and positions."""
        encoded: tuple[Tensor, Tensor, Tensor] = self._pipeline.encode_prompt(
            prompt=prompt,
            prompt_2=spec.arguments.get(other),
            device=self.device,
            max_sequence_length=spec.arguments.get("max_sequence_length", self._defaults.max_sequence_length),
        )
        return encoded

    def _set_timesteps(self, sampler: Any, spec: Spec) -> None:
        config = sampler.config
        side = self._info.side_multiple
        given = spec.arguments.get("sigmas")
        sigmas: Any = np.linspace(1.0, 1 / spec.steps, spec.steps) if given is None else list(as_tuple(given))
        if config.get("use_flow_sigmas", False):
            sigmas = None
        mu = calculate_shift(
            (spec.height // side) * (spec.width // side),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        retrieve_timesteps(sampler, spec.steps, self.device, sigmas=sigmas, mu=mu)
        sampler.set_begin_index(0)

    def _draw_latents(self, spec: Spec, dtype: torch.dtype, sampler: Any, generator: torch.Generator) -> Tensor:
        return self._prepare(spec, dtype, generator=generator)[0]

    def _prepare(
        self,
        spec: Spec,
        dtype: torch.dtype,
        generator: torch.Generator | None = None,
        latents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        prepared: tuple[Tensor, Tensor] = self._pipeline.prepare_latents(
            1,
            self._pipeline.transformer.config.in_channels // 4,
            spec.height,
            spec.width,
            dtype,
            self.device,
            generator,
            latents,
        )
        return prepared

    def _forward(self, state: LatentState, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        timestep = state.timestep.expand(latents.shape[0]).to(latents.dtype)
        positive = {name: tensor for name, tensor in conditioning.items() if not name.startswith(_NEGATIVE)}
        negative = {name.removeprefix(_NEGATIVE): conditioning[name] for name in conditioning.keys() - positive.keys()}
        passes = [
            self._denoise(state, context, hidden_states=latents, timestep=timestep / 1000, **positive | other)
            for context, other in [("cond", {}), ("uncond", negative)][: 2 if negative else 1]
        ]
        if not negative:
            return passes[0]
        return passes[1] + _true_scale(state.spec) * (passes[0] - passes[1])

    def _no_cache(self, spec: Spec) -> str:
        second = "true_cfg_scale adds a pass of its own to each step, which is not packed"
        return second if _true_scale(spec) > 1 else super()._no_cache(spec)

    def _packing_key(self, state: LatentState) -> Hashable:
        return id(state) if _true_scale(state.spec) > 1 else super()._packing_key(state)

    def _forward_packed(self, layout: Layout, patches: Tensor, times: Tensor, conditioning: Pieces) -> Tensor:
        inputs = stack(layout, conditioning)
        if layout.is_plain:  # All rows share the rotary embedding.
            inputs |= {name: conditioning[name][0] for name in ("txt_ids", "img_ids")}
        else:  # The embedding is that of all texts and then all patches, concatenated.
            places = [ids.T.view(-1, *size) for ids, size in zip(conditioning["img_ids"], layout.sizes, strict=True)]
            inputs["img_ids"] = layout.split(places).flatten(2).transpose(1, 2).flatten(0, 1)
        prediction: Tensor = self._pipeline.transformer(
            hidden_states=patches.flatten(2).transpose(1, 2),
            timestep=times.to(patches.dtype) / 1000,
            return_dict=False,
            **inputs,
        )[0]
        return prediction.transpose(1, 2).reshape(len(patches), -1, *patches.shape[2:])

    def _size(self, state: LatentState) -> Size:
        """Return the size in tokens: a patch may be a single one."""
        side = self._info.side_multiple
        return state.spec.height // side, state.spec.width // side

    def _picture(self, state: LatentState) -> Tensor:
        return state.latents[0].T.view(-1, *self._size(state))

    def _prediction(self, picture: Tensor) -> Tensor:
        return picture.flatten(1).T.contiguous()[None]

    def _estimate(self, state: LatentState, prediction: Tensor) -> Tensor:
        return clean_by_flow(state.sampler, prediction, state.timestep, state.latents)

    def _unpack(self, latents: Tensor, spec: Spec) -> Tensor:
        side = self._info.side_multiple
        rows, columns = spec.height // side, spec.width // side
        # Each token is a square of 2 x 2 latents, channels first.
        squares = latents.view(1, rows, columns, -1, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return squares.reshape(1, -1, 2 * rows, 2 * columns)

    def _decode(self, latents: Tensor, sliced: bool = False, comm: Comm | None = None) -> Tensor:
        vae = self._pipeline.vae
        return slices.decode(vae, (latents / vae.config.scaling_factor) + vae.config.shift_factor, sliced, comm)


def _true_scale(spec: Spec) -> float:
    """Return the scale; 1 without a negative prompt: as in stock there is nothing then to guide away from."""
    return 1.0 if spec.negative_prompt is None else as_number(spec.arguments.get("true_cfg_scale", 1.0))


def _stock_defaults(pipeline: Any, name: str) -> Defaults:
    """Return the defaults of `FluxPipeline.__call__`. The model accepts any size, but fails beyond twice this side."""
    side = pipeline.default_sample_size * pipeline.vae_scale_factor
    return Defaults(
        name=name,
        steps=28,
        guidance_scale=3.5,
        height=side,
        width=side,
        max_side=2 * side,
        max_sequence_length=512,
    )
