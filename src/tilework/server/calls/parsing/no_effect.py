"""Fields of a body that do not change the image: taken with a warning, or refused by a strict server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilework.core.model import TRUE_SCALE, ArgumentValue, ModelInfo
from tilework.server.calls.errors import invalid
from tilework.server.schema.image_request import ImageRequest


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A field with a value that changes nothing, and why. Its warning, which may be kept, does not show the value."""

    field: str
    value: object
    why: str

    @property
    def warning(self) -> str:
        return f"{self.field} has no effect: {self.why}."


def refuse(found: Sequence[NoEffect]) -> None:
    """Raise InvalidValue for the first of them."""
    for one in found:
        remedy = f"It has no effect: {one.why}. Leave it out."
        raise invalid(one.field, one.value, remedy, code="unsupported_value")


def no_effects(ask: ImageRequest, arguments: Mapping[str, ArgumentValue], info: ModelInfo) -> Iterator[NoEffect]:
    """Yield the fields, of those that all models have, that have no effect.

    Raises:
        InvalidValue: a guidance scale or a negative prompt would have an effect, and the model can take none.
    """
    if ask.output_format == "png" and ask.output_compression not in (None, 100):
        why = 'png is lossless; output_format "jpeg" and "webp" have a quality'
        yield NoEffect("output_compression", ask.output_compression, why)
    yield from _guidance(ask, info)
    if ask.negative_prompt is None:
        if (scale := arguments.get(TRUE_SCALE, 1.0)) != 1.0:
            yield NoEffect(TRUE_SCALE, scale, "it needs negative_prompt, which may be empty")
    elif reason := _idle_negative(ask, ask.negative_prompt, arguments, info):
        yield NoEffect("negative_prompt", ask.negative_prompt, reason)


def _guidance(ask: ImageRequest, info: ModelInfo) -> Iterator[NoEffect]:
    """Yield a guidance scale without effect: up to 1 it asks for no guidance, which a model without guidance gives."""
    scale = ask.guidance_scale
    if scale is None or info.takes_guidance or scale == info.default_guidance_scale:
        return
    has_true_scale = info.argument(TRUE_SCALE) is not None
    if scale > 1:
        instead = f"give {TRUE_SCALE} with a negative_prompt" if has_true_scale else "leave it out"
        raise invalid("guidance_scale", scale, f"{info.name} takes none: {instead}.", code="unsupported_value")
    yield NoEffect("guidance_scale", scale, f"{info.name} takes none")


def _idle_negative(
    ask: ImageRequest, negative: str, arguments: Mapping[str, ArgumentValue], info: ModelInfo
) -> str | None:
    """Return why a negative prompt changes nothing; None if it does. Raises InvalidValue."""
    if not info.takes_negative:
        if negative:
            raise invalid(
                "negative_prompt", negative, f"{info.name} takes none: leave it out.", code="unsupported_value"
            )
        return f"{info.name} takes none"
    if info.has_true_guidance(negative, arguments):
        return None
    if not info.two_passes:
        more = f"; give {TRUE_SCALE} above 1 for one" if info.argument(TRUE_SCALE) is not None else ""
        return f"{info.name} has no second pass that it could guide away from{more}"
    guidance = info.default_guidance_scale if ask.guidance_scale is None else ask.guidance_scale
    if guidance > info.guided_above:
        return None
    return f"at guidance_scale {guidance:g} there is no second pass; one above {info.guided_above:g} has it"
