"""Turns a client's JSON into checked specs; every refusal names the field, its value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from pydantic import ValidationError

from tilework.core.request import OnMiss, Shape
from tilework.core.wire import ModelInfo, Spec
from tilework.server.config import ServerConfig
from tilework.server.errors import ApiError, invalid, shown
from tilework.server.schemas import MAX_SEED, ImageRequest, OutputFormat

DEFAULT_QUALITY = 90
RANDOM_SEEDS = 2**32  # Small enough for clients whose numbers are all floats.


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCall:
    """One call: its images, all of one shape, and how to send them back. Image i has the seed of image 0 plus i."""

    specs: tuple[Spec, ...]
    slo_s: float | None
    on_miss: OnMiss
    as_url: bool
    output_format: OutputFormat
    quality: int
    user: str | None


def image_call(body: Mapping[str, object], info: ModelInfo, config: ServerConfig, rng: Random) -> ImageCall:
    """Check a body against the schema, the model and the configuration.

    Raises:
        ApiError: 404 if it names another model, 400 for any other wrong value.
    """
    ask = _parsed(body)
    check_model(ask.model, info)
    _check_texts(ask, config.max_prompt_chars)
    _check_negative(ask, info)
    _check_limits(ask, config)
    return ImageCall(
        specs=_specs(ask, info, rng),
        slo_s=ask.slo_s,
        on_miss=OnMiss(ask.on_miss),
        as_url=ask.response_format == "url",
        output_format=ask.output_format,
        quality=_quality(ask),
        user=ask.user,
    )


def check_model(name: str | None, info: ModelInfo) -> None:
    if name is not None and name != info.name:
        message = f"The model {shown(name)} does not exist here; use {shown(info.name)}, or leave model out."
        raise ApiError(404, message, param="model", code="model_not_found")


def _parsed(body: Mapping[str, object]) -> ImageRequest:
    if "prompt" not in body:
        raise ApiError(400, 'prompt is missing. Give it: {"prompt": "..."}', param="prompt", code="missing_value")
    given = {name: value for name, value in body.items() if value is not None or name == "prompt"}
    try:
        return ImageRequest.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0])
        raise invalid(name, given[name], f"Give {ImageRequest.model_fields[name].description}.") from None


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


def _check_limits(ask: ImageRequest, config: ServerConfig) -> None:
    if ask.stream:
        raise invalid("stream", ask.stream, "Streaming is not supported yet; leave it out.", code="unsupported_value")
    if ask.n > config.max_images:
        raise invalid("n", ask.n, f"Give an integer from 1 to {config.max_images}.")
    if ask.num_inference_steps is not None and ask.num_inference_steps > config.max_steps:
        raise invalid("num_inference_steps", ask.num_inference_steps, f"Give an integer from 1 to {config.max_steps}.")
    if ask.slo_s is not None and ask.slo_s > config.max_slo_s:
        remedy = f"Give at most {config.max_slo_s:g} seconds, or leave it out for no deadline."
        raise invalid("slo_s", ask.slo_s, remedy)
    if ask.seed is not None and ask.seed > MAX_SEED - ask.n:
        remedy = f"Give an integer from 0 to {MAX_SEED - ask.n}, so that {ask.n} seeds fit."
        raise invalid("seed", ask.seed, remedy)


def _specs(ask: ImageRequest, info: ModelInfo, rng: Random) -> tuple[Spec, ...]:
    shape = _shape(ask.size, info)
    first_seed = rng.randrange(RANDOM_SEEDS) if ask.seed is None else ask.seed
    steps, scale = ask.num_inference_steps, ask.guidance_scale
    return tuple(
        Spec(
            prompt=ask.prompt,
            negative_prompt=ask.negative_prompt,
            height=shape.height,
            width=shape.width,
            steps=info.default_steps if steps is None else steps,
            guidance_scale=info.default_guidance_scale if scale is None else scale,
            seed=first_seed + index,
        )
        for index in range(ask.n)
    )


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
