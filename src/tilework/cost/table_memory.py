"""The part of a cost table's file about weights: components, memory, speeds of loading, links (docs/formats.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilework.core.component import Component, LoadSource
from tilework.core.lora import Lora
from tilework.core.model import LORA_NAME, is_lora_name
from tilework.cost.loading import Link
from tilework.cost.table import BadCostTable, CostTable

_LINKS = ("device", "node")
_LIMITS = ("memory_bytes", "host_bytes")


def parse_memory(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `CostTable` about weights. Raises BadCostTable."""
    for name in _LIMITS:
        limit = document.get(name)
        if limit is not None and (type(limit) is not int or limit < 0):
            raise BadCostTable(f"{name} is {limit!r}; expected a whole number of bytes, or null for no limit")
    components = _components(_object(document, "components"))
    speeds = _object(document, "load_bytes_per_s")
    for source, speed in speeds.items():
        if source not in list(LoadSource):
            raise BadCostTable(f"load_bytes_per_s has {source!r}; expected {', '.join(LoadSource)}")
        _check_speed(f"load_bytes_per_s.{source}", speed)
    loras = _loras(_object(document, "loras"))
    if (any(components.values()) or _loaded(loras)) and LoadSource.DISK not in speeds:
        raise BadCostTable("load_bytes_per_s has no disk, and there are components; say how fast they are read from it")
    _check_sizes(
        [
            (f"components.{pipeline}.{name}", one)
            for pipeline, named in components.items()
            for name, one in named.items()
        ]
        + _loaded(loras)
    )
    return {
        "components": components,
        "loras": loras,
        **{name: document.get(name) for name in _LIMITS},
        "load_bytes_per_s": {LoadSource(source): speed for source, speed in speeds.items()},
        "links": {name: _link(name, link) for name, link in _object(document, "links").items()},
    }


def memory_json(table: CostTable) -> dict[str, Any]:
    """Return the fields that `parse_memory` reads, without empty ones."""
    document: dict[str, Any] = {}
    if table.components:
        document["components"] = {
            pipeline: {name: {"digest": one.digest, "bytes": one.num_bytes} for name, one in named.items()}
            for pipeline, named in table.components.items()
        }
    if table.loras:
        document["loras"] = {
            pipeline: {name: _lora_json(one) for name, one in named.items()} for pipeline, named in table.loras.items()
        }
    document |= {name: limit for name in _LIMITS if (limit := getattr(table, name)) is not None}
    if table.load_bytes_per_s:
        document["load_bytes_per_s"] = {str(source): speed for source, speed in table.load_bytes_per_s.items()}
    if table.links:
        document["links"] = {
            name: {"bytes_per_s": link.bytes_per_s, "seconds": link.seconds} for name, link in table.links.items()
        }
    return document


def _object(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = document.get(name, {})
    if not isinstance(value, Mapping):
        raise BadCostTable(f"{name} is {value!r}; expected an object")
    return value


def _components(document: Mapping[str, Any]) -> dict[str, dict[str, Component]]:
    found: dict[str, dict[str, Component]] = {}
    for pipeline, named in document.items():
        if not isinstance(named, Mapping):
            raise BadCostTable(f"components.{pipeline} is {named!r}; expected an object by name")
        found[pipeline] = {name: _component(f"components.{pipeline}.{name}", one) for name, one in named.items()}
    return found


def _check_sizes(placed: Sequence[tuple[str, Component]]) -> None:
    """Raise BadCostTable if two of these components have one digest and two sizes."""
    sizes: dict[str, int] = {}
    for place, component in placed:
        known = sizes.setdefault(component.digest, component.num_bytes)
        if known != component.num_bytes:
            raise BadCostTable(
                f"{place}.bytes is {component.num_bytes}, and {known} elsewhere for the same digest; equal digests "
                "mean equal weights"
            )


def _loras(document: Mapping[str, Any]) -> dict[str, dict[str, Lora]]:
    found: dict[str, dict[str, Lora]] = {}
    for pipeline, named in document.items():
        if not isinstance(named, Mapping):
            raise BadCostTable(f"loras.{pipeline} is {named!r}; expected an object by name")
        wrong = [name for name in named if not is_lora_name(name)]
        if wrong:
            raise BadCostTable(f"loras.{pipeline} has {wrong[0]!r}; use {LORA_NAME}")
        found[pipeline] = {name: _lora(f"loras.{pipeline}.{name}", one) for name, one in named.items()}
    return found


def _loaded(loras: Mapping[str, Mapping[str, Lora]]) -> list[tuple[str, Component]]:
    """Return the weights of LoRAs that devices load, each with its place in the file."""
    return [
        (f"loras.{pipeline}.{name}", one.component)
        for pipeline, named in loras.items()
        for name, one in named.items()
        if one.component is not None
    ]


def _lora(place: str, document: object) -> Lora:
    changes = document.get("changes") if isinstance(document, Mapping) else None
    if not isinstance(document, Mapping) or not isinstance(changes, list) or not changes:
        raise BadCostTable(f"{place} is {document!r}; expected an object with changes, a list of components")
    slowdown = document.get("slowdown", 1.0)
    if type(slowdown) not in (int, float) or slowdown < 1:
        raise BadCostTable(f"{place}.slowdown is {slowdown!r}; expected a factor of at least 1")
    component = _component(place, document) if {"digest", "bytes"} & document.keys() else None
    return Lora(changes=frozenset(map(str, changes)), component=component, slowdown=float(slowdown))


def _lora_json(one: Lora) -> dict[str, Any]:
    document: dict[str, Any] = {"changes": sorted(one.changes)}
    if one.slowdown != 1:
        document["slowdown"] = one.slowdown
    if one.component is not None:
        document |= {"digest": one.component.digest, "bytes": one.component.num_bytes}
    return document


def _component(place: str, document: object) -> Component:
    if not isinstance(document, Mapping):
        raise BadCostTable(f"{place} is {document!r}; expected an object with digest and bytes")
    digest, size = document.get("digest"), document.get("bytes")
    if not isinstance(digest, str) or not digest:
        raise BadCostTable(f"{place}.digest is {digest!r}; expected text, equal for equal weights only")
    if type(size) is not int or size < 0:
        raise BadCostTable(f"{place}.bytes is {size!r}; expected a whole number of bytes")
    return Component(digest, size)


def _link(name: str, document: object) -> Link:
    if name not in _LINKS:
        raise BadCostTable(f"links has {name!r}; expected {' or '.join(map(repr, _LINKS))}")
    if not isinstance(document, Mapping):
        raise BadCostTable(f"links.{name} is {document!r}; expected an object with bytes_per_s")
    _check_speed(f"links.{name}.bytes_per_s", document.get("bytes_per_s"))
    seconds = document.get("seconds", 0.0)
    if type(seconds) not in (int, float) or seconds < 0:
        raise BadCostTable(f"links.{name}.seconds is {seconds!r}; expected seconds, at least 0")
    return Link(float(document["bytes_per_s"]), float(seconds))


def _check_speed(place: str, value: object) -> None:
    if type(value) not in (int, float) or value <= 0:  # type: ignore[operator]
        raise BadCostTable(f"{place} is {value!r}; expected bytes per second, above 0")
