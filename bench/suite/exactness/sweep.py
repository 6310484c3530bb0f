"""One model of the sweep in all types and ways to run it, each result against the stock pipeline's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import diffusers
import torch
from torch import Tensor

import tilework
from suite.exactness import models
from suite.exactness.middle import Trial, trials
from suite.exactness.runs import PROMPTS, Run, alone, by_stock, levels, moved, relative_error, shared
from suite.exactness.team import Team
from tilework.core.model import ModelSource
from tilework.core.wire import Spec
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load
from tilework.pipelines.model_index import SHIPPED, shipped_directory
from tilework.pipelines.numerics import pin_numerics

GUIDANCE = (1.0, 7.5, 30.0)
ALONE, MOVED = "alone", "moved"
PLAIN, TWO_THREADS = "stock: plain from_pretrained", "stock: two threads"
STOCK_BATCH = "stock: batch of three"
MIXED, EQUAL = "shared pass, mixed sizes", "shared pass, equal sizes"
TWO_DEVICES, THREE_DEVICES = "two devices", "three devices"
SHARED = (MIXED, EQUAL)
WIDE = (TWO_DEVICES, THREE_DEVICES)
_BATCH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the sweep: one of models.FAMILIES with a sampler, or the shipped one as it is."""

    family: str
    seed: int = 0
    sampler: str = "its own"

    def __str__(self) -> str:
        return self.family if self.is_shipped else f"{self.family} {self.seed}, {self.sampler}"

    def save(self, directory: Path) -> None:
        if self.is_shipped:
            shutil.copytree(shipped_directory(), directory, dirs_exist_ok=True)
        else:
            models.save(self.family, self.seed, self.sampler, directory)

    @property
    def is_shipped(self) -> bool:
        return self.family == SHIPPED

    @property
    def is_guided(self) -> bool:
        """Whether guidance takes a second pass."""
        return self.family not in ("flux", "schnell")

    @property
    def tries_ways_between(self) -> bool:
        """A family's own sampler, and the one that amplifies differences most, are enough."""
        return self.sampler in ("euler", "flow euler", "edm")

    def specs(self, steps: int) -> list[Spec]:
        """Requests of two sizes, of six for the shipped model; at each guidance if the model is guided."""
        rng = Random(str(self))
        count, most = (6, 12) if self.is_shipped else (2, 8)
        sizes = [(16 * rng.randint(4, most), 16 * rng.randint(4, most)) for _ in range(count)]
        scales = GUIDANCE if self.is_guided else (3.5, 3.5, 3.5)
        return [
            Spec(
                prompt=PROMPTS[index % len(PROMPTS)],
                negative_prompt="",
                height=height,
                width=width,
                steps=steps,
                guidance_scale=scale,
                seed=rng.randrange(1000),
            )
            for index, (scale, (height, width)) in enumerate((scale, size) for scale in scales for size in sizes)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request of one model, made in one way.

    `error` is that of its latents against stock, `levels` and `changed` the largest difference of pixels (of 255) and
    the share of values that differ, `predictions` the errors of single predictions. `distance` is the error of its
    latents against stock in float32, and `stock_distance` that of stock itself.
    """

    model: Model
    dtype: str
    way: str
    spec: Spec
    error: float
    levels: int
    changed: float
    predictions: tuple[float, ...]
    distance: float
    stock_distance: float

    @property
    def guidance(self) -> float:
        """1 for models that take guidance as an input."""
        return self.spec.guidance_scale if self.model.is_guided else 1.0

    @property
    def is_equal(self) -> bool:
        return self.error == 0 and self.levels == 0

    def __str__(self) -> str:
        return f"{self.model}, {self.spec.height}x{self.spec.width}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    outcomes: tuple[Outcome, ...]
    trials: Mapping[str, tuple[Trial, ...]]
    """By dtype."""


def sweep(model: Model, directory: Path, dtypes: Sequence[str], steps: int, team: Team) -> Swept:
    """`dtypes` begin with float32."""
    assert dtypes[0] == "float32"
    model.save(directory)
    specs = model.specs(steps)
    outcomes: list[Outcome] = []
    tried: dict[str, tuple[Trial, ...]] = {}
    exact: list[Tensor] = []
    for dtype in dtypes:
        source = ModelSource(path=str(directory), dtype=dtype)
        stock, here = tilework.reference(source.path, dtype=dtype), load(source)
        references = [by_stock(stock, model.family, spec) for spec in specs]
        exact = exact or [reference.latents for reference in references]
        for way, runs in _ways(model, source, specs, stock, here, team):
            outcomes += [
                _outcome(model, dtype, way, *case) for case in zip(specs, runs, references, exact, strict=False)
            ]
        if dtype != "float32" and model.tries_ways_between:
            middle = len(specs) // 2  # Of the middle guidance, where there is one.
            tried[dtype] = tuple(trials(here, specs[middle], exact[middle]))
    return Swept(outcomes=tuple(outcomes), trials=tried)


def _ways(
    model: Model, source: ModelSource, specs: Sequence[Spec], stock: Any, here: Family, team: Team
) -> Iterator[tuple[str, list[Run]]]:
    draw = partial(by_stock, family=model.family)
    there = load(source)
    yield ALONE, [alone(here, spec) for spec in specs]
    yield MOVED, [moved(here, there, spec) for spec in specs]
    plain = diffusers.DiffusionPipeline.from_pretrained(
        source.path, local_files_only=True, use_safetensors=True, dtype=getattr(torch, source.dtype), **_absent(source)
    )
    yield PLAIN, [draw(plain, spec=spec) for spec in specs]
    pin_numerics(threads=2)
    yield TWO_THREADS, [draw(stock, spec=spec) for spec in specs]
    pin_numerics(threads=1)
    yield STOCK_BATCH, [draw(stock, spec=spec, others=_BATCH - 1) for spec in specs]
    for way, key in ((MIXED, _next_to), (EQUAL, _size)):
        yield way, _in_groups(here, specs, key)
    for way, degree in ((TWO_DEVICES, 2), (THREE_DEVICES, 3)):
        if degree <= here.info.max_degree:
            yield way, team.run(source, degree, specs)


def _in_groups(here: Family, specs: Sequence[Spec], key: Callable[[int, Spec], object]) -> list[Run]:
    groups: dict[object, list[int]] = {}
    for index, spec in enumerate(specs):
        groups.setdefault(key(index, spec), []).append(index)
    runs: dict[int, Run] = {}
    for members in groups.values():
        runs.update(zip(members, shared(here, [specs[index] for index in members]), strict=True))
    return [runs[index] for index in range(len(specs))]


def _next_to(index: int, _spec: Spec) -> object:
    """In threes; neighbours have different sizes."""
    return index // _BATCH


def _size(_index: int, spec: Spec) -> object:
    return spec.height, spec.width


def _absent(source: ModelSource) -> dict[str, None]:
    """Components that the index leaves empty; diffusers wants them named."""
    index = models.read_index(Path(source.path))
    return {name: None for name, value in index.items() if value == [None, None]}


def _outcome(model: Model, dtype: str, way: str, spec: Spec, run: Run, reference: Run, exact: Tensor) -> Outcome:
    return Outcome(
        model=model,
        dtype=dtype,
        way=way,
        spec=spec,
        error=relative_error(run.latents, reference.latents),
        levels=levels(run, reference),
        changed=float((run.pixels != reference.pixels).mean()),
        predictions=run.predictions,
        distance=relative_error(run.latents, exact),
        stock_distance=relative_error(reference.latents, exact),
    )
