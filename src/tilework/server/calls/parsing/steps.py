"""The number of steps of a call's images, and how many of them are made if a given picture is the beginning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilework.core.model import Argument, ArgumentValue, ModelInfo, StepRange, StrengthRule
from tilework.server.calls.errors import invalid
from tilework.server.calls.parsing.arguments import schedule_of
from tilework.server.schema.image_request import ImageRequest


@dataclass(frozen=True, slots=True)
class StepCount:
    """The number of steps: `made` of `whole`, which is None without a strength: then all are made."""

    made: int
    whole: int | None = None


def steps_of(
    ask: ImageRequest, arguments: Mapping[str, ArgumentValue], info: ModelInfo, max_steps: int, *, has_picture: bool
) -> StepCount:
    """Return the steps of each image of a call.

    Raises:
        InvalidValue: the model or the configuration does not allow the number, or the strength leaves none.
    """
    whole = _whole_steps(ask, arguments, info, max_steps)
    one = next((each for each in info.arguments if each.strength is not None), None)
    if one is None:
        return StepCount(whole)
    if not has_picture:
        if one.name in arguments:
            remedy = "It is the share of an input image that is drawn anew: give image as well, or leave it out."
            raise invalid(one.name, arguments[one.name], remedy)
        return StepCount(whole)
    return StepCount(_made(one, arguments, whole), whole)


def _made(one: Argument, arguments: Mapping[str, ArgumentValue], whole: int) -> int:
    strength = arguments.get(one.name, one.default)
    rule = one.strength
    assert rule is not None
    assert isinstance(strength, int | float)
    made = rule.steps(whole, strength)
    if made < 1:
        least = "above 0" if rule is StrengthRule.UP else f"of at least {math.ceil(10_000 / whole) / 10_000:g}"
        remedy = f"It leaves none of {whole} steps: give a number {least} and at most {one.high:g}, or more steps."
        raise invalid(one.name, strength, remedy)
    return made


def _whole_steps(ask: ImageRequest, arguments: Mapping[str, ArgumentValue], info: ModelInfo, max_steps: int) -> int:
    """Return the steps that are asked for, those of a schedule, or the model's."""
    schedule = schedule_of(arguments, info)
    if schedule is not None:
        name, steps = schedule
        if ask.num_inference_steps not in (None, steps):
            remedy = f"{name} has {steps} steps: leave it out."
            raise invalid("num_inference_steps", ask.num_inference_steps, remedy)
        if steps > max_steps:
            raise invalid(name, arguments[name], f"Give one of at most {max_steps} steps.")
        return steps
    steps = info.default_steps if ask.num_inference_steps is None else ask.num_inference_steps
    if not info.can_run(steps):
        remedy = f"The sampler of {info.name} cannot run it: give an integer {_ranges_text(info.step_ranges)}."
        raise invalid("num_inference_steps", steps, remedy, code="unsupported_value")
    return steps


def _ranges_text(ranges: Sequence[StepRange]) -> str:
    return " or ".join(f"from {first} on" if last is None else f"from {first} to {last}" for first, last in ranges)
