"""The clean latents that a model predicts in the middle of denoising.

A prediction is an answer to an input and a time, from which the clean latents follow whatever sampler asked. Rejected:
`pred_original_sample`, which only some samplers return, and which at others' second iteration is another's.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from tilework.pipelines.families.latent_state import LatentState


def clean_by_flow(state: LatentState, prediction: Tensor) -> Tensor:
    """Of a model of flow matching, which predicts noise minus image at the time of the next iteration; float32."""
    sigma: float = float(state.timestep) / state.sampler.config.num_train_timesteps
    return state.latents.float() - prediction.float() * sigma


def clean_by_noise(state: LatentState, prediction: Tensor) -> Tensor:
    """Of a model of discrete diffusion; float32. The latents themselves if the sampler has no noise level."""
    sampler, latents = state.sampler, state.latents.float()
    if hasattr(sampler, "precondition_outputs"):  # Samplers of EDM, whose times are no indices.
        clean: Tensor = sampler.precondition_outputs(latents, prediction.float(), sampler.sigmas[state.iteration_index])
        return clean
    if not hasattr(sampler, "alphas_cumprod"):
        return latents
    # Scaled for the model, latents are sqrt(alpha) x image + sqrt(1 - alpha) x noise in all samplers.
    scaled: Tensor = sampler.scale_model_input(latents, state.timestep)
    alpha = _alpha(sampler, float(state.timestep))
    signal, noise = math.sqrt(alpha), math.sqrt(1 - alpha)
    match sampler.config.prediction_type:
        case "sample":
            return prediction.float()
        case "v_prediction":
            return signal * scaled - noise * prediction.float()
        case _:
            return (scaled - noise * prediction.float()) / signal


def _alpha(sampler: Any, timestep: float) -> float:
    """The share of the image at a time, which may lie between two that were trained."""
    index = min(round(timestep), len(sampler.alphas_cumprod) - 1)
    return float(sampler.alphas_cumprod[index])
