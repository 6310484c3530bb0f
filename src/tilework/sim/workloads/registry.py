"""Workloads by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from difflib import get_close_matches
from typing import Any

from tilework.sim.workloads.coserving import CoServing
from tilework.sim.workloads.ddit import DDiT
from tilework.sim.workloads.family import Family
from tilework.sim.workloads.flood import Flood
from tilework.sim.workloads.gentd26.family import GenTD26
from tilework.sim.workloads.heavy_tail import HeavyTail
from tilework.sim.workloads.in_phase import InPhase
from tilework.sim.workloads.ladder import Ladder
from tilework.sim.workloads.mixes import TableMixes
from tilework.sim.workloads.one_degree import OneDegree
from tilework.sim.workloads.parameters import parsed, unknown
from tilework.sim.workloads.patchedserve import PatchedServeSd3, PatchedServeSdxl
from tilework.sim.workloads.promises import Promises
from tilework.sim.workloads.tetriserve import TetriServe
from tilework.sim.workloads.tridentserve import (
    TridentServeCogVideoX,
    TridentServeFlux,
    TridentServeHunyuanVideo,
    TridentServeSd3,
)
from tilework.sim.workloads.unreachable import Unreachable
from tilework.sim.workloads.wide_after_narrow import WideAfterNarrow

_FAMILIES: tuple[type[Family], ...] = (
    TetriServe,
    DDiT,
    TridentServeSd3,
    TridentServeFlux,
    TridentServeCogVideoX,
    TridentServeHunyuanVideo,
    PatchedServeSd3,
    PatchedServeSdxl,
    GenTD26,
    TableMixes,
    CoServing,
    HeavyTail,
    WideAfterNarrow,
    Unreachable,
    OneDegree,
    Promises,
    Flood,
    InPhase,
    Ladder,
)


class UnknownWorkload(ValueError):
    """There is no workload of this name; the message lists those that there are."""


def workload_names() -> tuple[str, ...]:
    """Published evaluations first."""
    return tuple(each.name for each in _FAMILIES)


def family(name: str) -> type[Family]:
    """Raises UnknownWorkload."""
    for each in _FAMILIES:
        if each.name == name:
            return each
    near = get_close_matches(name, workload_names(), n=1)
    remedy = f"did you mean {near[0]}?" if near else f"use one of {', '.join(workload_names())}"
    raise UnknownWorkload(f"there is no workload {name!r}; {remedy}")


def parameters_of(workload: type[Family]) -> dict[str, Field[Any]]:
    """By name, those that all workloads share first."""
    return {one.name: one for one in fields(workload)}


def make_workload(name: str, values: Mapping[str, Any] | None = None) -> Family:
    """The workload of this name with these parameters and the defaults of the others.

    Raises:
        UnknownWorkload: there is none of this name.
        BadParameter: it has no such parameter, or the value is not allowed.
    """
    workload, values = family(name), values or {}
    _check_names(workload, values)
    return workload(**values)


def values_of(name: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """The values that texts mean as parameters of this workload. Raises UnknownWorkload and BadParameter."""
    workload = family(name)
    _check_names(workload, texts)
    known = parameters_of(workload)
    return {key: parsed(name, known[key], text) for key, text in texts.items()}


def _check_names(workload: type[Family], names: Iterable[str]) -> None:
    known = parameters_of(workload)
    for name in names:
        if name not in known:
            raise unknown(workload.name, name, known)
