"""Turns a client's JSON into checked specs; every refusal names the field, its value and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from tilework.core.model import ArgumentValue
from tilework.core.request import OnMiss, Terms
from tilework.core.wire.spec import Spec
from tilework.server.calls.errors import InvalidValue, invalid
from tilework.server.calls.parsing.arguments import arguments_of
from tilework.server.calls.parsing.deadlines import Deadline, asked_deadline, usual_deadline
from tilework.server.calls.parsing.no_effect import NoEffect, no_effects, refuse
from tilework.server.calls.parsing.pictures import NO_PICTURES, PictureFile, Pictures, decoded_again
from tilework.server.calls.parsing.prompt_words import prompt_warnings
from tilework.server.calls.parsing.reading import read_fields
from tilework.server.calls.parsing.sizes import size_text
from tilework.server.calls.parsing.specs import Rules, specs_of
from tilework.server.calls.parsing.video_format import AskedVideo, format_of, num_frames_of
from tilework.server.config import ServerConfig
from tilework.server.schema.foreign_fields import GIVES_URLS, OPENAI_SIZES
from tilework.server.schema.image_request import MAX_SEED, FileFormat, ImageRequest
from tilework.server.tenants import Tenant
from tilework.server.text import counted, shown
from tilework.store.given_pictures import GivenPictures

DEFAULT_QUALITY = 90
_MOST_NAMED = 10
Body = TypeVar("Body", bound=BaseModel)
StreamOf = Literal["image_generation", "image_edit"]  # Names of events that OpenAI's clients read.


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCall:
    """One call: its images, all of one model and shape, and how to send them back.

    Image i has the seed of image 0 plus i. A stream shows at most `num_partial` unfinished states of each image, and
    `tilework` events if `has_progress`; its events are named `stream_of`. `files` are those of given pictures, if they
    are kept for a later start. With `vae_tiling` its model decodes in tiles. `warnings` say which fields of its body
    were ignored, and which parts of its prompt the model does not know. A notice of its end is sent to `webhook`. It is
    part of the trace `traceparent`.
    """

    model: str
    specs: tuple[Spec, ...]
    deadline: Deadline | None
    terms: Terms
    as_url: bool
    output_format: FileFormat
    quality: int
    user: str | None
    is_stream: bool = False
    num_partial: int = 0
    has_progress: bool = False
    stream_of: StreamOf = "image_generation"
    files: tuple[PictureFile, ...] = ()
    vae_tiling: bool = False
    warnings: tuple[str, ...] = ()
    webhook: str | None = None
    traceparent: str | None = None

    @property
    def slo_s(self) -> float | None:
        """Seconds from arrival to the deadline, if there is one."""
        return None if self.deadline is None else self.deadline.slo_s

    @property
    def slo_source(self) -> str | None:
        """Source of the deadline, if there is one."""
        return None if self.deadline is None else self.deadline.source

    @property
    def is_promised(self) -> bool:
        """True if it is accepted only with the promise to be done by its deadline."""
        return self.deadline is not None and self.terms.on_miss is OnMiss.REJECT

    @property
    def media_type(self) -> str:
        return f"{'video' if self.is_video else 'image'}/{self.output_format}"

    @property
    def is_video(self) -> bool:
        """True if it is for a video file."""
        return self.specs[0].video is not None

    @property
    def lora_names(self) -> list[str]:
        return [one.name for one in self.specs[0].loras]

    @property
    def num_parts(self) -> int:
        """Number of files of each image: one for each frame of a clip, one for a video."""
        return 1 if self.is_video else self.specs[0].frames

    @property
    def num_files(self) -> int:
        """Number of files of all its images."""
        return len(self.specs) * self.num_parts

    @property
    def num_input_bytes(self) -> int:
        """Memory that given pictures take; the images of the call share them."""
        return sum(len(one.pixels) for each in self.specs[0].pictures.values() for one in each)

    def without_pixels(self) -> ImageCall:
        """Return the call without given pictures, except for the names of their files."""
        return replace(self, specs=tuple(replace(spec, pictures={}) for spec in self.specs))

    def with_pixels(self, kept: GivenPictures) -> ImageCall:
        """Undo `without_pixels`. Raises Undecodable, OSError."""
        pictures = decoded_again(self.files, kept)
        return replace(self, specs=tuple(replace(spec, pictures=pictures) for spec in self.specs))

    def without_texts(self) -> ImageCall:
        """Return what is kept after the call's end, to answer a repeat: nothing that its client wrote or gave."""
        specs = tuple(
            replace(
                spec,
                prompt="",
                negative_prompt=None,
                arguments={name: value for name, value in spec.arguments.items() if not isinstance(value, str)},
                pictures={},
            )
            for spec in self.specs
        )
        return replace(self, specs=specs, user=None, files=(), webhook=None)


