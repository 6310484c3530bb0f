"""Description of what clients may ask of a stock pipeline, read from its call, components and configuration."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from diffusers import AutoencoderKL, DiffusionPipeline
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.modular_pipelines import ModularPipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import nn

from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import StageSpec
from tilework.core.model import TRUE_SCALE, Argument, ModelInfo, StrengthRule
from tilework.pipelines.arguments import clip_layers, control_modes, generator_device, offered
from tilework.pipelines.components import ComponentGroups, decodes_in_tiles, denoisers_of, shares_decode
from tilework.pipelines.defaults import Defaults, resolve
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.stock.component_calls import config_of
from tilework.pipelines.stock.frame_rates import frame_rate
from tilework.pipelines.stock.glance import can_glance
from tilework.pipelines.stock.limits import Limits
from tilework.pipelines.stock.modular import steps_left
from tilework.pipelines.stock.shared_calls import can_share_decoder
from tilework.pipelines.stock.sound import sound_rate
from tilework.pipelines.stock.stock_arguments import GUIDANCE, StockArguments
from tilework.pipelines.video.export import EXPORT, EXPORT_WITH_SOUND, SOUND

_STEPS = 50
STRENGTH = "strength"
_ABOVE_ALL = 100.0  # A guidance scale.
_AT_THE_SIZE_OF_THE_PICTURE = ("ZImageImg2ImgPipeline", "ZImageInpaintPipeline")  # They fail at other sizes.


def describe(
    pipeline: Any,
    arguments: StockArguments,
    name: str,
    overrides: Mapping[str, Any],
    library: str,
    max_degree: int,
    batchable: bool,
) -> ModelInfo:
    """Return the limits and defaults of a model, whose components are watched (`component_calls`).

    `max_degree` is the number of devices that can share a denoiser's sequence. `batchable` is True if requests of one
    shape can share its passes.

    Raises:
        InvalidDefaults: see `defaults.resolve`.
        UnsupportedModel: see `limits.Limits`.
    """
    limits = Limits(pipeline, arguments)
    defaults = resolve(
        _defaults(pipeline, arguments, name, limits), overrides, limits.side_multiple, limits.frame_multiple
    )
    takes_guidance = arguments.takes_scale or (arguments.is_modular and _guider(pipeline) is not None)
    return ModelInfo(
        name=defaults.name,
        family=type(pipeline).__name__,
        side_multiple=limits.side_multiple,
        max_side=defaults.max_side,
        default_height=defaults.height,
        default_width=defaults.width,
        default_steps=defaults.steps,
        default_guidance_scale=float(defaults.guidance_scale),
        parameters=_num_parameters(pipeline),
        library=library,
        two_passes=_has_second_pass(pipeline, arguments, _ABOVE_ALL),
        guided_above=0.0 if _has_second_pass(pipeline, arguments, 0.5) else 1.0,
        takes_guidance=takes_guidance,
        takes_negative="negative_prompt" in arguments,
        takes_size="height" in arguments and type(pipeline).__name__ not in _AT_THE_SIZE_OF_THE_PICTURE,
        max_degree=max_degree,
        step_ranges=limits.step_ranges(),
        arguments=(
            generator_device(pipeline.device.type),
            *_offered(pipeline, arguments, limits.needed),
        ),
        pictures=limits.pictures(),
        default_frames=defaults.num_frames,
        max_frames=defaults.max_frames,
        frame_multiple=limits.frame_multiple,
        frames_of=limits.frames_of,
        default_fps=frame_rate(pipeline, arguments) if limits.frames > 1 else 0.0,
        stages=(
            *_stages(pipeline, max_degree, batchable, limits, defaults.previews),
            *_export(pipeline, limits),
        ),
        words=defaults.words,
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
    if any(isinstance(part, DiffusionPipeline) for part in vars(pipeline).values()):
        raise UnsupportedModel(f"{name} runs several pipelines, one after the other; serve the last of them")
    if "generator" not in arguments:
        raise UnsupportedModel(f"{name} takes no generator, so no seed decides its images")
    if "num_inference_steps" not in arguments:
        raise UnsupportedModel(f"{name} takes no num_inference_steps")
    if "prompt" not in arguments and "image" not in arguments:
        raise UnsupportedModel(f"{name} takes neither a prompt nor an image")


def num_heads(denoiser: Any) -> int:
    """Return the attention heads of a denoiser: a group that shares its sequence has at most as many devices."""
    names = ("num_attention_heads", "n_heads")
    return next((value for name in names if isinstance(value := config_of(denoiser).get(name), int)), 1)


def _offered(pipeline: Any, arguments: StockArguments, needed: Collection[str]) -> Iterator[Argument]:
    """Yield those of `arguments.ARGUMENTS` that the call takes; a strength only if its number of steps is known."""
    own = {"clip_skip": clip_layers, "control_mode": control_modes}
    limits = {name: own[name](pipeline) if name in own else None for name in arguments.names}
    for one in offered(pipeline, limits, lambda _name, _values: None):
        if one.name == TRUE_SCALE:
            yield replace(one, default=arguments.default(TRUE_SCALE))
        elif one.name != STRENGTH:
            yield replace(one, required=one.name in needed)
        elif (rule := strength_rule(pipeline)) is not None:
            yield replace(one, strength=rule, default=arguments.default(STRENGTH, 1.0))


def strength_rule(pipeline: Any) -> StrengthRule | None:
    """Return how a pipeline rounds the steps that a strength leaves, found by trying; None if no rule fits."""
    sampler = copy.deepcopy(pipeline.scheduler)
    tried = copy.copy(pipeline)
    vars(tried)["scheduler"] = sampler
    left = steps_left if isinstance(pipeline, ModularPipeline) else _steps_left
    found: list[int] = []
    for steps, strength in (cases := [(steps, strength) for steps in (7, 10) for strength in (0.33, 0.5, 0.77, 1.0)]):
        try:
            sampler.set_timesteps(steps, **_schedule_options(sampler))
            found.append(left(tried, steps, strength))
        except Exception:  # Pipelines may raise any error.
            return None
    rules = [rule for rule in StrengthRule if found == [rule.steps(*case) for case in cases]]
    return rules[0] if rules else None


def _steps_left(pipeline: Any, steps: int, strength: float) -> int:
    """Return how many steps a classic pipeline makes of `steps`. May raise any error."""
    given = {
        "num_inference_steps": steps,
        STRENGTH: strength,
        "device": "cpu",
        "timesteps": pipeline.scheduler.timesteps,
    }
    names = inspect.signature(pipeline.get_timesteps).parameters if hasattr(pipeline, "get_timesteps") else ()
    left, *counted = pipeline.get_timesteps(**{name: given[name] for name in names if name in given})
    # Some samplers have timesteps that are no steps.
    return int(counted[0]) if counted else len(left) // int(pipeline.scheduler.order)


def _schedule_options(sampler: Any) -> dict[str, float | None]:
    """Return what `set_timesteps` needs to make any number of steps."""
    options: dict[str, float | None] = {"mu": 1.0} if sampler.config.get("use_dynamic_shifting") else {}
    between = "intermediate_timesteps"  # Of SCM, whose default is for two steps.
    return options | ({between: None} if between in inspect.signature(sampler.set_timesteps).parameters else {})


def _stages(pipeline: Any, max_degree: int, batchable: bool, limits: Limits, previews: bool) -> tuple[StageSpec, ...]:
    encode, loop, decode = latent_diffusion("").specs
    called = ComponentGroups.of(pipeline, takes_pictures=bool(limits.pictures()))
    draws = previews and can_glance(pipeline)
    stages = (
        replace(encode, components=called.before),
        replace(
            loop,
            components=(*called.within, *called.after) if draws else called.within,
            degrees=None if max_degree > 1 else (1,),
            previews=loop.previews if draws else "",
        ),
        replace(
            decode,
            components=called.after,
            outputs=(*decode.outputs, SOUND) if sound_rate(pipeline) else decode.outputs,
            degrees=None if max_degree > 1 and shares_decode(pipeline) else (1,),
            sliceable=isinstance(getattr(pipeline, "vae", None), AutoencoderKL) and not decodes_in_tiles(pipeline),
        ),
    )
    shared = (False, batchable, batchable and can_share_decoder(pipeline))
    return tuple(
        replace(one, batchable=is_shared, one_shape=is_shared) for one, is_shared in zip(stages, shared, strict=True)
    )


def _export(pipeline: Any, limits: Limits) -> tuple[StageSpec, ...]:
    if limits.frames == 1:
        return ()
    return (EXPORT_WITH_SOUND if sound_rate(pipeline) else EXPORT,)


def _defaults(pipeline: Any, arguments: StockArguments, name: str, limits: Limits) -> Defaults:
    scale = arguments.default(GUIDANCE, getattr(_guider(pipeline), GUIDANCE, 1.0))
    return Defaults(
        name=name,
        steps=arguments.default("num_inference_steps", _STEPS),
        guidance_scale=scale if isinstance(scale, int | float) else 1.0,
        height=limits.height,
        width=limits.width,
        max_side=limits.max_side,
        max_sequence_length=0,
        num_frames=limits.frames,
        max_frames=limits.max_frames,
    )


def _guider(pipeline: Any) -> Any:
    return getattr(pipeline, "guider", None)


def _has_second_pass(pipeline: Any, arguments: StockArguments, scale: float) -> bool:
    """Return whether a guidance scale adds a pass, for the negative prompt or an empty one, as the pipeline says."""
    if TRUE_SCALE in arguments:
        return False
    if isinstance(guider := _guider(pipeline), BaseGuidance):
        return bool(guider._enabled) and scale > 1
    if not arguments.takes_scale:
        return False
    tried = copy.copy(pipeline)
    # Pipelines for clips with sound have two scales.
    vars(tried).update(_guidance_scale=scale, _audio_guidance_scale=scale, _image_guidance_scale=scale)
    try:
        return bool(tried.do_classifier_free_guidance)
    except Exception:  # There is no such property, or it reads what a call sets.
        return scale > 1 and "negative_prompt" in arguments


def _num_parameters(pipeline: Any) -> int:
    modules = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
