"""Turns a client's JSON into checked specs; every refusal names the field, its value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from random import Random
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from tilework.core.model import ModelInfo, StepRange
from tilework.core.request import OnMiss, Shape, Terms
from tilework.core.wire import Spec
from tilework.server.calls.deadlines import Deadline, asked_deadline
from tilework.server.calls.errors import InvalidValue, UnknownModel, invalid
from tilework.server.config import ServerConfig
from tilework.server.schema.image_request import MAX_SEED, ImageRequest, OutputFormat
from tilework.server.tenants import Tenant, Tenants
from tilework.server.text import shown

DEFAULT_QUALITY = 90
Body = TypeVar("Body", bound=BaseModel)
RANDOM_SEEDS = 2**32  # Small enough for clients whose numbers are all floats.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a body is checked against; `now` is the server's time of day."""

    info: ModelInfo
    config: ServerConfig
    tenants: Tenants
    tenant: Tenant
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCall:
    """One call: its images, all of one shape, and how to send them back. Image i has the seed of image 0 plus i.

    A stream shows at most `num_partial` unfinished pictures of each image, and `tilework` events if `has_progress`.
    """

    specs: tuple[Spec, ...]
    deadline: Deadline | None
    terms: Terms
    as_url: bool
    output_format: OutputFormat
    quality: int
    user: str | None
    is_stream: bool = False
    num_partial: int = 0
    has_progress: bool = False

    @property
    def slo_s(self) -> float | None:
        """Seconds from arrival to the deadline, if there is one."""
        return None if self.deadline is None else self.deadline.slo_s

    @property
    def media_type(self) -> str:
        return f"image/{self.output_format}"

    def without_texts(self) -> ImageCall:
        """What is remembered after the call's end, to answer a repeat: nothing that its client wrote."""
        specs = tuple(replace(spec, prompt="", negative_prompt="") for spec in self.specs)
        return replace(self, specs=specs, user=None)


def image_call(body: Mapping[str, object], rules: Rules, rng: Random, *, slo_ms: float | None = None) -> ImageCall:
    """Check a body against the schema, the model, the configuration and what the tenant may ask for.

    `slo_ms` is the deadline in a field that only chats have.

    Raises:
        UnknownModel: it names another model.
        InvalidValue: any other value is wrong.
    """
    ask = parsed(ImageRequest, body, "prompt", '"..."')
    info, config = rules.info, rules.config
    check_model(ask.model, info)
    _check_texts(ask, config.max_prompt_chars)
    _check_negative(ask, info)
    _check_limits(ask, config, rules.tenant)
    _check_stream(ask)
    steps = _steps(ask, info)
    priority = _priority(ask.priority, rules)
    return ImageCall(
        specs=_specs(ask, rules, steps, rng, exact=_is_exact(ask, priority, rules)),
        deadline=asked_deadline(
            slo_s=ask.slo_s, slo_ms=slo_ms, deadline=ask.deadline, now=rules.now, most_s=config.max_slo_s
        ),
        terms=rules.tenants.terms(rules.tenant, priority, OnMiss(ask.on_miss)),
        as_url=ask.response_format == "url",
        output_format=ask.output_format,
        quality=_quality(ask),
        user=ask.user,
        is_stream=bool(ask.stream),
        num_partial=ask.partial_images or 0,
        has_progress=ask.tilework_events,
    )


def check_model(name: str | None, info: ModelInfo) -> None:
    """Raises:
    UnknownModel: `name` is another model. Its hub id is accepted, too: SGLang's client sends it.
    """
    if name is not None and name not in (info.name, public_source(info)):
        message = f"The model {shown(name)} does not exist here; use {shown(info.name)}, or leave model out."
        raise UnknownModel(message, field="model")


def public_source(info: ModelInfo) -> str:
    """The hub id of the model, or its name if it came from a directory: no answer names a path of the server."""
    return info.name if info.path.startswith("/") else info.path or info.name


def parsed(model: type[Body], body: Mapping[str, object], required: str, example: str) -> Body:
    """A body as its model; null means absent, except for the one field that is `required` (`example`: as JSON).

    Raises:
        InvalidValue: a field is wrong; its description, which says what to give, is the remedy.
    """
    if required not in body:
        message = f'{required} is missing. Give it: {{"{required}": {example}}}'
        raise InvalidValue(message, field=required, code="missing_value")
    given = {name: value for name, value in body.items() if value is not None or name == required}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0])
        raise invalid(name, given[name], f"Give {model.model_fields[name].description}.") from None