def image_call(
    body: Mapping[str, object],
    rules: Rules,
    rng: Random,
    *,
    pictures: Pictures = NO_PICTURES,
    stream_of: StreamOf = "image_generation",
    video: AskedVideo | None = None,
) -> ImageCall:
    """Check a body against the schema, the model, the configuration and what the tenant may ask for.

    `pictures` are those that its client gave; the body has no fields for them any more. With a `video` the call is for
    a video file, and `video` decides its frames.

    Raises:
        InvalidValue: a value is wrong.
    """
    info = rules.info
    config = rules.config
    ask = parsed(ImageRequest, body, "prompt", '"..."', is_strict=config.strict)
    video_format = None if video is None else format_of(video, info, config)
    if video is not None:
        ask = ask.model_copy(update={"num_frames": num_frames_of(video, ask.num_frames, info)})
    given = arguments_of(body, info, is_strict=config.strict)
    arguments = given.values
    _check_texts(ask, arguments, config.max_prompt_chars)
    no_effect = [*no_effects(ask, arguments, info), *given.no_effect]
    _check_limits(ask, config, rules.tenant)
    _check_stream(ask)
    _check_previews(ask, config)
    priority = _priority(ask.priority, rules)
    is_exact = _is_exact(ask, priority, rules)
    specs = specs_of(ask, arguments, pictures.images, rules, rng, exact=is_exact, video=video_format)
    deadline = _deadline(ask, priority, specs, rules)
    if deadline is None and ask.on_miss != "best_effort":
        no_effect.append(NoEffect("on_miss", ask.on_miss, "there is no deadline; give slo_s"))
    if config.strict:
        refuse(no_effect)
    return ImageCall(
        model=info.name,
        specs=specs,
        deadline=deadline,
        terms=rules.tenants.terms(rules.tenant, priority, OnMiss(ask.on_miss)),
        as_url=_as_url(ask),
        output_format=ask.output_format if video is None else "mp4",
        quality=DEFAULT_QUALITY if ask.output_compression is None else ask.output_compression,
        user=ask.user,
        is_stream=bool(ask.stream),
        num_partial=ask.partial_images or 0,
        has_progress=ask.tilework_events,
        stream_of=stream_of,
        vae_tiling=info.vae_tiling,
        warnings=(
            *_stand_ins(ask, rules, specs[0]),
            *pictures.warnings,
            *(one.warning for one in no_effect),
            *_warnings(given.ignored),
            *prompt_warnings(ask.prompt, info),
        ),
        webhook=_webhook(ask.webhook, config),
    )


def parsed(
    model: type[Body], body: Mapping[str, object], required: str, example: str, *, is_strict: bool = False
) -> Body:
    """Parse a body as its model; null means absent, except for the one field that is `required` (`example`: as JSON).

    Unless `is_strict`, values are read as `read_fields` does.

    Raises:
        InvalidValue: a field is wrong; its description, which says what to give, is the remedy.
    """
    if required not in body:
        message = f'{required} is missing. Give it: {{"{required}": {example}}}'
        raise InvalidValue(message, field=required, code="missing_value")
    given = {name: value for name, value in body.items() if value is not None or name == required}
    try:
        return model.model_validate(given if is_strict else read_fields(model, given))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0])
        remedy = f"Give {model.model_fields[name].description}."
        if name not in given:
            raise InvalidValue(f"{name} is missing. {remedy}", field=name, code="missing_value") from None
        raise invalid(name, given[name], remedy) from None


def _deadline(ask: ImageRequest, priority: str, specs: Sequence[Spec], rules: Rules) -> Deadline | None:
    """Return the deadline that is asked for, or else the default of the request's class."""
    most_s = rules.config.max_slo_s
    return asked_deadline(
        slo_s=ask.slo_s, slo_ms=ask.slo_ms, deadline=ask.deadline, now=rules.now, most_s=most_s
    ) or usual_deadline(rules.defaults.of(priority), partial(rules.alone_s, specs), most_s)


