"""What the family of any pipeline costs over its stock call, and against the families written by hand."""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from suite import stock_models
from suite.case import Check, Finding, Note, Table
from suite.stats import Interval, bootstrap, median
from tilework.core.wire.spec import Spec
from tilework.pipelines.draw import draw
from tilework.pipelines.family import Family
from tilework.pipelines.loading import quiet
from tilework.pipelines.model_index import ADAPTERS
from tilework.pipelines.numerics import pin_numerics
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from zoo import requests
from zoo.model import ZooModel

_STOCK, _GENERIC, _HAND = "stock call", "generic family", "family by hand"


@dataclass(frozen=True, slots=True, kw_only=True)
class StockCalls:
    """`pairs` pictures per model and side, of `steps` steps; of tiny models `tiny_pairs`, of few and of many steps.

    The goals are those of `models`; `others` are there for the families by hand.
    """

    models: tuple[str, ...] = ("qwen-image", "wan21", "sdxl")
    others: tuple[str, ...] = ("flux-dev", "sd3")
    pairs: int = 20
    steps: int = 8
    tiny_pairs: int = 30
    tiny_steps: tuple[int, int] = (5, 45)
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> StockCalls:
        return cls(pairs=2, steps=2, tiny_pairs=4, tiny_steps=(2, 10)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        pin_numerics(threads=1)
        quiet()
        whole, host = dict[str, _Sides](), dict[str, tuple[_Sides, _Sides]]()
        for name in (*self.models, *self.others):
            note(f"{name}, {self.pairs} pictures a side")
            whole[name] = _measure(stock_models.large(name, self.steps), self.pairs, self.seed)
            note(f"{name}, tiny, {self.tiny_pairs} pictures a side")
            few, many = (
                _measure(stock_models.tiny(name, steps), self.tiny_pairs, self.seed) for steps in self.tiny_steps
            )
            host[name] = few, many
        checks = [
            Check(what=f"{name}: generic family / stock call", measured=self._ratio(whole[name], _GENERIC), high=1.03)
            for name in self.models
        ]
        checks += [
            Check(
                what=f"{name}: host time of a step beyond the stock call",
                measured=self._of_step(host[name], _GENERIC),
                high=0.3,
                unit="ms",
            )
            for name in self.models
        ]
        return Finding(
            checks=tuple(checks),
            method=(
                "The stock call: `pipeline(...)` with a generator, PIL pictures, in a loop. A family: encode, begin, "
                "each step, finish, decode and the bytes of the picture, one after another, as a worker runs them.",
                "All sides in one process, each with an instance of its own of the same random weights, one thread, "
                "float32; the sides take turns with the same seeds, and the one that goes first changes. Times are the "
                "thread's CPU time: it does all of it and waits for nothing, and what else runs is not counted.",
                "A ratio is the median over pairs of pictures. Host times are differences between a family and the "
                f"stock call with tiny denoisers (noise of large ones would hide them): of pictures of "
                f"{self.tiny_steps[1]} steps less those of pictures of {self.tiny_steps[0]}, over the steps between; "
                "and what is left of a picture without its steps.",
                "Every picture of a family is compared with the stock call's: all are equal, bit for bit.",
            ),
            tables=(self._table(whole, host),),
        )

    def _ratio(self, sides: _Sides, side: str) -> Interval:
        return bootstrap([ours / stock for ours, stock in zip(sides[side], sides[_STOCK], strict=True)], self.seed)

    def _of_step(self, host: tuple[_Sides, _Sides], side: str) -> Interval:
        """Milliseconds of a step beyond the stock call."""
        few, many = (_beyond_ms(sides, side) for sides in host)
        more = self.tiny_steps[1] - self.tiny_steps[0]
        return bootstrap([(after - before) / more for before, after in zip(few, many, strict=True)], self.seed)

    def _of_picture(self, host: tuple[_Sides, _Sides], side: str) -> Interval:
        """Milliseconds of a picture beyond the stock call, without its steps."""
        steps_ms = self.tiny_steps[0] * self._of_step(host, side).value
        return bootstrap([one - steps_ms for one in _beyond_ms(host[0], side)], self.seed)

    def _table(self, whole: Mapping[str, _Sides], host: Mapping[str, tuple[_Sides, _Sides]]) -> Table:
        rows = []
        for name, sides in whole.items():
            step_ms = median(sides[_STOCK]) / self.steps * 1e3
            for side in sides:
                if side != _STOCK:
                    ratio = _shown(self._ratio(sides, side), 3)
                    beyond = (_shown(of(host[name], side), 2) for of in (self._of_step, self._of_picture))
                    rows.append((name, side, f"{step_ms:.0f}", ratio, *beyond))
        return Table(
            title="Families against the stock call",
            columns=(
                "model",
                "family",
                "stock, ms per step",
                "ratio",
                "host, ms per step",
                "host, ms per picture",
            ),
            rows=tuple(rows),
        )


_Sides = dict[str, list[float]]
"""CPU seconds of each picture by side."""


def _beyond_ms(sides: _Sides, side: str) -> list[float]:
    return [(ours - stock) * 1e3 for ours, stock in zip(sides[side], sides[_STOCK], strict=True)]


def _measure(model: ZooModel, pairs: int, seed: int) -> _Sides:
    drawers = _drawers(model)
    times: _Sides = {side: [] for side in drawers}
    for one in drawers.values():  # Warmed up.
        one(seed)
    for index in range(pairs):
        order = list(drawers)[:: 1 if index % 2 == 0 else -1]
        pictures = {}
        for side in order:
            start_s = time.thread_time()
            pictures[side] = drawers[side](seed + index)
            times[side].append(time.thread_time() - start_s)
        assert all(np.array_equal(picture, pictures[_STOCK]) for picture in pictures.values()), model.name
    return times


def _drawers(model: ZooModel) -> dict[str, Callable[[int], np.ndarray[Any, Any]]]:
    """By side, what draws the picture of a seed. Each has a pipeline of its own."""
    stock = stock_models.pipeline(model)
    families: dict[str, Family] = {_GENERIC: StockPipeline(stock_models.pipeline(model), model.name, {}, "")}
    if model.class_name in ADAPTERS:
        by_hand = pkgutil.resolve_name(ADAPTERS[model.class_name])
        families[_HAND] = by_hand(stock_models.pipeline(model), model.name, {}, "")
    spec = requests.spec_of(model, families[_GENERIC], seed=0)

    def of(family: Family) -> Callable[[int], np.ndarray[Any, Any]]:
        return lambda seed: _pixels(family, replace(spec, seed=seed))

    drawn = {_STOCK: lambda seed: requests.stock_pixels(model, stock, seed)}
    return drawn | {side: of(family) for side, family in families.items()}


def _pixels(family: Family, spec: Spec) -> np.ndarray[Any, Any]:
    return np.frombuffer(draw(family, spec).pixels, np.uint8)


def _shown(interval: Interval, digits: int) -> str:
    value, low, high = (f"{number:.{digits}f}" for number in (interval.value, interval.low, interval.high))
    return f"{value} ({low} to {high})"