def _check_texts(ask: ImageRequest, max_chars: int) -> None:
    if not ask.prompt.strip():
        raise invalid("prompt", ask.prompt, "Give a text that says what to draw.")
    for name, text in (("prompt", ask.prompt), ("negative_prompt", ask.negative_prompt)):
        if len(text) > max_chars:
            raise invalid(name, text, f"Give at most {max_chars} characters; these are {len(text)}.")
        if not _is_unicode(text):
            raise invalid(name, text, "Give valid Unicode: it holds half of a surrogate pair.")


def _check_negative(ask: ImageRequest, info: ModelInfo) -> None:
    if ask.negative_prompt and not info.two_passes:
        remedy = f"{info.name} has no second pass that it could guide away from: leave it out."
        raise invalid("negative_prompt", ask.negative_prompt, remedy, code="unsupported_value")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_limits(ask: ImageRequest, config: ServerConfig, tenant: Tenant) -> None:
    if ask.n > config.max_images:
        raise invalid("n", ask.n, f"Give an integer from 1 to {config.max_images}.")
    if tenant.max_open is not None and ask.n > tenant.max_open:
        remedy = f"You may have {tenant.max_open} open images at most: give an integer from 1 to {tenant.max_open}."
        raise invalid("n", ask.n, remedy)
    if ask.num_inference_steps is not None and ask.num_inference_steps > config.max_steps:
        raise invalid("num_inference_steps", ask.num_inference_steps, f"Give an integer from 1 to {config.max_steps}.")
    if ask.seed is not None and ask.seed > MAX_SEED - ask.n:
        remedy = f"Give an integer from 0 to {MAX_SEED - ask.n}, so that {ask.n} seeds fit."
        raise invalid("seed", ask.seed, remedy)


def _steps(ask: ImageRequest, info: ModelInfo) -> int:
    steps = info.default_steps if ask.num_inference_steps is None else ask.num_inference_steps
    if not info.can_run(steps):
        remedy = f"The sampler of {info.name} cannot run it: give an integer {_ranges_text(info.step_ranges)}."
        raise invalid("num_inference_steps", steps, remedy, code="unsupported_value")
    return steps


def _ranges_text(ranges: Sequence[StepRange]) -> str:
    return " or ".join(f"from {first} on" if last is None else f"from {first} to {last}" for first, last in ranges)


def _check_stream(ask: ImageRequest) -> None:
    if ask.stream:
        if ask.response_format == "url":
            remedy = 'A stream carries its pictures: leave it out, or give "b64_json".'
            raise invalid("response_format", ask.response_format, remedy, code="unsupported_value")
        return
    for name, value in (("partial_images", ask.partial_images), ("tilework_events", ask.tilework_events)):
        if value:
            raise invalid(name, value, "It is for streams: set stream to true as well, or leave it out.")


def _priority(name: str | None, rules: Rules) -> str:
    allowed = rules.tenants.allowed(rules.tenant)
    if name is None:
        return rules.tenants.default_class(rules.tenant)
    if name not in allowed:
        raise invalid("priority", name, f"Give one of {', '.join(allowed)}, or leave it out.")
    return name


def _is_exact(ask: ImageRequest, priority: str, rules: Rules) -> bool:
    """Whether the request, its class or the server asks for it; none of them can take it back."""
    return bool(ask.exact) or priority in rules.tenants.exact_classes or rules.config.exact


def _specs(ask: ImageRequest, rules: Rules, steps: int, rng: Random, *, exact: bool) -> tuple[Spec, ...]:
    info = rules.info
    shape = _shape(ask.size, info)
    _check_pixels(ask.size, shape, rules.config.max_pixels)
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


def _quality(ask: ImageRequest) -> int:
    given = ask.output_compression
    if ask.output_format == "png" and given not in (None, 100):
        remedy = 'png is lossless: leave it out, or set output_format to "jpeg" or "webp".'
        raise invalid("output_compression", given, remedy)
    return DEFAULT_QUALITY if given is None else given