def _as_url(ask: ImageRequest) -> bool:
    """Return whether to give URLs: as asked, else as OpenAI does for the model's name. A stream carries its images."""
    if ask.response_format is None:
        return not ask.stream and ask.model is not None and ask.model.startswith(GIVES_URLS)
    return ask.response_format == "url"


def _stand_ins(ask: ImageRequest, rules: Rules, spec: Spec) -> Iterator[str]:
    """Yield warnings of something that is made in place of what was asked for, for clients that have no choice."""
    name = rules.info.name
    if rules.stands_in:
        yield f"model {shown(ask.model)} is not served here: {name} is used instead."
    if ask.size in OPENAI_SIZES and ask.size != (made := size_text(spec.shape)):
        yield f"size {ask.size} is none that {name} draws: this is {made}."


def _warnings(ignored: Sequence[str]) -> tuple[str, ...]:
    """Return warnings about fields that were ignored; of many, the first are named."""
    named = [f"{shown(name)} is no field here, and was ignored." for name in ignored[:_MOST_NAMED]]
    others = len(ignored) - len(named)
    return (*named, f"{counted(others, 'more field')} ignored.") if others else tuple(named)


def _check_texts(ask: ImageRequest, arguments: Mapping[str, ArgumentValue], max_chars: int) -> None:
    given = {"prompt": ask.prompt, "negative_prompt": ask.negative_prompt, **arguments}
    drawn = {name: text for name, text in given.items() if isinstance(text, str)}
    for name, text in drawn.items():
        if len(text) > max_chars:
            raise invalid(name, text, f"Give at most {max_chars} characters; these are {len(text)}.")
    for name, text in {**drawn, "user": ask.user or ""}.items():
        if not _is_unicode(text):
            raise invalid(name, text, "Give valid Unicode: it holds half of a surrogate pair.")


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


def _check_stream(ask: ImageRequest) -> None:
    if ask.stream:
        if ask.response_format == "url":
            remedy = 'A stream carries its images: leave it out, or give "b64_json".'
            raise invalid("response_format", ask.response_format, remedy, code="unsupported_value")
        return
    for name, value in (("partial_images", ask.partial_images), ("tilework_events", ask.tilework_events)):
        if value:
            raise invalid(name, value, "It is for streams: set stream to true as well, or leave it out.")


def _check_previews(ask: ImageRequest, config: ServerConfig) -> None:
    """Refuse previews if there is a safety filter: an image that it has not checked is not shown."""
    for name in ("partial_images", "preview_every", "preview_every_s"):
        if (value := getattr(ask, name)) and config.safety_filter is not None:
            remedy = "This server shows images only once they are done and checked: leave it out."
            raise invalid(name, value, remedy, code="unsupported_value")


def _priority(name: str | None, rules: Rules) -> str:
    allowed = rules.tenants.allowed(rules.tenant)
    if name is None:
        return rules.tenants.default_class(rules.tenant)
    if name not in allowed:
        raise invalid("priority", name, f"Give one of {', '.join(allowed)}, or leave it out.")
    return name


def _is_exact(ask: ImageRequest, priority: str, rules: Rules) -> bool:
    """Return whether the request, its class or the server asks for exactness; none of them can take it back."""
    is_exact = bool(ask.exact) or priority in rules.tenants.exact_classes or rules.config.exact
    if is_exact and rules.info.cell > 1:
        remedy = (
            f"{rules.info.name} is split among {rules.info.cell} devices, which do not round as one device does: leave "
            "it out, and give a priority that does not ask for it."
        )
        raise invalid("exact", True, remedy)
    return is_exact


def _webhook(url: str | None, config: ServerConfig) -> str | None:
    """Check a URL: otherwise clients could have the server call the operator's internal network."""
    if url is None:
        return None
    if not config.webhook_hosts:
        remedy = "This server sends no webhooks: leave it out, or start it with --webhook-origins."
        raise invalid("webhook", url, remedy, code="unsupported_value")
    parts = urlsplit(url) if url.isascii() and url.isprintable() else None
    if parts is None or f"{parts.scheme}://{parts.netloc}" not in config.webhook_hosts:
        raise invalid("webhook", url, f"Give a URL that begins with one of {', '.join(config.webhook_hosts)}.")
    return url
