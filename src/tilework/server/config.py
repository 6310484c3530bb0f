"""Settings of the HTTP server: defaults, then those of a file, then `TILEWORK_*` variables, then overrides."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from math import inf
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

from annotated_types import Ge, Le
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from tilework.control.controller import ControllerConfig
from tilework.core.cache import LEAST_INTERVAL, MAX_INTERVAL, MAX_THRESHOLD, CacheName
from tilework.core.model import MODEL_NAME, is_model_name
from tilework.core.time import s_from_ns
from tilework.server.default_slo import DefaultSlo
from tilework.server.webhooks.notice import secret_bytes

PREFIX = "TILEWORK_"
SECRETS = frozenset({"api_key", "admin_key", "metrics_key", "webhook_secret"})
"""Settings that are not shown."""
RELOADED = SECRETS - {"webhook_secret"} | {"tenants"}
"""Settings that change while the server runs: see `server.reload`."""
OPTION, ENVIRONMENT, FILE, DEFAULT = "option", "environment", "file", "default"
"""Sources of a setting."""
MIN_SECRET_BYTES = 16
_YEAR_S = 366 * 86400.0

Seconds = Annotated[float, Field(ge=0, le=86400.0, allow_inf_nan=False)]
SomeSeconds = Annotated[float, Field(ge=1e-3, le=86400.0, allow_inf_nan=False)]
LongSeconds = Annotated[float, Field(ge=1e-3, le=_YEAR_S, allow_inf_nan=False)]


class ConfigError(ValueError):
    """A setting cannot be used; the message names it, its value and the remedy."""


def _checked_model_name(name: str) -> str:
    if not is_model_name(name):
        raise ValueError(f"give {MODEL_NAME}")
    return name


def _checked_price(value: object) -> float:
    """Read a number, its text, or "greedy": the price at which every promise that can be kept is made."""
    try:
        price = inf if value == "greedy" else float(str(value))
    except ValueError:
        price = -1.0
    if not price >= 0 or isinstance(value, bool) or (price == inf and value not in ("greedy", inf)):
        raise ValueError("give a number from 0 on, or greedy")
    return price


PromisePrice = Annotated[float, BeforeValidator(_checked_price)]
ModelName = Annotated[str, AfterValidator(_checked_model_name)]


class ServerConfig(BaseSettings):
    """Limits and addresses of the HTTP server. Made directly, it reads no environment: see `load_config`.

    `port` 0 takes a free one. On `probe_port` of the loopback, probes and metrics need no key. `public_url` replaces
    scheme and host in the URLs of results, for servers behind a proxy. `allow_origin` are the origins of pages that may
    call the server, by commas, or "*" for all. `frontends` is the number of processes that take HTTP (see
    `server.frontends`); with 0 the controller's own does. `max_connections` are divided among them.

    `api_key` is one key or several, separated by commas; None leaves the server open. With `admin_key`, one or several,
    a client of the default tenant may change what is served; with `metrics_key` it may read metrics and nothing else.
    `tenants` is the path of a TOML file (see `server.tenants`), `models` that of another (see `server.models_file`).
    `served_model_name` are the names of the first model for clients, one or several by commas.

    `default_slo` is the deadline of requests that give none (see `server.default_slo`). `max_jobs` images of all
    tenants may wait or run at a time; when another comes in, the devices may need at most `max_backlog_s` for them (see
    `admission.admission_limits`). `promise_price` is the number of other deadlines that a promise may cost. `max_batch`
    is the most images that share a forward pass. `exact` makes all requests exact (see `core.request.Request`).
    `cache`, and `cache_threshold` or `cache_interval`, are for requests that are not exact and give none (see
    `core.cache`; None: the default of the cache). With `strict` a field that means nothing here is refused, not
    ignored. `encode_cache_bytes` bounds the encoded inputs of earlier requests (see `runtime.encode_cache`).

    `max_input_bytes` bounds a body with pictures, `max_picture_bytes` one file, `max_input_pixels` all pictures of a
    call, and `input_bytes` the memory of all calls' pictures. `video_codec` compresses videos (see
    `core.wire.spec.VideoCodec`). With `metadata` PNG files say how they were drawn, and from what (see
    `calls.provenance`). `safety_filter` names code that looks at prompts and images (see `server.safety_filter`).
    `traces` is the URL of a collector of OpenTelemetry (see `server.traces`).

    `webhook_origins` are those of servers that calls may have told of their end, in notices that are signed with
    `webhook_secret` (see `webhooks.notice`). `set_name` is the name of this server for others, and `registry` the
    address at which it finds them (see `server.sets`). Its node manager moves nodes by windows of `set_window_s`, to
    sets that are busy for more than `set_threshold`.

    `durable` is a directory that keeps accepted calls when the server ends (see `store.durable`), and files of batches,
    of `batch_bytes` in all. Batches that have ended, and files that set no other time, are kept for `batch_ttl_s`. A
    tenant has at most `max_batches`, of which `max_running_batches` make calls at a time, and `max_batch_files` of
    calls (see `batches`). `results` are addresses of Redis servers for images, by commas, or a bucket of S3 (see
    `store.redis_results`, `store.s3_results`); while these take none, `spool_bytes` of them wait on this machine's disk
    (see `store.spooled`). `max_records` and `record_bytes` bound the records of calls that have ended.

    `reconnect_s` is how long a call with an idempotency key goes on after its client has gone. `read_timeout_s` is for
    a whole request head, and for a whole body. After `send_timeout_s` a client that takes too little of an answer is
    cut off (see `http.connections.protocol`). `drain_s` is how long a stop waits for open calls and for answers under
    way.

    Raises:
        ValidationError: a value has the wrong type or is out of its range.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, strict=True, frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    probe_port: int | None = Field(None, ge=0, le=65535)
    api_key: str | None = Field(None, repr=False)
    admin_key: str | None = Field(None, repr=False)
    metrics_key: str | None = Field(None, repr=False)
    tenants: str | None = None
    models: str | None = None
    durable: str | None = None
    results: str | None = None
    public_url: str | None = None
    served_model_name: str | None = None
    allow_origin: str | None = None
    webhook_origins: str | None = None
    webhook_secret: str | None = Field(None, repr=False)
    traces: str | None = None
    set_name: str = Field("default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    registry: str | None = None
    set_window_s: LongSeconds = 300.0
    set_threshold: float = Field(0.85, ge=0.01, le=1, allow_inf_nan=False)
    max_body_bytes: int = Field(1 << 20, ge=1024, le=1 << 30)
    max_prompt_chars: int = Field(4096, ge=1, le=1 << 20)
    max_steps: int = Field(200, ge=1, le=10_000)
    max_images: int = Field(10, ge=1, le=10)
    max_pixels: int = Field(1 << 27, ge=256, le=1 << 40)
    max_input_bytes: int = Field(64 << 20, ge=1024, le=1 << 30)
    max_picture_bytes: int = Field(24 << 20, ge=1024, le=1 << 30)
    max_input_pixels: int = Field(1 << 25, ge=256, le=1 << 30)
    input_bytes: int = Field(1 << 30, ge=1024, le=1 << 50)
    max_previews: int = Field(16, ge=0, le=1000)
    video_codec: Literal["h264", "vp9"] = "h264"
    max_slo_s: LongSeconds = 7 * 86400.0
    default_slo: str | None = None
    max_jobs: int = Field(ControllerConfig().max_jobs, ge=1, le=1 << 20)
    max_backlog_s: LongSeconds = s_from_ns(ControllerConfig().max_backlog_ns)
    promise_price: PromisePrice = ControllerConfig().promise_price
    max_batch: int = Field(ControllerConfig().max_batch, ge=1, le=1024)
    exact: bool = False
    strict: bool = False
    metadata: bool = True
    safety_filter: str | None = None
    cache: CacheName = "off"
    cache_threshold: float | None = Field(None, ge=0, le=MAX_THRESHOLD, allow_inf_nan=False)
    cache_interval: int | None = Field(None, ge=LEAST_INTERVAL, le=MAX_INTERVAL)
    encode_cache_bytes: int = Field(256 << 20, ge=0, le=1 << 50)
    result_ttl_s: LongSeconds = 3600.0
    result_bytes: int = Field(512 << 20, ge=1, le=1 << 50)
    spool_bytes: int = Field(4 << 30, ge=1, le=1 << 50)
    batch_bytes: int = Field(4 << 30, ge=1024, le=1 << 50)
    batch_ttl_s: LongSeconds = 30 * 86400.0
    max_batches: int = Field(1000, ge=1, le=100_000)
    max_running_batches: int = Field(4, ge=1, le=1000)
    max_batch_files: int = Field(1000, ge=1, le=100_000)
    max_records: int = Field(10_000, ge=1, le=1 << 30)
    record_bytes: int = Field(64 << 20, ge=1024, le=1 << 50)
    encode_threads: int = Field(2, ge=1, le=64)
    frontends: int = Field(0, ge=0, le=64)
    max_connections: int = Field(1000, ge=1, le=1 << 20)
    max_head_bytes: int = Field(16 << 10, ge=1024, le=1 << 20)
    read_timeout_s: SomeSeconds = 30.0
    send_timeout_s: SomeSeconds = 30.0
    keep_alive_s: SomeSeconds = 15.0
    reconnect_s: Seconds = 30.0
    drain_s: Seconds = 30.0

    @property
    def api_keys(self) -> tuple[bytes, ...]:
        return _keys(self.api_key)

    @property
    def served_names(self) -> tuple[str, ...]:
        return _listed(self.served_model_name)

    @property
    def origins(self) -> tuple[str, ...]:
        return _listed(self.allow_origin)

    @property
    def webhook_hosts(self) -> tuple[str, ...]:
        return _listed(self.webhook_origins)

    @property
    def usual_slo(self) -> DefaultSlo | None:
        return None if self.default_slo is None else DefaultSlo.parse(self.default_slo)

    @property
    def admin_keys(self) -> tuple[bytes, ...]:
        return _keys(self.admin_key)

    @property
    def metrics_keys(self) -> tuple[bytes, ...]:
        return _keys(self.metrics_key)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @field_validator(
        *("api_key", "admin_key", "metrics_key", "tenants", "models", "durable", "public_url", "default_slo"),
        *("registry", "traces", "safety_filter", "served_model_name"),
        *("allow_origin", "webhook_origins", "webhook_secret"),
        mode="before",
    )
    @classmethod
    def _empty_is_unset(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if not host.strip() or "/" in host:
            raise ValueError("give an address such as 127.0.0.1, or 0.0.0.0 for all")
        return host

    @field_validator("public_url", "traces")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "http://unset")
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise ValueError("give a base URL such as https://images.example.org")
        return url

    @field_validator("served_model_name")
    @classmethod
    def _check_names(cls, text: str | None) -> str | None:
        if text is not None and not all(map(is_model_name, _listed(text) or ("",))):
            raise ValueError(f"give one name or several by commas, each of {MODEL_NAME}")
        return text

    @field_validator("allow_origin")
    @classmethod
    def _check_origins(cls, text: str | None) -> str | None:
        if text not in (None, "*") and not all(map(_is_origin, _listed(text) or ("",))):
            raise ValueError('give origins such as https://example.org, several by commas, or "*" for all')
        return text

    @field_validator("webhook_origins")
    @classmethod
    def _check_webhooks(cls, text: str | None) -> str | None:
        if text is not None and not all(map(_is_origin, _listed(text) or ("",))):
            raise ValueError("give origins such as https://example.org, several by commas")
        return text

    @field_validator("webhook_secret")
    @classmethod
    def _check_secret(cls, secret: str | None) -> str | None:
        if secret is not None and len(secret_bytes(secret)) < MIN_SECRET_BYTES:
            raise ValueError(f'give a text of at least {MIN_SECRET_BYTES} characters, or "whsec_" and base64')
        return secret

    @model_validator(mode="after")
    def _check_both(self) -> ServerConfig:
        if self.webhook_origins is not None and self.webhook_secret is None:
            raise ValueError("webhook_origins is set, and webhook_secret is not: set TILEWORK_WEBHOOK_SECRET as well")
        return self

    @field_validator("default_slo")
    @classmethod
    def _check_default_slo(cls, text: str | None) -> str | None:
        if text is not None:
            DefaultSlo.parse(text)
        return text

    @field_validator("api_key", "admin_key", "metrics_key")
    @classmethod
    def _check_keys(cls, api_key: str | None) -> str | None:
        """Refuse a list without a key: it would open the server to everyone, which cannot be meant."""
        if api_key is not None and not any(key.strip() for key in api_key.split(",")):
            raise ValueError("it holds no key: give keys separated by commas, or unset it")
        return api_key


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(one.strip() for one in (text or "").split(",") if one.strip())


def _keys(text: str | None) -> tuple[bytes, ...]:
    return tuple(key.encode() for key in _listed(text))


def _is_origin(text: str) -> bool:
    """Return whether a text is a scheme and a host, maybe with a port, as a browser sends it."""
    return re.fullmatch(r"https?://[^/?#@\s]+", text) is not None


class _FromEnvironment(ServerConfig):
    """The same settings; those that are not given come from the environment."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings)


def load_config(
    overrides: Mapping[str, object] | None = None,
    *,
    file: Mapping[str, object] | None = None,
    others: Collection[str] = (),
) -> ServerConfig:
    """Resolve the configuration from the environment; an override that is None leaves the setting as it is.

    `file` has the settings of a file; the environment overrides them. `others` names the settings (lower case, without
    prefix) that belong to other components: they are skipped here.

    Raises:
        ConfigError: an unknown `TILEWORK_*` variable or override, or a value that cannot be used.
    """
    given: dict[str, Any] = {name: value for name, value in (overrides or {}).items() if value is not None}
    settings = ServerConfig.model_fields
    for name in given:
        _check_known(name, settings, list(settings))
    variables = [PREFIX + name.upper() for name in (*settings, *others)]
    for variable in (name for name in sorted(os.environ) if name.startswith(PREFIX)):
        _check_known(variable, variables, variables)
    sources = config_sources(given, file or {})
    given |= {name: value for name, value in (file or {}).items() if sources[name] == FILE}
    try:
        return ServerConfig(**dict(_FromEnvironment(**given)))
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            raise ConfigError(f"{first['ctx']['error']}.") from None
        name = str(first["loc"][0])
        shown = {ENVIRONMENT: PREFIX + name.upper(), FILE: f"{name} (in the file of settings)"}
        raise ConfigError(_wrong_value(name, first, shown.get(sources[name], name))) from None


def config_sources(overrides: Mapping[str, object], file: Mapping[str, object]) -> dict[str, str]:
    """Return the source of each setting in `load_config`: OPTION (an override), ENVIRONMENT, FILE or DEFAULT."""
    found = dict.fromkeys(ServerConfig.model_fields, DEFAULT) | dict.fromkeys(file, FILE)
    found |= {name: ENVIRONMENT for name in ServerConfig.model_fields if PREFIX + name.upper() in os.environ}
    return found | {name: OPTION for name, value in overrides.items() if value is not None}


def _check_known(name: str, known: Collection[str], candidates: list[str]) -> None:
    if name not in known:
        nearest = difflib.get_close_matches(name, candidates, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{name} is not a setting of the server; the nearest one is {nearest}. Rename or unset it.")


def _wrong_value(name: str, error: Any, shown: str) -> str:
    """Describe the mistake in a setting; `shown` is its name as it was given."""
    value = "" if name in SECRETS else f" = {error['input']!r}"
    if error["type"] == "string_pattern_mismatch":
        return f"{shown}{value} cannot be used; give up to 64 letters, digits, dots, dashes and underscores."
    if error["type"] == "value_error":
        return f"{shown}{value} cannot be used; {error['ctx']['error']}."
    return f"{shown}{value} cannot be used; give {_wanted(name)}."


def _wanted(name: str) -> str:
    field = ServerConfig.model_fields[name]
    if field.annotation is bool:
        return "true or false"
    if get_origin(field.annotation) is Literal:
        return " or ".join(get_args(field.annotation))
    low = next((one.ge for one in field.metadata if isinstance(one, Ge)), None)
    high = next((one.le for one in field.metadata if isinstance(one, Le)), None)
    if low is None or high is None:
        return "a text, or unset it" if type(None) in get_args(field.annotation) else "a text"
    return f"{'a whole number' if field.annotation is int else 'a number'} from {low:.16g} to {high:.16g}"
