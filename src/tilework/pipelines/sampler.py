"""Samplers of diffusers: which ones can be served, and which of their attributes a state must hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tilework.core.model import ModelInfo
from tilework.core.wire import Spec
from tilework.pipelines.errors import UnsupportedModel

# These draw from a Brownian tree (of the package torchsde), which takes no generator and cannot be moved.
_BROWNIAN = ("CosineDPMSolverMultistepScheduler", "DPMSolverSDEScheduler")


def check_sampler(pipeline: Any, info: ModelInfo, prepare: Callable[[Spec], object]) -> None:
    """Check the sampler of a pipeline. `prepare` makes one for a request.

    Raises:
        UnsupportedModel: it draws noise that no seed decides, or does not fit the pipeline.
    """
    name = f"scheduler/scheduler_config.json: {type(pipeline.scheduler).__name__}"
    if type(pipeline.scheduler).__name__ in _BROWNIAN:
        raise UnsupportedModel(f"{name} draws noise that no seed decides; choose another sampler")
    spec = Spec(
        prompt="",
        negative_prompt="",
        height=info.default_height,
        width=info.default_width,
        steps=info.default_steps,
        guidance_scale=info.default_guidance_scale,
        seed=0,
    )
    try:
        prepare(spec)
    except (AssertionError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{name} does not fit {type(pipeline).__name__}; choose another sampler or its flow options ({error})"
        ) from error


def generator_argument(sampler: Any) -> Mapping[str, Any]:
    """The argument of `sampler.step` that takes a generator, still None; empty if there is none."""
    return {"generator": None} if "generator" in inspect.signature(sampler.step).parameters else {}


def memory_of(sampler: Any) -> dict[str, Any]:
    """The attributes of a sampler without functions: SASolver keeps one, which cannot be pickled."""
    return {name: value for name, value in vars(sampler).items() if not callable(value)}
