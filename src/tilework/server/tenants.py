"""Who may call, and what counts how much: tenants and classes of requests, from a settings file in TOML."""

from __future__ import annotations

import hmac
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilework.core.priority import DEFAULT_CLASS, DEFAULT_CLASSES, LARGEST_WEIGHT, LEAST_WEIGHT, room
from tilework.server.config import ConfigError, ServerConfig

DEFAULT_TENANT = "default"
MAX_OPEN = 1_000_000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One who calls. `classes` are those it may ask for (None: all), `max_open` how many of its images may be open."""

    name: str = DEFAULT_TENANT
    weight: float = 1.0
    classes: tuple[str, ...] | None = None
    max_open: int | None = None
    keys: tuple[bytes, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """All who may call, and what each class weighs. Without any key everybody is the default tenant."""

    members: tuple[Tenant, ...] = (Tenant(),)
    classes: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_CLASSES))

    @property
    def has_keys(self) -> bool:
        return any(tenant.keys for tenant in self.members)

    def find(self, key: bytes | None) -> Tenant | None:
        """Whose key this is. All keys are compared, each in constant time, so that time tells nothing about them."""
        if not self.has_keys:
            return next((tenant for tenant in self.members if tenant.name == DEFAULT_TENANT), Tenant())
        found = None
        for tenant in self.members:
            for known in tenant.keys:
                if hmac.compare_digest(key or b"", known):
                    found = tenant
        return found

    def allowed(self, tenant: Tenant) -> tuple[str, ...]:
        """The classes that a tenant may ask for."""
        return tuple(self.classes) if tenant.classes is None else tenant.classes

    def default_class(self, tenant: Tenant) -> str:
        """What a request of the tenant is that names no class: the standard one, or the tenant's first."""
        allowed = self.allowed(tenant)
        return DEFAULT_CLASS if DEFAULT_CLASS in allowed else allowed[0]

    def weight(self, tenant: Tenant, name: str) -> float:
        return tenant.weight * self.classes[name]

    def room(self, name: str) -> float:
        """How full the queue may be when a request of a class still comes in."""
        return room(self.classes[name], max(self.classes.values()))


def load_tenants(config: ServerConfig) -> Tenants:
    """Read `config.tenants`, if there is one; the keys of `config.api_key` belong to the default tenant.

    Raises:
        ConfigError: the file cannot be used; the message names key, value and remedy, but never shows an API key.
    """
    table = {} if config.tenants is None else _read(config.tenants)
    _check_names(table, {"tenants", "classes"}, "")
    classes = {**DEFAULT_CLASSES, **{name: _class_weight(name, row) for name, row in _rows(table, "classes").items()}}
    members = {name: _tenant(name, row, classes) for name, row in _rows(table, "tenants").items()}
    if members and not all(tenant.keys for tenant in members.values() if tenant.name != DEFAULT_TENANT):
        raise ConfigError("a tenant has no keys, so that nobody could call as it; give each a list of keys.")
    default = members.pop(DEFAULT_TENANT, Tenant())
    default = Tenant(
        weight=default.weight,
        classes=default.classes,
        max_open=default.max_open,
        keys=(*default.keys, *config.api_keys),
    )
    tenants = Tenants(members=(default, *members.values()), classes=classes)
    _check_distinct(tenants)
    _check_weights(tenants)
    return tenants


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"tenants = {path!r} cannot be read: {error.strerror}. Give a TOML file.") from None
    except ValueError as error:
        raise ConfigError(f"tenants = {path!r} is not TOML: {error}. Correct it there.") from None


def _rows(table: Mapping[str, Any], section: str) -> dict[str, dict[str, Any]]:
    rows = table.get(section, {})
    if not isinstance(rows, dict):
        raise ConfigError(f"{section} = {rows!r} is not a table; write [{section}.NAME].")
    for name, row in rows.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{section}.{name!r} is not a name; use letters, digits and _ . - (at most 64).")
        if not isinstance(row, dict):
            raise ConfigError(f"{section}.{name} = {row!r} is not a table; write [{section}.{name}].")
    return rows


def _class_weight(name: str, row: Mapping[str, Any]) -> float:
    _check_names(row, {"weight"}, f"classes.{name}.")
    return _weight(row.get("weight", DEFAULT_CLASSES.get(name, 1.0)), f"classes.{name}.weight")


def _tenant(name: str, row: Mapping[str, Any], classes: Mapping[str, float]) -> Tenant:
    at = f"tenants.{name}."
    _check_names(row, {"keys", "weight", "classes", "max_open"}, at)
    return Tenant(
        name=name,
        weight=_weight(row.get("weight", 1.0), at + "weight"),
        classes=_classes(row.get("classes"), at + "classes", classes),
        max_open=_max_open(row.get("max_open"), at + "max_open"),
        keys=_keys(row.get("keys", []), at + "keys"),
    )


def _check_names(table: Mapping[str, Any], known: set[str], at: str) -> None:
    for name in table:
        if name not in known:
            raise ConfigError(f"{at}{name} is not a setting of tenants; use {', '.join(sorted(known))}.")


def _weight(value: object, at: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST_WEIGHT <= value <= LARGEST_WEIGHT:
        raise ConfigError(
            f"{at} = {value!r} is not a weight; give a number from {LEAST_WEIGHT:g} to {LARGEST_WEIGHT:g}."
        )
    return float(value)


def _classes(value: object, at: str, classes: Mapping[str, float]) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(name in classes for name in value):
        raise ConfigError(f"{at} = {value!r} is not a list of classes; choose among {', '.join(classes)}.")
    return tuple(value)


def _max_open(value: object, at: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_OPEN:
        raise ConfigError(f"{at} = {value!r} is out of range; give a whole number from 1 to {MAX_OPEN}.")
    return value


def _keys(value: object, at: str) -> tuple[bytes, ...]:
    """Keys are not shown, whatever is wrong with them."""
    if not isinstance(value, list):
        raise ConfigError(f'{at} is a {type(value).__name__}; give a list of texts: keys = ["..."].')
    for index, key in enumerate(value):
        if not isinstance(key, str) or not key.isascii() or not key.isprintable() or key != key.strip() or not key:
            raise ConfigError(f"{at}[{index}] is not a key; give printable ASCII without blanks at its ends.")
    return tuple(key.encode() for key in value)


def _check_distinct(tenants: Tenants) -> None:
    owners: dict[bytes, str] = {}
    for tenant in tenants.members:
        for key in tenant.keys:
            if owners.setdefault(key, tenant.name) != tenant.name:
                raise ConfigError(
                    f"tenants.{tenant.name}.keys and tenants.{owners[key]}.keys share a key; give each its own."
                )


def _check_weights(tenants: Tenants) -> None:
    for tenant in tenants.members:
        for name in tenants.allowed(tenant):
            weight = tenants.weight(tenant, name)
            if not LEAST_WEIGHT <= weight <= LARGEST_WEIGHT:
                raise ConfigError(
                    f"tenants.{tenant.name}.weight x classes.{name}.weight = {weight:g} is out of range;"
                    f" keep the product from {LEAST_WEIGHT:g} to {LARGEST_WEIGHT:g}."
                )
