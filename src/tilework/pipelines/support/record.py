"""The record of what tests found: each class of diffusers, whether its images are exact, and what it can do.

`data/support.json` is that record. `tests/zoo/support.py` writes it from tiny models of each class, and
`tests/pipelines/test_stock.py` checks it against them. The server, `tilework classes` and the pages read it.

Imports no torch, so that a server can refuse a model before it starts workers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from tilework.core.model import ModelInfo

KINDS = (
    "text to image",
    "edit",
    "image to image",
    "inpaint",
    "control",
    "text to video",
    "image to video",
    "video to video",
)
"""Kinds of pipelines, by their inputs and outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRecord:
    """Results of tests of one class. Classes that are not exact have a `reason` and no more.

    Attributes:
        kinds: of KINDS; a modular pipeline may be of several.
        reason: why it is not served; empty if it is.
        exact: True if images equal those of the stock call, bit for bit, alone on one device.
        interleaved: True if that holds while requests take turns.
        moved: True if that holds if a request moves to another process after each stage and step.
        batches: True if requests can share forward passes.
        degrees: number of devices that can share a request's steps, in words.
        previews: True if images are shown while they are made.
        stages: their names.
        inputs: images and the strength that the call takes; those in brackets may be left out.
    """

    kinds: tuple[str, ...]
    reason: str = ""
    exact: bool = False
    interleaved: bool = False
    moved: bool = False
    batches: bool = False
    degrees: str = "1"
    previews: bool = False
    stages: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    @property
    def is_served(self) -> bool:
        """True if its images are those of the stock call however it is scheduled."""
        return self.exact and self.interleaved and self.moved

    @property
    def limits(self) -> tuple[str, ...]:
        """Features that it lacks, as `limits_of` a loaded model."""
        return limits(previews=self.previews, batches=self.batches, is_parallel=self.degrees != "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All classes by name, and the version of diffusers that they were tested with."""

    diffusers: str
    classes: Mapping[str, ClassRecord]

    def dump(self) -> str:
        """Return the record as JSON, with a line for each class, by kind and name."""
        lines = [
            f"  {json.dumps(name)}: {json.dumps(_filled(one))}"
            for name, one in sorted(self.classes.items(), key=lambda item: (KINDS.index(item[1].kinds[0]), item[0]))
        ]
        return f'{{\n "diffusers": {json.dumps(self.diffusers)},\n "classes": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def limits(*, previews: bool, batches: bool, is_parallel: bool) -> tuple[str, ...]:
    """Return in words the features that a model lacks and others have."""
    lacks = {"previews": not previews, "shared passes": not batches, "several devices per request": not is_parallel}
    return tuple(name for name, is_lacking in lacks.items() if is_lacking)


def limits_of(info: ModelInfo) -> tuple[str, ...]:
    """Return in words the features that a loaded model lacks and others have."""
    lacks = limits(
        previews=any(stage.previews for stage in info.stages),
        batches=any(stage.batchable for stage in info.stages),
        is_parallel=info.max_degree > 1,
    )
    is_untested = info.family.endswith("Pipeline") and info.family not in served_classes()
    return (*lacks, "tests that hold its class exact") if is_untested else lacks


@cache
def read_record() -> Record:
    """Return the record that ships with the package."""
    read = json.loads(record_file().read_text("utf-8"))
    return Record(
        diffusers=read["diffusers"], classes={name: _parsed(values) for name, values in read["classes"].items()}
    )


def record_file() -> Path:
    """Return the path of the record."""
    return Path(str(resources.files("tilework"))) / "data" / "support.json"


def served_classes() -> frozenset[str]:
    """Return the classes that are served without being named by an adapter."""
    return frozenset(name for name, one in read_record().classes.items() if one.is_served)


def reason_against(name: str) -> str:
    """Return why a class is not served, as far as the record says."""
    known = read_record().classes.get(name)
    return "no test holds it exact" if known is None else f"found not exact: {known.reason}"


def _parsed(values: Mapping[str, Any]) -> ClassRecord:
    read: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return ClassRecord(**read)


def _filled(one: ClassRecord) -> dict[str, Any]:
    """Return its fields without those that have their default."""
    defaults = asdict(ClassRecord(kinds=()))
    return {name: value for name, value in asdict(one).items() if value != defaults[name]}
