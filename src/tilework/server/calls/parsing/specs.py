"""The specs of a call, image by image: sizes, steps, seeds and previews, within the limits of model and server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from random import Random
from typing import Any

from tilework.core.cache import IF_LATE, CacheChoice, CacheKind, CacheName
from tilework.core.lora import UsedLora
from tilework.core.model import ArgumentValue, ModelInfo
from tilework.core.wire.spec import Image, Spec, VideoFormat
from tilework.server.calls.errors import invalid
from tilework.server.calls.parsing.pictures import main_picture
from tilework.server.calls.parsing.preview_interval import AloneSeconds, preview_interval
from tilework.server.calls.parsing.sizes import shape_of
from tilework.server.calls.parsing.steps import steps_of
from tilework.server.config import ServerConfig
from tilework.server.default_slo import DefaultSlos
from tilework.server.schema.image_request import ImageRequest
from tilework.server.tenants import Tenant, Tenants
from tilework.server.text import shown

_MOST_NAMED = 10
RANDOM_SEEDS = 2**32  # Small enough for clients whose numbers are all floats.


def _unknown(_: Sequence[Spec]) -> float | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules that a body is checked against; `now` is the server's time of day.

    A body without a deadline gets that of `defaults`. `alone_s` returns how long requests take alone, if that is known.
    The model `stands_in` for one that the body names, which is not served here.
    """

    info: ModelInfo
    defaults: DefaultSlos = field(default_factory=DefaultSlos)
    alone_s: AloneSeconds = _unknown
    config: ServerConfig
    tenants: Tenants
    tenant: Tenant
    now: datetime
    stands_in: bool = False


def specs_of(
    ask: ImageRequest,
    arguments: Mapping[str, ArgumentValue],
    pictures: Mapping[str, tuple[Image, ...]],
    rules: Rules,
    rng: Random,
    *,
    exact: bool,
    video: VideoFormat | None = None,
) -> tuple[Spec, ...]:
    """Return the specs of a call's images, which differ in their seeds.

    Raises:
        InvalidValue: the model or the configuration does not allow the size, the number of steps, the previews or the
            LoRAs.
    """
    info = rules.info
    config = rules.config
    loras = _loras(ask, info)
    steps = steps_of(ask, arguments, info, config.max_steps, has_picture=bool(pictures))
    main = main_picture(info)
    given = pictures.get(main.name) if main is not None else None
    clip = pictures.get(info.frames_of)
    shape = shape_of(ask, info, config, given[0] if given else None, None if clip is None else len(clip))
    first = Spec(
        prompt=ask.prompt,
        negative_prompt=ask.negative_prompt,
        height=shape.height,
        width=shape.width,
        frames=shape.frames,
        steps=steps.made,
        whole_steps=steps.whole,
        guidance_scale=info.default_guidance_scale if ask.guidance_scale is None else ask.guidance_scale,
        seed=rng.randrange(RANDOM_SEEDS) if ask.seed is None else ask.seed,
        exact=exact,
        arguments=arguments,
        pictures=pictures,
        video=video,
        loras=loras,
        **_cache(ask, rules, exact=exact),
    )
    every = preview_interval(ask, first, info, rules.alone_s, config.max_previews)
    return tuple(replace(first, seed=first.seed + index, preview_every=every) for index in range(ask.n))


def _cache(ask: ImageRequest, rules: Rules, *, exact: bool) -> dict[str, Any]:
    """Return the fields of a spec for the cache that is asked for, or else the server's, if the model supports it."""
    info = rules.info
    config = rules.config
    name = ask.cache
    if name is not None and name != "off":
        if exact:
            raise invalid("cache", name, "An image with a cache is not exact: leave one of them out.")
        if _kind(name) not in info.caches:
            others = f"give {' or '.join(map(shown, info.caches))}, or " if info.caches else ""
            remedy = f"{info.name} cannot do that: {others}leave it out."
            raise invalid("cache", name, remedy, code="unsupported_value")
    elif name is None and not exact and config.cache != "off" and _kind(config.cache) in info.caches:
        name = config.cache
    kind = None if name is None or name == "off" else _kind(name)
    value = _cache_setting(ask, rules.config, kind)
    return {} if kind is None else {"spare_cache" if name == IF_LATE else "cache": CacheChoice(kind, value)}


def _cache_setting(ask: ImageRequest, config: ServerConfig, kind: CacheKind | None) -> float:
    """Return the number of a kind of cache: the request's, or the server's if its cache has that, or the default."""
    given = {"threshold": ask.cache_threshold, "interval": ask.cache_interval}
    for name, value in given.items():
        if value is not None and kind is None:
            raise invalid(f"cache_{name}", value, "It has no effect without a cache: give cache, too.")
        if value is not None and kind is not None and name != kind.setting.name:
            raise invalid(f"cache_{name}", value, f"{kind.value} has none: give cache_{kind.setting.name}, or neither.")
    if kind is None:
        return 0.0
    servers = {"threshold": config.cache_threshold, "interval": config.cache_interval}
    asked, own = given[kind.setting.name], servers[kind.setting.name]
    is_alike = config.cache == "off" or _kind(config.cache).setting is kind.setting
    return float(next(value for value in (asked, own if is_alike else None, kind.setting.default) if value is not None))


def _kind(name: CacheName) -> CacheKind:
    return CacheKind.PATCH if name == IF_LATE else CacheKind(name)


def _loras(ask: ImageRequest, info: ModelInfo) -> tuple[UsedLora, ...]:
    """Return the LoRAs that a request uses, in its order."""
    given = [one.model_dump() for one in ask.lora or ()]
    names = [one.name for one in ask.lora or ()]
    for name in names:
        if name not in info.loras:
            remedy = f"give some of {_named(info.loras)}" if info.loras else "leave it out"
            raise invalid("lora", given, f"{info.name} has no LoRA {shown(name)}: {remedy}.", code="unknown_lora")
        if names.count(name) > 1:
            raise invalid("lora", given, f"{shown(name)} is given twice: give it once.")
    return tuple(one.used() for one in ask.lora or ())


def _named(loras: Sequence[str]) -> str:
    """Name LoRAs; of many, the first."""
    others = len(loras) - _MOST_NAMED
    first = ", ".join(map(shown, loras[:_MOST_NAMED]))
    return f"{first}, and {others} more (GET /v1/models has all)" if others > 0 else first
