"""What clients may ask of a stock pipeline, read from its call, its components and its configuration."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from diffusers import AutoencoderKL
from diffusers.modular_pipelines import ModularPipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import nn

from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import StageSpec
from tilework.core.model import Argument, ModelInfo, StrengthRule
from tilework.pipelines.arguments import generator_device, offered
from tilework.pipelines.defaults import Defaults, resolve
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.stock.component_calls import denoisers_of
from tilework.pipelines.stock.modular import steps_left, takes_odd_sides
from tilework.pipelines.stock.stock_arguments import GUIDANCE, StockArguments

_SIDE, _STEPS = 1024, 50
STRENGTH = "strength"
_MOST_FRAMES = 4  # Times the default.
_SPATIAL = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_spatial_scale_factor")
_TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")


def describe(
    pipeline: Any,
    arguments: StockArguments,
    name: str,
    overrides: Mapping[str, Any],
    library: str,
    max_degree: int,
    batchable: bool,
) -> ModelInfo:
    """The limits and defaults of a model. `max_degree` is how many devices can share a denoiser's sequence.

    `batchable`: whether requests of one shape can share its passes.

    Raises:
        InvalidDefaults: see `defaults.resolve`.
    """
    multiple = _side_multiple(pipeline)
    defaults = resolve(_defaults(pipeline, arguments, name), overrides, multiple)
    frames = arguments.default("num_frames", 1)
    return ModelInfo(
        name=defaults.name,
        family=type(pipeline).__name__,
        side_multiple=multiple,
        max_side=defaults.max_side,
        default_height=defaults.height,
        default_width=defaults.width,
        default_steps=defaults.steps,
        default_guidance_scale=float(defaults.guidance_scale),
        parameters=_num_parameters(pipeline),
        library=library,
        two_passes="negative_prompt" in arguments and arguments.takes_scale,
        max_degree=max_degree,
        arguments=(
            generator_device(pipeline.device.type),
            *_offered(pipeline, arguments),
        ),
        pictures=arguments.pictures(),
        default_frames=frames,
        max_frames=frames * _MOST_FRAMES if frames > 1 else 1,
        frame_multiple=_first(pipeline, _TEMPORAL, 1) if frames > 1 else 1,
        stages=_stages(pipeline, max_degree, batchable),
    )


def check_pipeline(pipeline: Any, arguments: StockArguments) -> None:
    """Check that a pipeline can be served step by step, as far as its signature and components show.

    Raises:
        UnsupportedModel: it cannot, and why.
    """
    name = type(pipeline).__name__
    if not denoisers_of(pipeline):
        raise UnsupportedModel(f"{name} has no denoiser that is a component, so it cannot be served step by step")
    if not any(isinstance(part, SchedulerMixin) for part in pipeline.components.values()):
        raise UnsupportedModel(f"{name} has no sampler that is a component, so it cannot be served step by step")
    if "generator" not in arguments:
        raise UnsupportedModel(f"{name} takes no generator, so no seed decides its pictures")
    if "num_inference_steps" not in arguments:
        raise UnsupportedModel(f"{name} takes no num_inference_steps")
    if "prompt" not in arguments and "image" not in arguments:
        raise UnsupportedModel(f"{name} takes neither a prompt nor a picture")


def num_heads(denoiser: Any) -> int:
    """The attention heads of a denoiser: a group that shares its sequence has at most as many devices."""
    names = ("num_attention_heads", "n_heads")
    return next((value for name in names if isinstance(value := denoiser.config.get(name), int)), 1)


def _offered(pipeline: Any, arguments: StockArguments) -> Iterator[Argument]:
    """What the call takes of `arguments.ARGUMENTS`; a strength only if it is known how many steps that leaves."""
    for one in offered(pipeline, dict.fromkeys(arguments.names), lambda _name, _values: None):
        if one.name != STRENGTH:
            yield one
        elif (rule := strength_rule(pipeline)) is not None:
            yield replace(one, strength=rule, default=arguments.default(STRENGTH, 1.0))


def strength_rule(pipeline: Any) -> StrengthRule | None:
    """How a pipeline rounds the steps that a strength leaves, found by trying; None if it is neither way."""
    sampler = copy.deepcopy(pipeline.scheduler)
    tried = copy.copy(pipeline)
    vars(tried)["scheduler"] = sampler
    left = steps_left if isinstance(pipeline, ModularPipeline) else _steps_left
    found: list[int] = []
    for steps, strength in (cases := [(steps, strength) for steps in (7, 10) for strength in (0.33, 0.5, 0.77, 1.0)]):
        try:
            sampler.set_timesteps(steps, **{"mu": 1.0} if sampler.config.get("use_dynamic_shifting") else {})
            found.append(left(tried, steps, strength))
        except Exception:  # Pipelines raise what comes.
            return None
    rules = [rule for rule in StrengthRule if found == [rule.steps(*case) for case in cases]]
    return rules[0] if rules else None


def _steps_left(pipeline: Any, steps: int, strength: float) -> int:
    """How many steps a classic pipeline makes of `steps`. It raises what comes."""
    given = {
        "num_inference_steps": steps,
        STRENGTH: strength,
        "device": "cpu",
        "timesteps": pipeline.scheduler.timesteps,
    }
    names = inspect.signature(pipeline.get_timesteps).parameters if hasattr(pipeline, "get_timesteps") else ()
    left, *_ = pipeline.get_timesteps(**{name: given[name] for name in names if name in given})
    return len(left) // int(pipeline.scheduler.order)


def _stages(pipeline: Any, max_degree: int, batchable: bool) -> tuple[StageSpec, ...]:
    encode, loop, decode = latent_diffusion("").specs
    return (
        encode,
        replace(loop, degrees=None if max_degree > 1 else (1,), batchable=batchable, one_shape=batchable, previews=""),
        replace(decode, sliceable=isinstance(getattr(pipeline, "vae", None), AutoencoderKL)),
    )


def _defaults(pipeline: Any, arguments: StockArguments, name: str) -> Defaults:
    height, width = (arguments.default(side) or _side(pipeline) for side in ("height", "width"))
    guider = getattr(pipeline, "guider", None)
    scale = arguments.default(GUIDANCE, getattr(guider, GUIDANCE, 1.0))
    return Defaults(
        name=name,
        steps=arguments.default("num_inference_steps", _STEPS),
        guidance_scale=scale if isinstance(scale, int | float) else 1.0,
        height=height,
        width=width,
        max_side=2 * max(height, width),
        max_sequence_length=0,
    )


def _side(pipeline: Any) -> int:
    """The default side: the pipeline's, in latents, or that of its denoiser's configuration."""
    sizes = [getattr(pipeline, "default_sample_size", None)]
    sizes += [getattr(part.config, "sample_size", None) for part in denoisers_of(pipeline).values()]
    size = next((size for size in sizes if isinstance(size, int) and size > 1), None)
    return _SIDE if size is None else size * _first(pipeline, _SPATIAL, 8)


def _side_multiple(pipeline: Any) -> int:
    """Pixels per token: those of a latent, times the latents that become one token."""
    latent = _first(pipeline, _SPATIAL, 8)
    patches = [_patch(part.config) for part in denoisers_of(pipeline).values()]
    packs = 2 if hasattr(pipeline, "_pack_latents") and latent < 32 else 1
    multiple = latent * max([packs, *patches])
    return multiple if takes_odd_sides(pipeline, multiple) else 2 * multiple


def _patch(config: Any) -> int:
    size = config.get("patch_size", config.get("all_patch_size", 1))
    while isinstance(size, list | tuple):
        size = size[-1]
    return size if isinstance(size, int) else 1


def _first(pipeline: Any, names: tuple[str, ...], otherwise: int) -> int:
    return next((value for name in names if isinstance(value := getattr(pipeline, name, None), int)), otherwise)


def _num_parameters(pipeline: Any) -> int:
    modules = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
