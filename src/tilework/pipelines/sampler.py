"""Samplers of diffusers: which ones can be served, in how many steps, and which attributes a state must hold."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tilework.core.model import ModelInfo, StepRange
from tilework.core.wire.spec import Spec
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.serialization import NotSerializable, serialize

_CONFIG = "_internal_dict"
_ALL_TRIED, _MOST_TRIED = 32, 1000  # Numbers of steps.


def check_sampler(pipeline: Any, info: ModelInfo, prepare: Callable[[Spec], object]) -> None:
    """Check the sampler of a pipeline. `prepare` makes one for a request.

    Raises:
        UnsupportedModel: it does not fit the pipeline, or a state cannot hold one of its attributes.
    """
    name = f"scheduler/scheduler_config.json: {type(pipeline.scheduler).__name__}"
    try:
        sampler = prepare(usual(info))
    except (AssertionError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{name} does not fit {type(pipeline).__name__}; choose another sampler or its flow options ({error})"
        ) from error
    try:
        serialize(memory_of(sampler))
    except NotSerializable as error:
        raise UnsupportedModel(
            f"{name} keeps a value that no state can hold; choose another sampler ({error})"
        ) from error


def generator_argument(sampler: Any) -> Mapping[str, Any]:
    """Return the argument of `sampler.step` that takes a generator, still None; empty if there is none."""
    return {"generator": None} if "generator" in inspect.signature(sampler.step).parameters else {}


def memory_of(sampler: Any) -> dict[str, Any]:
    """Return the attributes of a sampler that a request's steps change.

    Functions (SASolver keeps one) and the config are left out: each request has a copy of the model's own sampler.
    DPMSolverSinglestep changes its config in `set_timesteps`, but reads that part nowhere else.
    """
    return {name: value for name, value in vars(sampler).items() if not callable(value) and name != _CONFIG}


def step_ranges(info: ModelInfo, prepare: Callable[[Spec], Any]) -> tuple[StepRange, ...]:
    """Return the numbers of steps that a sampler can run, ascending. `prepare` makes the sampler for a request.

    Each number up to _ALL_TRIED is tried. Of larger ones the largest is found by bisection, up to _MOST_TRIED: samplers
    refuse all numbers above a limit (LCM, its original steps). Above _MOST_TRIED all are accepted if that one is.
    Trying all of them would take minutes with Karras sigmas.
    """

    def accepts(steps: int) -> bool:
        try:
            sampler = prepare(replace(usual(info), steps=steps))
        except Exception:  # Samplers raise any error: ValueError, IndexError, AssertionError.
            return False
        num_iterations = len(sampler.timesteps)
        order = int(sampler.order)
        return num_iterations > (steps - 1) * order

    ranges: list[StepRange] = []
    for steps in filter(accepts, range(1, _ALL_TRIED + 1)):
        if ranges and ranges[-1][1] == steps - 1:
            ranges[-1] = (ranges[-1][0], steps)
        else:
            ranges.append((steps, steps))
    if ranges and ranges[-1][1] == _ALL_TRIED:
        most = (
            None
            if accepts(_MOST_TRIED)
            else bisect_left(range(_MOST_TRIED), True, lo=_ALL_TRIED, key=lambda steps: not accepts(steps + 1))
        )
        ranges[-1] = (ranges[-1][0], most)
    return tuple(ranges)


def usual(info: ModelInfo) -> Spec:
    """Return a request with the defaults of the model."""
    return Spec(
        prompt="",
        height=info.default_height,
        width=info.default_width,
        steps=info.default_steps,
        guidance_scale=info.default_guidance_scale,
        seed=0,
    )
