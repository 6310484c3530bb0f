"""Tenants and classes of requests, read from a TOML file: their API keys, weights and limits."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tilework.core.priority import DEFAULT_CLASS, DEFAULT_CLASSES, LARGEST_WEIGHT, LEAST_WEIGHT, room
from tilework.core.request import OnMiss, Terms
from tilework.server.config import ConfigError, ServerConfig
from tilework.server.default_slo import WANTED, DefaultSlo, DefaultSloField
from tilework.server.toml_file import KEY, place, read_toml

DEFAULT_TENANT = "default"
MAX_OPEN = 1_000_000
PROMISE_SHARE = 0.25  # A tenant's share of what may be promised, beside others: a promise is never taken back.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Clients that share a name.

    `classes` are those it may ask for (None: all), `max_open` bounds its open images, and `requests_per_minute` the
    calls for images of each of its keys. A tenant that `is_admin` may change what is served, and one that `is_monitor`
    may read metrics and nothing else. `default_slo` is the deadline of requests that give none.
    """

    name: str = DEFAULT_TENANT
    weight: float = 1.0
    classes: tuple[str, ...] | None = None
    max_open: int | None = None
    requests_per_minute: int | None = None
    keys: tuple[bytes, ...] = field(default=(), repr=False)
    is_admin: bool = False
    is_monitor: bool = False
    default_slo: DefaultSlo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """All tenants, and the weight of each class. Unless a key allows drawing, every call is of the default tenant.

    `scoped` are the default tenant with the keys of the scope admin, and with those of the scope metrics. All requests
    of `exact_classes` are exact. `default_slos` are the deadlines, by class, of requests that give none.
    """

    members: tuple[Tenant, ...] = (Tenant(),)
    scoped: tuple[Tenant, ...] = ()
    classes: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_CLASSES))
    exact_classes: frozenset[str] = frozenset()
    default_slos: Mapping[str, DefaultSlo] = field(default_factory=dict)

    @property
    def has_keys(self) -> bool:
        return any(tenant.keys for tenant in self.members if not tenant.is_monitor)

    def find(self, key: bytes | None) -> Tenant | None:
        """Return the tenant of a key. All keys are compared, each in constant time: the time reveals nothing."""
        found = None
        if not self.has_keys:
            found = next((tenant for tenant in self.members if tenant.name == DEFAULT_TENANT), Tenant())
        for tenant in (*self.members, *self.scoped):
            for known in tenant.keys:
                if hmac.compare_digest(key or b"", known):
                    found = tenant
        return found

    def named(self, name: str) -> Tenant | None:
        return next((tenant for tenant in self.members if tenant.name == name), None)

    def allowed(self, tenant: Tenant) -> tuple[str, ...]:
        """Return the classes that a tenant may ask for."""
        return tuple(self.classes) if tenant.classes is None else tenant.classes

    def default_class(self, tenant: Tenant) -> str:
        """Return the class of a request that names none: the standard one, or the first of its tenant."""
        allowed = self.allowed(tenant)
        return DEFAULT_CLASS if DEFAULT_CLASS in allowed else allowed[0]

    def weight(self, tenant: Tenant, name: str) -> float:
        return tenant.weight * self.classes[name]

    def terms(self, tenant: Tenant, name: str, on_miss: OnMiss) -> Terms:
        """Return the terms of a tenant's requests of the class `name`."""
        return Terms(
            on_miss=on_miss,
            tenant=tenant.name,
            priority=name,
            weight=self.weight(tenant, name),
            tenant_weight=tenant.weight,
            room=room(self.classes[name], max(self.classes.values())),
            promise_share=PROMISE_SHARE if self.num_callers > 1 else 1.0,
        )

    @property
    def num_callers(self) -> int:
        """Number of tenants that may ask for images: a single one has no share to leave to others."""
        return sum(bool(tenant.keys) and not tenant.is_monitor for tenant in self.members)


@dataclass(slots=True, eq=False)
class CurrentTenants:
    """The tenants for new requests: a reload replaces them (see `server.reload`)."""

    value: Tenants


def _checked_key(key: str) -> str:
    if not key.isascii() or not key.isprintable() or key != key.strip() or not key:
        raise ValueError("not a key")
    return key


_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_Weight = Annotated[float, Field(ge=LEAST_WEIGHT, le=LARGEST_WEIGHT, allow_inf_nan=False)]
_Key = Annotated[str, AfterValidator(_checked_key)]
_WANTED = {
    "keys": 'a list of texts, keys = ["..."], each printable ASCII without blanks at its ends',
    "weight": f"a number from {LEAST_WEIGHT:g} to {LARGEST_WEIGHT:g}",
    "classes": "a list of one class or more",
    "exact": "true or false",
    "admin": "true or false",
    "metrics": "true or false",
    "default_slo": WANTED,
    "max_open": f"a whole number from 1 to {MAX_OPEN}",
    "requests_per_minute": f"a whole number from 1 to {MAX_OPEN}",
}


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Tenant(_Table):
    """A table `[tenants.NAME]`."""

    keys: list[_Key] = []
    weight: _Weight = 1.0
    classes: list[str] | None = Field(None, min_length=1)
    max_open: int | None = Field(None, ge=1, le=MAX_OPEN)
    requests_per_minute: int | None = Field(None, ge=1, le=MAX_OPEN)
    admin: bool = False
    metrics: bool = False
    default_slo: DefaultSloField = None


