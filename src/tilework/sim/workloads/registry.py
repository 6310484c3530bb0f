"""Workloads by name: those that ship, and those that installed packages declare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from difflib import get_close_matches
from typing import Any

from tilework.distribution import install_lab_command
from tilework.entry_points import NotThere, declared_places, load_named
from tilework.sim.workloads.family import WorkloadFamily, parsed, unknown

ENTRY_POINTS = "tilework.workloads"
SHIPPED: Mapping[str, str] = {
    "mixes": "tilework.sim.workloads.mixes:TableMixes",
    "coserving": "tilework.sim.workloads.synthetic:CoServing",
    "heavy-tail": "tilework.sim.workloads.synthetic:HeavyTail",
}
"""Places, `module:Class`, of the workloads that every installation has."""


_ABOUT = ("name", "source", "about", "table", "num_devices")


class UnknownWorkload(ValueError):
    """No workload has this name, or its class cannot be used; the message lists those that exist."""


def workload_names() -> tuple[str, ...]:
    """Return the names of all workloads, those that ship first."""
    return tuple(_places())


def family(name: str) -> type[WorkloadFamily]:
    """Return the class of a workload by its name, or by its place, `module:Class`. Raises UnknownWorkload."""
    place = name if ":" in name else _places().get(name)
    if place is None:
        near = get_close_matches(name, workload_names(), n=1)
        remedy = f"did you mean {near[0]}?" if near else f"use one of {', '.join(workload_names())}"
        lab = "" if declared_places(ENTRY_POINTS) else f"; workloads of papers come with {install_lab_command()}"
        raise UnknownWorkload(f"there is no workload {name!r}; {remedy}{lab}")
    try:
        found = load_named(place)
    except NotThere as error:
        raise UnknownWorkload(f"workload {name!r} cannot be used: {error}") from error
    if not (isinstance(found, type) and issubclass(found, WorkloadFamily)):
        raise UnknownWorkload(f"workload {name!r} is no class derived from {__package__}.family.WorkloadFamily")
    if missing := [one for one in _ABOUT if not hasattr(found, one)]:
        raise UnknownWorkload(f"workload {name!r} does not say its {', '.join(missing)}; write them as class variables")
    return found


def _places() -> Mapping[str, str]:
    """Return the place of each name. No other package takes over a name that ships."""
    return {**SHIPPED, **{name: at for name, at in declared_places(ENTRY_POINTS).items() if name not in SHIPPED}}


def parameters_of(workload: type[WorkloadFamily]) -> dict[str, Field[Any]]:
    """Return the parameters by name, those that all workloads share first."""
    return {one.name: one for one in fields(workload)}


def make_workload(name: str, values: Mapping[str, Any] | None = None) -> WorkloadFamily:
    """Return the workload of this name with these parameters and the defaults of the others.

    Raises:
        UnknownWorkload: there is none of this name.
        BadParameter: it has no such parameter, or the value is not allowed.
    """
    workload = family(name)
    values = values or {}
    _check_names(workload, values)
    return workload(**values)


def values_of(name: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that texts mean as parameters of this workload. Raises UnknownWorkload and BadParameter."""
    workload = family(name)
    _check_names(workload, texts)
    known = parameters_of(workload)
    return {key: parsed(name, known[key], text) for key, text in texts.items()}


def _check_names(workload: type[WorkloadFamily], names: Iterable[str]) -> None:
    known = parameters_of(workload)
    for name in names:
        if name not in known:
            raise unknown(workload.name, name, known)
