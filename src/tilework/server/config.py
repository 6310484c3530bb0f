"""Settings of the HTTP server: defaults, then `TILEWORK_*` environment variables, then overrides."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import get_type_hints
from urllib.parse import urlsplit

from tilework.control.controller import ControllerConfig
from tilework.core.time import s_from_ns

PREFIX = "TILEWORK_"


class ConfigError(ValueError):
    """A setting cannot be used; the message names it, its value and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Limits and addresses of the HTTP server.

    `port` 0 takes a free one. `api_key` is one key or several, separated by commas; None leaves the server open.
    `public_url` replaces scheme and host in the URLs of results, for servers behind a proxy. `tenants` is the path of a
    TOML file (see `server.tenants`). `max_jobs` is how many images of all tenants may wait or run at a time, and
    `max_backlog_s` how long the devices may need for them when another comes in (see `admission.admission_limits`).
    `max_batch` is how many share a forward pass at most. `reconnect_s` is how long a call with an idempotency key goes
    on after its client has gone. `read_timeout_s` is for a whole request head, and for a whole body; `send_timeout_s`
    is after how long a client that takes too little of an answer is cut off (how little is in `protocol`). `durable` is
    a directory: what was accepted outlives the server there (see `store.durable`). `max_records` and `record_bytes`
    bound what is remembered of calls that have ended. `drain_s` is how long a stop waits for what is running and for
    answers under way.

    Raises:
        ConfigError: a value has the wrong type or is out of its range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    tenants: str | None = None
    durable: str | None = None
    public_url: str | None = None
    max_body_bytes: int = 1 << 20
    max_prompt_chars: int = 4096
    max_steps: int = 200
    max_images: int = 10
    max_pixels: int = 1 << 24
    max_previews: int = 16
    max_slo_s: float = 7 * 86400.0
    max_jobs: int = ControllerConfig().max_jobs
    max_backlog_s: float = s_from_ns(ControllerConfig().max_backlog_ns)
    max_batch: int = ControllerConfig().max_batch
    result_ttl_s: float = 3600.0
    result_bytes: int = 512 << 20
    max_records: int = 10_000
    record_bytes: int = 64 << 20
    encode_threads: int = 2
    max_connections: int = 1000
    max_head_bytes: int = 16 << 10
    read_timeout_s: float = 30.0
    send_timeout_s: float = 30.0
    keep_alive_s: float = 15.0
    reconnect_s: float = 30.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name, hint in hints.items():
            _check_type(name, getattr(self, name), hint)
        for name, (low, high) in _BOUNDS.items():
            _check_bounds(name, getattr(self, name), low, high)
        _check_host(self.host)
        _check_url(self.public_url)
        _check_keys(self.api_key)

    @property
    def api_keys(self) -> tuple[bytes, ...]:
        return tuple(key.strip().encode() for key in (self.api_key or "").split(",") if key.strip())


_BOUNDS: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "max_body_bytes": (1024, 1 << 30),
    "max_prompt_chars": (1, 1 << 20),
    "max_steps": (1, 10_000),
    "max_images": (1, 10),
    "max_pixels": (256, 1 << 40),
    "max_previews": (0, 1000),
    "max_slo_s": (1e-3, 366 * 86400.0),
    "max_jobs": (1, 1 << 20),
    "max_backlog_s": (1e-3, 366 * 86400.0),
    "max_batch": (1, 1024),
    "result_ttl_s": (1e-3, 366 * 86400.0),
    "result_bytes": (1, 1 << 50),
    "max_records": (1, 1 << 30),
    "record_bytes": (1024, 1 << 50),
    "encode_threads": (1, 64),
    "max_connections": (1, 1 << 20),
    "max_head_bytes": (1024, 1 << 20),
    "read_timeout_s": (1e-3, 86400.0),
    "send_timeout_s": (1e-3, 86400.0),
    "keep_alive_s": (1e-3, 86400.0),
    "reconnect_s": (0, 86400.0),
    "drain_s": (0, 86400.0),
}


def load_config(
    environ: Mapping[str, str], overrides: Mapping[str, object] | None = None, *, others: Collection[str] = ()
) -> ServerConfig:
    """Resolve the configuration; an override that is None leaves the setting as it is.

    `others` names the settings (lower case, without prefix) that belong to other components: they are skipped here.

    Raises:
        ConfigError: an unknown `TILEWORK_*` variable or override, or a value that cannot be used.
    """
    hints = get_type_hints(ServerConfig)
    values: dict[str, object] = {}
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and name not in others:
            _check_known(variable, name, hints, [PREFIX + known.upper() for known in (*hints, *others)])
            values[name] = _parsed(variable, environ[variable], hints[name])
    for name, value in (overrides or {}).items():
        _check_known(name, name, hints, list(hints))
        if value is not None:
            values[name] = value
    return ServerConfig(**values)  # type: ignore[arg-type]  # __post_init__ checks the types


def _check_known(shown: str, name: str, hints: Mapping[str, object], candidates: list[str]) -> None:
    if name in hints:
        return
    nearest = difflib.get_close_matches(shown, candidates, n=1, cutoff=0.0)[0]
    raise ConfigError(f"{shown} is not a setting of the server; the nearest one is {nearest}. Rename or unset it.")


def _parsed(variable: str, text: str, hint: object) -> object:
    number = {int: int, float: float}.get(hint)  # type: ignore[call-overload]
    if number is None:
        return text or (None if hint == str | None else text)
    try:
        return number(text)
    except ValueError:
        kind = "a whole number" if hint is int else "a number"
        raise ConfigError(f"{variable} = {text!r} is not {kind}; set it to one, or unset it.") from None


def _check_type(name: str, value: object, hint: object) -> None:
    allowed = {int: (int,), float: (int, float), str: (str,)}.get(hint, (str, type(None)))  # type: ignore[call-overload]
    if isinstance(value, bool) or not isinstance(value, allowed):
        wanted = " or ".join(kind.__name__ for kind in allowed)
        raise ConfigError(f"{name} = {value!r} is a {type(value).__name__}; give {wanted}.")


def _check_bounds(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{name} = {value!r} is out of range; give a value from {low:g} to {high:g}.")


def _check_host(host: str) -> None:
    if not host.strip() or "/" in host:
        raise ConfigError(f"host = {host!r} is not an address; give one such as 127.0.0.1, or 0.0.0.0 for all.")


def _check_url(url: str | None) -> None:
    if url is None:
        return
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"public_url = {url!r} is not a base URL; give one such as https://images.example.org")


def _check_keys(api_key: str | None) -> None:
    """A key list without a key would open the server to all, which its operator cannot have meant."""
    if api_key is not None and not any(key.strip() for key in api_key.split(",")):
        raise ConfigError(f"api_key = {api_key!r} holds no key; give keys separated by commas, or unset it.")
