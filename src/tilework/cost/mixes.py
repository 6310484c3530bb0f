"""Sizes of the requests of an evaluation: mixes of sizes, and how they change over time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeGuard

from tilework.core.request import Shape

Mix = Mapping[Shape, float]
"""Weight of each size; only the ratios of weights count."""

_BLOCK_FIELDS = ("from_min", "to_min", "rate_factor")
_TAKEN = ("dynamic", "diurnal", "trace", *_BLOCK_FIELDS)
"""Names that no mix can have: they mean something else where a mix is named."""


class BadMixes(ValueError):
    """Mixes that cannot be used; the message names the field, its value and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixBlock:
    """Some minutes in which requests come at `rate_factor` times the mean rate, from several mixes by weight."""

    from_min: float
    to_min: float
    rate_factor: float
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """A day of one mix: the rate is a sine from its lowest value to `peak` times that, and back."""

    mix: str
    peak: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixes:
    """The mixes of a cost table by name, blocks of them that follow each other (`dynamic`), and a day (`diurnal`)."""

    by_name: Mapping[str, Mix] = field(default_factory=dict)
    dynamic: tuple[MixBlock, ...] = ()
    diurnal: Day | None = None

    @staticmethod
    def parse(document: Mapping[str, Any]) -> Mixes:
        """Read the fields `mixes`, `dynamic` and `diurnal` of a cost table. Raises BadMixes."""
        given = document.get("mixes", {})
        if not isinstance(given, Mapping):
            raise BadMixes(f"mixes is {given!r}; expected an object by name")
        for name in given:
            if name in _TAKEN:
                raise BadMixes(f"mixes has {name!r}, a name that has another meaning; rename it")
        by_name = {name: _mix(f"mixes.{name}", mix) for name, mix in given.items()}
        return Mixes(
            by_name=by_name,
            dynamic=_blocks(document.get("dynamic", []), by_name.keys()),
            diurnal=_day(document["diurnal"], by_name.keys()) if "diurnal" in document else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what `parse` reads, without empty fields."""
        document: dict[str, Any] = {}
        if self.by_name:
            document["mixes"] = {
                name: {str(shape): weight for shape, weight in mix.items()} for name, mix in self.by_name.items()
            }
        if self.dynamic:
            document["dynamic"] = [
                {name: getattr(block, name) for name in _BLOCK_FIELDS} | dict(block.weights) for block in self.dynamic
            ]
        if self.diurnal is not None:
            document["diurnal"] = {"mix": self.diurnal.mix, "peak": self.diurnal.peak}
        return document


def _mix(place: str, document: object) -> dict[Shape, float]:
    if not isinstance(document, Mapping) or not document:
        raise BadMixes(f"{place} is {document!r}; expected an object of weights by size, as 1024x1024")
    try:
        mix = {Shape.parse(size): weight for size, weight in document.items()}
    except ValueError as error:
        raise BadMixes(f"{place}: {error}; write WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES") from error
    _check_weights(place, document)
    return mix


def _blocks(document: object, names: Collection[str]) -> tuple[MixBlock, ...]:
    if not isinstance(document, list):
        raise BadMixes(f"dynamic is {document!r}; expected a list of blocks with from_min, to_min and weights of mixes")
    blocks: list[MixBlock] = []
    for index, block in enumerate(document):
        blocks.append(_block(f"dynamic[{index}]", block, blocks[-1].to_min if blocks else 0, names))
    return tuple(blocks)


def _block(place: str, document: object, begin_min: float, names: Collection[str]) -> MixBlock:
    if not isinstance(document, Mapping):
        raise BadMixes(f"{place} is {document!r}; expected an object with from_min, to_min and weights of mixes")
    from_min, to_min, rate_factor = (
        document.get(name, 1.0 if name == "rate_factor" else None) for name in _BLOCK_FIELDS
    )
    if from_min != begin_min:
        raise BadMixes(
            f"{place}.from_min is {from_min!r}; expected {begin_min!r}, since blocks follow each other from 0"
        )
    if not _is_number(to_min) or to_min <= begin_min:
        raise BadMixes(f"{place}.to_min is {to_min!r}; expected minutes after {begin_min!r}")
    if not _is_number(rate_factor) or rate_factor <= 0:
        raise BadMixes(f"{place}.rate_factor is {rate_factor!r}; expected a number above 0")
    weights = {name: weight for name, weight in document.items() if name not in _BLOCK_FIELDS}
    for name in weights:
        _check_mix(f"{place} has {name!r}", name, names)
    _check_weights(place, weights)
    return MixBlock(from_min=from_min, to_min=to_min, rate_factor=rate_factor, weights=weights)


def _day(document: object, names: Collection[str]) -> Day:
    if not isinstance(document, Mapping):
        raise BadMixes(
            f"diurnal is {document!r}; expected an object with mix and peak, the highest rate over the lowest"
        )
    mix, peak = document.get("mix"), document.get("peak")
    _check_mix(f"diurnal.mix is {mix!r}", mix, names)
    if not _is_number(peak) or peak < 1:
        raise BadMixes(f"diurnal.peak is {peak!r}; expected the highest rate over the lowest, at least 1")
    return Day(mix=str(mix), peak=peak)


def _check_mix(what: str, name: object, names: Collection[str]) -> None:
    if name not in names:
        near = get_close_matches(str(name), names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadMixes(f"{what}, which is no mix; {hint}use one of {', '.join(names) or 'those that mixes has (none)'}")


def _check_weights(place: str, weights: Mapping[str, object]) -> None:
    for name, weight in weights.items():
        if not _is_number(weight) or weight < 0:
            raise BadMixes(f"{place}.{name} is {weight!r}; expected a weight of at least 0")
    if not any(weights.values()):
        raise BadMixes(f"{place} has no weight above 0; give one at least")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)
