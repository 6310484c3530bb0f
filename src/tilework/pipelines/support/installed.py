"""The classes of pipelines that the installed diffusers exports: which are served exactly, and why others are not."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
from diffusers import DiffusionPipeline
from diffusers.modular_pipelines import ModularPipeline
from diffusers.utils.import_utils import BACKENDS_MAPPING

from tilework.pipelines.support.kinds import SOUND, PipelineClass, is_sound
from tilework.pipelines.support.record import KINDS, Record, read_record

MODULAR = "modular"
"""Kind of all modular pipelines: each class is of several kinds."""
APART = "apart"
"""Kind of classes that make no images or clips, or only a part of one, or that are deprecated."""
SCORED = ("text to image", "edit", "text to video", "image to video")
"""Kinds that the score counts."""
_UNTESTED = "not tested: tests/zoo has no model of it"
_NO_CLASSES = ("Output", "Blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Status of a class. `kind` is one of KINDS, MODULAR or APART; `reason` says why it is not served."""

    name: str
    kind: str
    is_served: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """All classes by kind and name. Tests found the served classes exact with diffusers of version `tested`."""

    installed: str
    tested: str
    classes: tuple[Standing, ...]

    def of(self, *kinds: str) -> tuple[Standing, ...]:
        """Return the classes of these kinds."""
        return tuple(one for one in self.classes if one.kind in kinds)


def count_served(classes: Sequence[Standing]) -> int:
    """Return how many of these are served."""
    return sum(one.is_served for one in classes)


def score() -> Score:
    """Return the status of each class of the installed diffusers. Imports all of them: some ten seconds."""
    order = (*KINDS, MODULAR, APART)
    record = read_record()
    standings = sorted(_standings(record), key=lambda one: (order.index(one.kind), one.name))
    return Score(installed=diffusers.__version__, tested=record.diffusers, classes=tuple(standings))


def _standings(record: Record) -> Iterator[Standing]:
    for name in sorted(name for name in dir(diffusers) if "Pipeline" in name and not name.endswith(_NO_CLASSES)):
        found = getattr(diffusers, name)
        if (
            found in (DiffusionPipeline, ModularPipeline)
            or name.startswith("AutoPipeline")
            or not isinstance(found, type)
        ):
            continue
        if lacking := _lacking(found):
            yield Standing(name=name, kind=APART, is_served=False, reason=lacking)
        elif issubclass(found, ModularPipeline):
            yield _standing(record, name, *((APART, SOUND) if is_sound(name) else (MODULAR, "")))
        elif issubclass(found, DiffusionPipeline):
            yield _classic(record, found)


def _classic(record: Record, found: Any) -> Standing:
    read = PipelineClass(found)
    known = record.classes.get(read.name)
    if apart := read.apart():
        return _standing(record, read.name, APART, apart)
    return _standing(record, read.name, known.kinds[0] if known else read.kind(), read.obstacle())


def _standing(record: Record, name: str, kind: str, obstacle: str) -> Standing:
    known = record.classes.get(name)
    is_served, found = (False, _UNTESTED) if known is None else (known.is_served, known.reason)
    reason = obstacle if kind == APART else found if known else obstacle or found
    return Standing(name=name, kind=kind, is_served=is_served, reason=reason)


def _lacking(found: Any) -> str:
    """Return the packages that a class needs and that are not installed: diffusers then exports a stand-in."""
    backends = inspect.getattr_static(found, "_backends", None)
    if not isinstance(backends, list):
        return ""
    lacking = [name for name in backends if not BACKENDS_MAPPING[name][0]()]
    return f"needs {', '.join(lacking)}, not installed here"


def sentence(found: Score) -> str:
    """Return the score in words, as it stands on the pages."""
    counted = found.of(*SCORED)
    return f"{count_served(counted)} of {len(counted)} pipeline classes of diffusers {found.installed}"
