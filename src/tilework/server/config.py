"""Settings of the HTTP server: defaults, then those of a file, then `TILEWORK_*` variables, then overrides."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

from annotated_types import Ge, Le
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

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


@dataclass(frozen=True, slots=True)
class Option:
    """Marks a setting that is an option of `tilework serve`, too; its `flag` is by default its name.

    A path in a file of settings begins at the directory of the file.
    """

    metavar: str | None = None
    flag: str | None = None
    is_path: bool = False


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


class ServerConfig(BaseModel):
    """Limits and addresses of the HTTP server. Made directly, it reads no environment: see `load_config`.

    The first paragraph of a field's text is the help of its option. A name says the unit: `_s` is seconds, `_bytes` is
    bytes. An empty text is None where a setting may be None.

    Raises:
        ValidationError: a value has the wrong type or is out of its range.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: Annotated[str, Option()] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of this machine."""
    port: Annotated[int, Option()] = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    probe_port: Annotated[int | None, Option()] = Field(None, ge=0, le=65535)
    """Port of the loopback on which /health, /ready and /metrics need no key; 0 takes a free one."""
    frontends: Annotated[int, Option()] = Field(0, ge=0, le=64)
    """Processes that take HTTP, so that connections cost the controller's process little; 0: that process takes HTTP
    itself (docs/operations.md)."""
    api_key: Annotated[str | None, Option()] = Field(None, repr=False)
    """Keys of clients, by commas; without any the server is open. Better set by the variable, which no list of
    processes shows.

    `/health`, `/ready` and the files of the page need none; `/docs` asks for a key as the password."""
    admin_key: str | None = Field(None, repr=False)
    """Keys by commas, with which a client of the default tenant may also change the models that are served."""
    metrics_key: str | None = Field(None, repr=False)
    """Keys by commas that read `/metrics`, and nothing else."""
    served_model_name: Annotated[str | None, Option("NAME[,NAME]")] = None
    """Names by which clients ask for the first model, instead of its own; as of vLLM."""
    public_url: str | None = None
    """Scheme and host of URLs in answers, behind a proxy; else those of the request."""
    allow_origin: Annotated[str | None, Option("ORIGIN[,ORIGIN]")] = None
    """Origins of pages that may call the server, as https://example.org; "*" for all."""
    webhook_origins: Annotated[str | None, Option("ORIGIN[,ORIGIN]")] = None
    """Origins of servers that are told when calls that name them end; needs TILEWORK_WEBHOOK_SECRET."""
    webhook_secret: str | None = Field(None, repr=False)
    """Secret that signs webhooks: `whsec_` with base64, or 16 characters or more."""
    traces: Annotated[str | None, Option("URL")] = None
    """Collector of OpenTelemetry that gets a trace of each call, such as http://HOST:4318."""
    tenants: Annotated[str | None, Option(is_path=True)] = None
    """TOML file of tenants: their keys, weights and limits (docs/operations.md)."""
    models: str | None = None
    """TOML file of models: their paths, other names, dtypes and usual deadlines (docs/serving.md); instead of MODEL."""
    default_slo: Annotated[str | None, Option()] = None
    """Deadline of requests that give none: 30s, 800ms, or 3x, a multiple of the time that a request takes alone. A
    tenant, class or model may have its own."""
    exact: Annotated[bool, Option()] = False
    """Draw every image alone on one device: it equals the stock pipeline's bit for bit under any load."""
    strict: Annotated[bool, Option()] = False
    """Refuse fields of calls that have no effect; without it, warn of them."""
    metadata: Annotated[bool, Option()] = True
    """Write prompt, seed and settings into PNG files, for other tools and `tilework verify`."""
    safety_filter: Annotated[str | None, Option("MODULE:NAME")] = None
    """Your code that checks each prompt before it is drawn, and each image before it is sent."""
    cache: Annotated[CacheName, Option()] = "off"
    """Skip parts of steps in which little has changed, in requests that are not exact and give no cache. It changes
    images (docs/sharing.md)."""
    cache_threshold: Annotated[float | None, Option()] = Field(None, ge=0, le=MAX_THRESHOLD, allow_inf_nan=False)
    """Change up to which a part is skipped; default 0.003, or 0.05 with fbcache."""
    cache_interval: Annotated[int | None, Option()] = Field(None, ge=LEAST_INTERVAL, le=MAX_INTERVAL)
    """Steps from one computed step to the next, with taylorseer; default 5."""
    max_jobs: int = Field(ControllerConfig().max_jobs, ge=1, le=1 << 20)
    """Images that may wait or run at a time, of all tenants (docs/operations.md)."""
    max_backlog_s: Annotated[LongSeconds, Option(flag="--max-backlog")] = s_from_ns(ControllerConfig().max_backlog_ns)
    """Seconds of all devices that accepted requests may need; further ones are refused meanwhile."""
    promise_price: Annotated[PromisePrice, Option()] = ControllerConfig().promise_price
    """Number of other requests' deadlines that a promise (on_miss: reject) may cost. 0 promises only what harms no
    other; greedy promises all that can be kept (docs/policy.md)."""
    max_batch: Annotated[int, Option()] = Field(ControllerConfig().max_batch, ge=1, le=1024)
    """Most images in one forward pass."""
    durable: Annotated[str | None, Option(is_path=True)] = None
    """Directory that keeps accepted requests, so that the next start finishes open ones; also files of batches."""
    results: Annotated[str | None, Option("URL[,URL]")] = None
    """Store of images and videos outside the server: Redis, redis://HOST:PORT, and its replicas, which are asked, too;
    or a bucket, s3://BUCKET?endpoint=URL."""
    set_name: Annotated[str, Option("NAME", flag="--set")] = Field(
        "default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
    )
    """Name of this server among others."""
    registry: Annotated[str | None, Option("etcd://HOST:PORT[,HOST:PORT]")] = None
    """Etcd of several servers: they send clients where there is room, and nodes move to the busiest server
    (docs/cluster.md)."""
    set_window_s: LongSeconds = 300.0
    """Time over which the busy share of each set is taken."""
    set_threshold: float = Field(0.85, ge=0.01, le=1, allow_inf_nan=False)
    """Busy share above which a set gets nodes of others."""
    max_prompt_chars: int = Field(4096, ge=1, le=1 << 20)
    """Characters of a prompt."""
    max_steps: int = Field(200, ge=1, le=10_000)
    """Steps of a call."""
    max_images: int = Field(10, ge=1, le=10)
    """Images of a call."""
    max_slo_s: LongSeconds = 7 * 86400.0
    """Latest deadline of a call, also of a default one."""
    max_pixels: int = Field(1 << 27, ge=256, le=1 << 40)
    """Pixels of an image, or of all frames of a clip; the model has limits of its own."""
    max_previews: int = Field(16, ge=0, le=1000)
    """Previews of a request; 0: none."""
    max_body_bytes: int = Field(1 << 20, ge=1024, le=1 << 30)
    """Body of a request without images."""
    max_input_bytes: int = Field(64 << 20, ge=1024, le=1 << 30)
    """Body with given images, or of a chat."""
    max_head_bytes: int = Field(16 << 10, ge=1024, le=1 << 20)
    """URL and headers of a request."""
    max_picture_bytes: int = Field(24 << 20, ge=1024, le=1 << 30)
    """File of one given image."""
    max_input_pixels: int = Field(1 << 25, ge=256, le=1 << 30)
    """Pixels of all given images of a call."""
    input_bytes: int = Field(1 << 30, ge=1024, le=1 << 50)
    """Memory of the given images of all open calls (429 `input_full`), and as much for large bodies that are being read
    (503 `too_many_bodies`)."""
    video_codec: Literal["h264", "vp9"] = "h264"
    """Codec of videos."""
    encode_cache_bytes: int = Field(256 << 20, ge=0, le=1 << 50)
    """Shared memory for encoded inputs of earlier requests; 0: none."""
    encode_threads: int = Field(2, ge=1, le=64)
    """Threads that write PNG, JPEG and WebP, and run the safety filter."""
    result_ttl_s: LongSeconds = 3600.0
    """Time for which results are kept."""
    result_bytes: int = Field(512 << 20, ge=1, le=1 << 50)
    """Kept results in memory; in a store outside the server, one file."""
    spool_bytes: int = Field(4 << 30, ge=1, le=1 << 50)
    """Results that wait on this machine's disk while their store is away (docs/operations.md)."""
    batch_bytes: int = Field(4 << 30, ge=1024, le=1 << 50)
    """Files of batches: an upload beyond it is refused, answers are written all the same."""
    batch_ttl_s: LongSeconds = 30 * 86400.0
    """Time for which ended batches are kept, and files that set no other time."""
    max_batches: int = Field(1000, ge=1, le=100_000)
    """Batches of a tenant."""
    max_running_batches: int = Field(4, ge=1, le=1000)
    """Batches of a tenant that make calls at a time."""
    max_batch_files: int = Field(1000, ge=1, le=100_000)
    """Files of batches of a tenant."""
    max_records: int = Field(10_000, ge=1, le=1 << 30)
    """Calls that have ended whose records are kept."""
    record_bytes: int = Field(64 << 20, ge=1024, le=1 << 50)
    """Memory of these records."""
    max_connections: int = Field(1000, ge=1, le=1 << 20)
    """Connections of clients, divided among front ends; fewer if the process may have too few files open
    (docs/security.md)."""
    read_timeout_s: SomeSeconds = 30.0
    """Time for a whole request head, and for a whole body."""
    send_timeout_s: SomeSeconds = 30.0
    """Time after which a client that takes too little of an answer is cut off."""
    keep_alive_s: SomeSeconds = 15.0
    """Time between comments in a stream."""
    reconnect_s: Seconds = 30.0
    """Time for which a call with an idempotency key goes on without its client."""
    drain_s: Seconds = 30.0
    """Time that a stop waits for open calls, and for answers under way (docs/operations.md)."""

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

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        return None if value == "" and _may_be_unset(cls.model_fields[info.field_name]) else value

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
    values = {name: value for name, value in (file or {}).items() if sources[name] == FILE} | given
    for name in (name for name, source in sources.items() if source == ENVIRONMENT):
        values[name] = _meant(name, os.environ[PREFIX + name.upper()])
    try:
        return ServerConfig.model_validate(values)
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


def _meant(name: str, text: str) -> object:
    """Return the value that the text of a variable means; the text where it means none, which is refused as such."""
    kind: Any = ServerConfig.model_fields[name].annotation
    try:
        return TypeAdapter[object](kind).validate_strings(text)
    except ValidationError:
        return text


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


def _may_be_unset(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def _wanted(name: str) -> str:
    field = ServerConfig.model_fields[name]
    if field.annotation is bool:
        return "true or false"
    if get_origin(field.annotation) is Literal:
        return " or ".join(get_args(field.annotation))
    if (bounds := bounds_of(field)) is None:
        return "a text, or unset it" if _may_be_unset(field) else "a text"
    return f"{'a whole number' if field.annotation is int else 'a number'} from {bounds[0]:.16g} to {bounds[1]:.16g}"


def bounds_of(field: FieldInfo) -> tuple[float, float] | None:
    """Return the least and the largest value of a setting; None if it is no number with bounds."""
    low: Any = next((one.ge for one in field.metadata if isinstance(one, Ge)), None)
    high: Any = next((one.le for one in field.metadata if isinstance(one, Le)), None)
    return None if low is None or high is None else (low, high)
