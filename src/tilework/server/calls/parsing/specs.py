"""What to draw, picture by picture: sizes, steps, seeds and previews, within the limits of the model and the server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from random import Random

from tilework.core.model import ArgumentValue, ModelInfo, StepRange
from tilework.core.request import Shape
from tilework.core.wire import Spec
from tilework.server.calls.errors import invalid
from tilework.server.calls.parsing.arguments import schedule_of
from tilework.server.config import ServerConfig
from tilework.server.schema.image_request import ImageRequest
from tilework.server.tenants import Tenant, Tenants

RANDOM_SEEDS = 2**32  # Small enough for clients whose numbers are all floats.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a body is checked against; `now` is the server's time of day."""

    info: ModelInfo
    config: ServerConfig
    tenants: Tenants
    tenant: Tenant
    now: datetime


def specs_of(
    ask: ImageRequest, arguments: Mapping[str, ArgumentValue], rules: Rules, rng: Random, *, exact: bool
) -> tuple[Spec, ...]:
    """The specs of a call's pictures, which differ in their seeds.

    Raises:
        InvalidValue: the model or the configuration does not allow the size, the number of steps or the previews.
    """
    info, steps = rules.info, _steps(ask, arguments, rules)
    size = _size(ask, info)
    shape = _shape(size, info)
    _check_pixels(size, shape, rules.config.max_pixels)
    first_seed = rng.randrange(RANDOM_SEEDS) if ask.seed is None else ask.seed
    preview_every = _preview_every(ask, steps, rules.config.max_previews)
    return tuple(
        Spec(
            prompt=ask.prompt,
            negative_prompt=ask.negative_prompt,
            height=shape.height,
            width=shape.width,
            steps=steps,
            guidance_scale=info.default_guidance_scale if ask.guidance_scale is None else ask.guidance_scale,
            seed=first_seed + index,
            preview_every=preview_every,
            exact=exact,
            arguments=arguments,
        )
        for index in range(ask.n)
    )


def _preview_every(ask: ImageRequest, steps: int, max_previews: int) -> int:
    """As asked for, or what a stream shows; never after the last step.

    That is the shortest interval with no more previews than unfinished pictures are wanted, so that none is drawn in
    vain; it spreads them most evenly, too. Where no interval brings the very number (3 in 5 steps), there are fewer.
    """
    if ask.preview_every is None:
        return -(-steps // (ask.partial_images + 1)) if ask.partial_images else 0
    if ask.preview_every and (steps - 1) // ask.preview_every > max_previews:
        least = (steps - 1) // (max_previews + 1) + 1
        remedy = f"There are at most {max_previews} previews: give 0, or at least {least} for {steps} steps."
        raise invalid("preview_every", ask.preview_every, remedy)
    return ask.preview_every


def _check_pixels(size: str | None, shape: Shape, max_pixels: int) -> None:
    if shape.pixels > max_pixels:
        given = str(shape) if size is None else size
        raise invalid("size", given, f"An image has at most {max_pixels} pixels here; this one has {shape.pixels}.")


def _size(ask: ImageRequest, info: ModelInfo) -> str | None:
    """The size as one text; a side that is not given is the model's default."""
    if ask.width is None and ask.height is None:
        return ask.size
    if ask.size is not None:
        raise invalid("size", ask.size, "width or height is given as well: leave one of them out.")
    return f"{ask.width or info.default_width}x{ask.height or info.default_height}"


def _shape(size: str | None, info: ModelInfo) -> Shape:
    if size is None or size == "auto":
        return Shape(info.default_height, info.default_width)
    match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", size)
    if match is None:
        remedy = f'Give "auto", or width and height in pixels as in "{info.default_width}x{info.default_height}".'
        raise invalid("size", size, remedy)
    asked = Shape(width=int(match[1]), height=int(match[2]))
    nearest = Shape(width=_legal_side(asked.width, info), height=_legal_side(asked.height, info))
    if asked != nearest:
        limits = f"Sides are multiples of {info.side_multiple}, at most {info.max_side}"
        raise invalid("size", size, f'{limits}; the nearest size is "{nearest}".')
    return asked


def _legal_side(side: int, info: ModelInfo) -> int:
    """The nearest legal side; the larger one if two are equally near."""
    multiples = (2 * side + info.side_multiple) // (2 * info.side_multiple)
    return info.side_multiple * min(max(multiples, 1), info.max_side // info.side_multiple)


def _steps(ask: ImageRequest, arguments: Mapping[str, ArgumentValue], rules: Rules) -> int:
    """As asked for, those of a schedule, or the model's."""
    info, schedule = rules.info, schedule_of(arguments, rules.info)
    if schedule is not None:
        name, steps = schedule
        if ask.num_inference_steps not in (None, steps):
            remedy = f"{name} has {steps} steps: leave it out."
            raise invalid("num_inference_steps", ask.num_inference_steps, remedy)
        if steps > rules.config.max_steps:
            raise invalid(name, arguments[name], f"Give one of at most {rules.config.max_steps} steps.")
        return steps
    steps = info.default_steps if ask.num_inference_steps is None else ask.num_inference_steps
    if not info.can_run(steps):
        remedy = f"The sampler of {info.name} cannot run it: give an integer {_ranges_text(info.step_ranges)}."
        raise invalid("num_inference_steps", steps, remedy, code="unsupported_value")
    return steps


def _ranges_text(ranges: Sequence[StepRange]) -> str:
    return " or ".join(f"from {first} on" if last is None else f"from {first} to {last}" for first, last in ranges)