class _Class(_Table):
    """A table `[classes.NAME]`."""

    weight: _Weight | None = None
    exact: bool = False
    default_slo: DefaultSloField = None


class _TenantsFile(_Table):
    tenants: dict[_Name, _Tenant] = {}
    classes: dict[_Name, _Class] = {}


def load_tenants(config: ServerConfig) -> Tenants:
    """Read `config.tenants`, if it is set; the keys of the settings belong to the default tenant.

    Raises:
        ConfigError: the file cannot be used; the message names file, key, value and remedy, but never shows an API key.
    """
    file = _TenantsFile() if config.tenants is None else read_toml("tenants", config.tenants, _TenantsFile, _mistake)
    try:
        return _tenants(file, config)
    except ConfigError as error:
        raise ConfigError(str(error) if config.tenants is None else f"{config.tenants}: {error}") from None


def _tenants(file: _TenantsFile, config: ServerConfig) -> Tenants:
    """Make the tenants of a file and the settings. Raises ConfigError, which does not name the file."""
    classes = {name: _default_weight(name) if row.weight is None else row.weight for name, row in file.classes.items()}
    classes = {**DEFAULT_CLASSES, **classes}
    members = {name: _tenant(name, row, classes) for name, row in file.tenants.items()}
    for name, tenant in members.items():
        if not tenant.keys and name != DEFAULT_TENANT:
            raise ConfigError(f"tenants.{name} has no keys, so no client could call as it; give it a list of keys.")
    default = members.pop(DEFAULT_TENANT, Tenant())
    default = replace(default, keys=(*default.keys, *config.api_keys))
    exact_classes = frozenset(name for name, row in file.classes.items() if row.exact)
    scoped = (
        replace(default, keys=config.admin_keys, is_admin=True),
        replace(default, keys=config.metrics_keys, is_monitor=True),
    )
    tenants = Tenants(
        members=(default, *members.values()),
        scoped=scoped,
        classes=classes,
        exact_classes=exact_classes,
        default_slos={name: row.default_slo for name, row in file.classes.items() if row.default_slo is not None},
    )
    _check_distinct(tenants)
    _check_weights(tenants)
    return tenants


def _mistake(error: Any) -> str:
    """Describe a mistake in a value of the file, its place, and the remedy. Keys are never shown."""
    path, at = place(error)
    value = "" if "keys" in path else f" = {error['input']!r}"
    if error["loc"][-1] == KEY:
        return f"{path[0]}.{path[-1]!r} is not a name; use letters, digits and _ . - (at most 64)."
    if error["type"] == "extra_forbidden":
        known = _Tenant if path[0] == "tenants" and len(path) > 2 else _Class if len(path) > 2 else _TenantsFile
        return f"{at} is not a setting of tenants; use {', '.join(sorted(known.model_fields))}."
    if len(path) <= 2:
        return f"{at}{value} is not a table; write [{at if len(path) == 2 else at + '.NAME'}]."
    return f"{at}{value} cannot be used; give {_WANTED[str(path[2])]}."


def _default_weight(name: str) -> float:
    return DEFAULT_CLASSES.get(name, 1.0)


def _tenant(name: str, row: _Tenant, classes: Mapping[str, float]) -> Tenant:
    if row.classes is not None and not all(one in classes for one in row.classes):
        raise ConfigError(
            f"tenants.{name}.classes = {row.classes!r} is not a list of classes; choose among {', '.join(classes)}."
        )
    if row.metrics and (row.admin or name == DEFAULT_TENANT):
        other = "has admin = true, too" if row.admin else "is the tenant of all calls without a key of another"
        raise ConfigError(
            f"tenants.{name}.metrics = true lets its keys read metrics and nothing else, and {name} {other}; give the"
            " keys for metrics a tenant of their own."
        )
    return Tenant(
        name=name,
        weight=row.weight,
        classes=None if row.classes is None else tuple(row.classes),
        max_open=row.max_open,
        requests_per_minute=row.requests_per_minute,
        keys=tuple(key.encode() for key in row.keys),
        is_admin=row.admin,
        is_monitor=row.metrics,
        default_slo=row.default_slo,
    )


def _check_distinct(tenants: Tenants) -> None:
    owners: dict[bytes, str] = {}
    seen = {key for tenant in tenants.members for key in tenant.keys}
    for tenant in tenants.scoped:
        if seen.intersection(tenant.keys):
            setting, others = ("admin_key", "") if tenant.is_admin else ("metrics_key", ", of admin_key")
            raise ConfigError(f"a key of {setting} is also one of api_key{others} or of a tenant; give each its own.")
        seen.update(tenant.keys)
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
