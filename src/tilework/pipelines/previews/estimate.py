"""The clean latents that a model predicts in the middle of denoising.

A prediction answers an input and a time, from which the clean latents follow whatever sampler asked. Rejected:
`pred_original_sample`. Only some samplers return it, and at the second iteration of others it belongs to another input.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def clean(
    sampler: Any, prediction: Tensor, timestep: Any, latents: Tensor, token_times: Tensor | None = None
) -> Tensor:
    """Return the clean latents for a model of flow matching or discrete diffusion, as its sampler says; float32.

    The sampler has not made this step yet. `timestep` is a number, also as a tensor. If tokens have their own times,
    (rows, tokens), these count instead.
    """
    if token_times is not None:  # The model is asked for such steps with the sign turned: see FlowMatchEuler.
        sigmas = token_times.float() / sampler.config.num_train_timesteps
        by_token: Tensor = latents.float() + prediction.float() * sigmas[..., None]
        return by_token
    if sampler.config.get("prediction_type") == "trigflow":
        return _clean_by_angle(prediction, timestep, latents)
    by = clean_by_flow if _is_of_flow(sampler) else clean_by_noise
    return by(sampler, prediction, timestep, latents)


def clean_by_flow(sampler: Any, prediction: Tensor, timestep: Any, latents: Tensor) -> Tensor:
    """Return the clean latents for flow matching, where the model predicts noise minus image at this time; float32.

    With `invert_sigmas` it predicts image minus noise, and time goes the other way.
    """
    sigma: float = float(timestep) / sampler.config.num_train_timesteps
    clean_sigma = 1.0 if sampler.config.get("invert_sigmas") else 0.0
    return latents.float() + prediction.float() * (clean_sigma - sigma)


def clean_by_noise(sampler: Any, prediction: Tensor, timestep: Any, latents: Tensor) -> Tensor:
    """Return the clean latents for discrete diffusion; float32. Without a noise level these are the given latents."""
    unscaled = latents.float()
    if hasattr(sampler, "precondition_outputs"):  # Samplers of EDM, whose times are no indices.
        index = int((sampler.timesteps == timestep).nonzero()[0])
        found: Tensor = sampler.precondition_outputs(unscaled, prediction.float(), sampler.sigmas[index])
        return found
    if not hasattr(sampler, "alphas_cumprod"):
        return unscaled
    # Scaled for the model, latents are sqrt(alpha) x image + sqrt(1 - alpha) x noise in all samplers.
    scaled: Tensor = sampler.scale_model_input(unscaled, timestep)
    alpha = _alpha(sampler, float(timestep))
    signal, noise = math.sqrt(alpha), math.sqrt(1 - alpha)
    match sampler.config.prediction_type:
        case "sample":
            return prediction.float()
        case "v_prediction":
            return signal * scaled - noise * prediction.float()
        case _:
            return (scaled - noise * prediction.float()) / signal


def _clean_by_angle(prediction: Tensor, timestep: Any, latents: Tensor) -> Tensor:
    """Return the clean latents for TrigFlow (SCM, sCM), whose latents are cos(t) x image + sin(t) x noise; float32."""
    angle = float(timestep)
    clean: Tensor = math.cos(angle) * latents.float() - math.sin(angle) * prediction.float()
    return clean


def _is_of_flow(sampler: Any) -> bool:
    config = sampler.config
    return type(sampler).__name__.startswith("FlowMatch") or config.get("prediction_type") == "flow_prediction"


def _alpha(sampler: Any, timestep: float) -> float:
    """Return the share of the image at a time, which may lie between trained ones, or be a logarithm of the noise."""
    if sampler.config.get("timestep_type") == "continuous":
        return 1 / (1 + math.exp(4 * timestep) ** 2)
    index = min(round(timestep), len(sampler.alphas_cumprod) - 1)
    return float(sampler.alphas_cumprod[index])
