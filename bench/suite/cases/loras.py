"""What a step costs with many LoRAs on the device, used and not, and what it costs to switch between two."""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from loras import save_lora
from suite import stock_models
from suite.case import Check, Finding, Note, Table
from suite.stats import Interval, bootstrap, median
from tilework.core.lora import UsedLora
from tilework.core.wire import Spec
from tilework.pipelines.draw import begin_steps
from tilework.pipelines.family import Family, StepState
from tilework.pipelines.loading import quiet
from tilework.pipelines.lora import LoadedLoras
from tilework.pipelines.model_index import ADAPTERS
from tilework.pipelines.numerics import pin_numerics
from zoo import requests
from zoo.model import ZooModel

_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
_NEVER, _UNUSED, _ALONE, _OF_MANY = "none there", "many there, none used", "one there and used", "many there, one used"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loras:
    """`rounds` steps a side, and `tiny_rounds` with a tiny model; `many` LoRAs of this `rank`; `switches` each way."""

    model: str = "flux-dev"
    many: int = 32
    rank: int = 16
    rounds: int = 60
    tiny_rounds: int = 300
    switches: int = 100
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Loras:
        return cls(many=4, rounds=6, tiny_rounds=20, switches=5) if quick else cls()

    def measure(self, note: Note) -> Finding:
        pin_numerics(threads=1)
        quiet()
        with TemporaryDirectory(prefix="tilework-bench-") as room:
            note(f"{self.model}, {self.rounds} steps a side")
            sides = self._sides(stock_models.large(self.model, self.rounds + 1), Path(room) / "large")
            whole = _steps(sides, self.rounds)
            switch = {
                "on and off, 1 there": self._switches(sides[_ALONE], ("0",), ()),
                f"on and off, {self.many} there": self._switches(sides[_OF_MANY], ("0",), ()),
                f"between two, {self.many} there": self._switches(sides[_OF_MANY], ("0",), ("1",)),
            }
            note(f"{self.model}, tiny, {self.tiny_rounds} steps a side")
            host = _steps(
                self._sides(stock_models.tiny(self.model, self.tiny_rounds + 1), Path(room) / "tiny"), self.tiny_rounds
            )
        step_s = median(whole[_NEVER])
        most = switch[f"between two, {self.many} there"]
        return Finding(
            checks=(
                Check(what=f"{_UNUSED} / {_NEVER}", measured=self._ratio(whole, _UNUSED, _NEVER), high=1.01),
                Check(what=f"{_OF_MANY} / {_ALONE}", measured=self._ratio(whole, _OF_MANY, _ALONE), high=1.03),
                Check(
                    what=f"a switch between two of {self.many}",
                    measured=bootstrap([100 * one / step_s for one in most], self.seed),
                    high=1,
                    unit="% of a step",
                ),
            ),
            method=(
                f"`{self.model}` of tests/zoo with larger layers, 256 px, float32, one thread: a step takes "
                f"{step_s * 1e3:.0f} ms. LoRAs of rank {self.rank} in attention and feed-forward layers.",
                "One process, a pipeline of its own for each side, with equal weights; the sides take turns, step by "
                "step, and the order changes. Times are the thread's CPU time. Ratios are medians over rounds.",
                "Host times are differences with a tiny model, whose layers take almost no time.",
            ),
            tables=(self._sides_table(whole, host), self._switch_table(switch)),
        )

    def _sides(self, model: ZooModel, room: Path) -> dict[str, _Side]:
        files = [
            save_lora(stock_models.pipeline(model), room / f"{index}.safetensors", index, _TARGETS, rank=self.rank)
            for index in range(self.many)
        ]
        used = (UsedLora("0", 1.0),)
        return {
            _NEVER: _side(model, ()),
            _UNUSED: _side(model, files),
            _ALONE: _side(model, files[:1], used),
            _OF_MANY: _side(model, files, used),
        }

    def _switches(self, side: _Side, *uses: Sequence[str]) -> list[float]:
        """Seconds of each switch."""
        found = []
        for index in range(2 * self.switches):
            used = [UsedLora(name, 1.0) for name in uses[index % 2]]
            start_s = time.perf_counter()
            side.loras.use(used)
            found.append(time.perf_counter() - start_s)
        return found[2:]

    def _ratio(self, times: _Times, side: str, other: str) -> Interval:
        return bootstrap([one / two for one, two in zip(times[side], times[other], strict=True)], self.seed)

    def _beyond_ms(self, times: _Times, side: str, other: str) -> Interval:
        pairs = zip(times[side], times[other], strict=True)
        return bootstrap([(one - two) * 1e3 for one, two in pairs], self.seed)

    def _sides_table(self, whole: _Times, host: _Times) -> Table:
        rows = [
            (
                f"{side}, against {other}",
                f"{median(whole[side]) * 1e3:.1f}",
                _shown(self._ratio(whole, side, other), 3),
                _shown(self._beyond_ms(host, side, other), 2),
            )
            for side, other in ((_UNUSED, _NEVER), (_ALONE, _NEVER), (_OF_MANY, _ALONE))
        ]
        return Table(title="Steps", columns=("sides", "ms per step", "ratio", "host, ms per step"), rows=tuple(rows))

    def _switch_table(self, switch: dict[str, list[float]]) -> Table:
        rows = [(name, _shown(bootstrap([1e3 * one for one in times], self.seed), 3)) for name, times in switch.items()]
        return Table(title="Switches", columns=("LoRAs", "ms"), rows=tuple(rows))


_Times = dict[str, list[float]]
"""Seconds of each step by side."""


@dataclass(slots=True)
class _Side:
    family: Family
    loras: LoadedLoras
    spec: Spec
    state: StepState | None = None


def _side(model: ZooModel, files: Sequence[Path], used: Sequence[UsedLora] = ()) -> _Side:
    by_hand: Callable[..., Any] = pkgutil.resolve_name(ADAPTERS[model.class_name])
    family: Family = by_hand(stock_models.pipeline(model), model.name, {}, "")
    assert family.loras is not None
    for index, file in enumerate(files):
        family.loras.add(str(index), file)
    family.loras.use(used)
    return _Side(family, family.loras, requests.spec_of(model, family, seed=0))


def _steps(sides: dict[str, _Side], rounds: int) -> _Times:
    times: _Times = {name: [] for name in sides}
    with torch.no_grad():
        for side in sides.values():
            side.state = begin_steps(side.family, side.spec)
            side.family.step([side.state])  # Warmed up.
        for index in range(rounds):
            for name in list(sides)[:: 1 if index % 2 == 0 else -1]:
                start_s = time.thread_time()
                sides[name].family.step([sides[name].state])
                times[name].append(time.thread_time() - start_s)
    return times


def _shown(interval: Interval, digits: int) -> str:
    value, low, high = (f"{number:.{digits}f}" for number in (interval.value, interval.low, interval.high))
    return f"{value} ({low} to {high})"
