"""Arguments of the stock pipelines' calls that a request may give, by name, with their ranges.

A family lists the arguments of its stock call; `offered` keeps those that affect a model and its sampler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tilework.core.model import Argument, ArgumentKind, ArgumentValue
from tilework.pipelines.defaults import MAX_SEQUENCE_LENGTH

_MOST_PIXELS = 1 << 14
_MOST_GUIDANCE = 30.0
_TRIED = {"sigmas": (0.9, 0.7, 0.5, 0.3, 0.1), "timesteps": (901, 701, 501, 301, 101)}

GENERATOR_DEVICE = "generator_device"
TEXTS = ("prompt_2", "prompt_3", "negative_prompt_2", "negative_prompt_3")
SKIPS = {"skip_layer_guidance_scale": 2.8, "skip_layer_guidance_start": 0.01, "skip_layer_guidance_stop": 0.2}
"""Arguments of Stable Diffusion 3, with the defaults of its stock call."""
SIZES = (
    "original_size",
    "crops_coords_top_left",
    "target_size",
    "negative_original_size",
    "negative_crops_coords_top_left",
    "negative_target_size",
)
ARGUMENTS: Mapping[str, Argument] = {
    one.name: one
    for one in (
        *(Argument(name=name, kind=ArgumentKind.TEXT) for name in TEXTS),
        *(Argument(name=name, kind=ArgumentKind.INTEGERS, high=_MOST_PIXELS, count=2) for name in SIZES),
        Argument(name="clip_skip", kind=ArgumentKind.INTEGER),
        Argument(name="control_guidance_end", kind=ArgumentKind.NUMBER, high=1.0),
        Argument(name="control_guidance_start", kind=ArgumentKind.NUMBER, high=1.0),
        Argument(name="control_mode", kind=ArgumentKind.INTEGER, high=7),
        Argument(name="controlnet_conditioning_scale", kind=ArgumentKind.NUMBER, high=2.0),
        Argument(name="eta", kind=ArgumentKind.NUMBER, high=1.0),
        Argument(name="guidance_rescale", kind=ArgumentKind.NUMBER, high=1.0),
        Argument(name="image_guidance_scale", kind=ArgumentKind.NUMBER, high=_MOST_GUIDANCE),
        Argument(name="max_sequence_length", kind=ArgumentKind.INTEGER, low=1, high=MAX_SEQUENCE_LENGTH),
        Argument(name="mu", kind=ArgumentKind.NUMBER, low=-10.0, high=10.0),
        Argument(name="pag_scale", kind=ArgumentKind.NUMBER, high=_MOST_GUIDANCE),
        Argument(name="sigmas", kind=ArgumentKind.SCHEDULE, high=1000.0),
        Argument(name="skip_guidance_layers", kind=ArgumentKind.INTEGERS),
        Argument(name="skip_layer_guidance_scale", kind=ArgumentKind.NUMBER, high=_MOST_GUIDANCE),
        Argument(name="skip_layer_guidance_start", kind=ArgumentKind.NUMBER, high=1.0),
        Argument(name="skip_layer_guidance_stop", kind=ArgumentKind.NUMBER, high=1.0),
        Argument(name="strength", kind=ArgumentKind.NUMBER, high=1.0),
        Argument(name="timesteps", kind=ArgumentKind.SCHEDULE, high=1000.0),
        Argument(name="true_cfg_scale", kind=ArgumentKind.NUMBER, low=1.0, high=_MOST_GUIDANCE),
    )
}


def generator_device(device: str) -> Argument:
    """Return the argument for the device on which a request's generator draws.

    The default is the CPU, so that a seed gives one image on all devices. Users who pass the stock pipeline a generator
    of their accelerator get the same numbers by naming the accelerator.
    """
    choices = ("cpu",) if device == "cpu" else ("cpu", device)
    return Argument(name=GENERATOR_DEVICE, kind=ArgumentKind.CHOICE, choices=choices)


def offered(
    pipeline: Any, limits: Mapping[str, float | None], schedule: Callable[[str, tuple[float, ...]], int | None]
) -> tuple[Argument, ...]:
    """Return the arguments of a family that change something with a loaded pipeline.

    `limits` has the largest value of each argument of the family's stock call: None for that of ARGUMENTS, below 0 if
    the model has no such thing. `schedule` makes a sampler with a list under a name, and returns its number of steps;
    None if the sampler refuses or ignores the list.
    """
    found: list[Argument] = []
    for name, limit in limits.items():
        one = ARGUMENTS[name] if limit is None else replace(ARGUMENTS[name], high=limit)
        if one.high < 0 or not _has_effect(pipeline, name):
            continue
        if one.kind is ArgumentKind.SCHEDULE:
            num_steps = schedule(name, _TRIED[name])
            if num_steps is None:
                continue
            one = replace(one, more=len(_TRIED[name]) - num_steps)
        found.append(one)
    return tuple(found)


def clip_layers(pipeline: Any) -> int:
    """Return the largest number of CLIP layers that can be skipped; below 0 if the stock call cannot skip any.

    Calls with two encoders take the last layer but one. Calls with one read its `text_model`; in versions of
    transformers without that attribute they fail.
    """
    names = [name for name in ("text_encoder", "text_encoder_2") if name in pipeline.components]
    encoders: list[Any] = [one for name in names if (one := getattr(pipeline, name)) is not None]
    if not encoders or (len(names) == 1 and not hasattr(encoders[0], "text_model")):
        return -1
    return int(min(one.config.num_hidden_layers for one in encoders)) - (len(names) - 1)


def control_modes(pipeline: Any) -> float | None:
    """Return the last mode of a network that takes several kinds of control images; None if its modes have no count."""
    config = getattr(getattr(pipeline, "controlnet", None), "config", {})
    num_modes = config.get("num_control_type") or config.get("num_mode")
    return None if num_modes is None else float(num_modes - 1)


def as_number(value: ArgumentValue) -> float:
    """Return the value of an argument that is a number."""
    assert isinstance(value, int | float)
    return value


def as_tuple(value: ArgumentValue) -> tuple[float, ...]:
    """Return the value of an argument that is a list of numbers."""
    assert isinstance(value, tuple)
    return value


def _has_effect(pipeline: Any, name: str) -> bool:
    match name:
        case "eta":
            return "eta" in inspect.signature(pipeline.scheduler.step).parameters
        case "mu":
            return bool(pipeline.scheduler.config.get("use_dynamic_shifting"))
        case "prompt_2" | "negative_prompt_2":
            return getattr(pipeline, "text_encoder_2", None) is not None
        case "prompt_3" | "negative_prompt_3":
            return getattr(pipeline, "text_encoder_3", None) is not None
        case "max_sequence_length":
            encoders = [getattr(pipeline, f"text_encoder_{index}", None) for index in (2, 3)]
            return any(type(one).__name__.startswith("T5") for one in encoders)
    return True
