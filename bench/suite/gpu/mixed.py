"""Steps of requests of several sizes in one forward pass, against one by one, on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from suite.case import Check, Finding, Note, Table
from suite.gpu.models import TOY, folder_of, on_gpu
from suite.stats import extremes, median
from tilework.core.model import ModelSource
from tilework.core.wire.spec import Spec
from tilework.patches.layout import pack
from tilework.pipelines.cuda.graphs import CudaRecorder, StepGraphs, record_steps
from tilework.pipelines.draw import begin_steps
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load, quiet
from tilework.pipelines.numerics import pin_numerics


@dataclass(frozen=True, slots=True)
class Mix:
    """The sides of square pictures; `goal` is the least ratio of one by one over together, if there is one."""

    sides: tuple[int, ...]
    goal: float | None = None


_MIXES = (
    Mix((512, 768, 1024), 1.7),
    Mix((256, 512), 2.0),
    Mix((256,) * 4 + (512,) * 2, 2.0),
    Mix((512,) * 4),
    Mix((512,) * 8),
    Mix((768,) * 2),
    Mix((1024,) * 2),
)
_TOY_MIXES = (Mix((64, 96, 128)), Mix((64, 64)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSteps:
    """`rounds` steps of each mix of square pictures, guided, in either way, after two to warm up."""

    device: str
    dtype: str
    model: str
    mixes: tuple[Mix, ...]
    rounds: int = 8
    guidance_scale: float = 5.0

    @classmethod
    def make(cls, quick: bool) -> MixedSteps:
        if not on_gpu():
            return cls(device="cpu", dtype="float32", model=TOY.model, mixes=_TOY_MIXES, rounds=2)
        return cls(device="cuda", dtype="bfloat16", model="SDXL", mixes=_MIXES[: 2 if quick else None])

    def measure(self, note: Note) -> Finding:
        pin_numerics(threads=1)
        quiet()
        source = ModelSource(path=folder_of(self.model, note), device=self.device, dtype=self.dtype)
        family = load(source)
        switch = _Switch(record_steps(family, CudaRecorder()) if self.device == "cuda" else ())
        note(f"{self.model} is loaded")
        checks, rows = [], []
        for mix in self.mixes:
            times = self._mix(family, switch, mix.sides)
            name = " + ".join(map(str, mix.sides))
            ratios = [
                eager / together for eager, together in zip(times["one by one, eager"], times[_BEST], strict=True)
            ]
            note(f"{name}: {median(ratios):.2f}")
            if mix.goal is not None:
                what = f"{self.model}, {name} px: one by one eager / together"
                checks.append(Check(what=what, measured=extremes(ratios), low=mix.goal))
            rows.append((name, *(f"{1e3 * median(times[way]):.1f}" for way in _WAYS), f"{median(ratios):.2f}"))
        return Finding(
            checks=tuple(checks),
            method=(
                "One process, the same family for all ways, which take turns: a step of each picture one after "
                "another, each guided (two rows), and one step of all of them in one forward pass; eager, as the "
                "stock pipeline runs, and recorded as CUDA graphs. Times until the device is done. The interval is "
                "that of all rounds.",
                "Random weights of real size (`tilework fake`).",
            ),
            tables=(
                Table(
                    title="Time of a step of all, in ms (median)",
                    columns=("sides, px", *_WAYS, "first / last"),
                    rows=tuple(rows),
                ),
            ),
        )

    def _mix(self, family: Family, switch: _Switch, sides: Sequence[int]) -> dict[str, list[float]]:
        """Seconds of a step of all by way and round."""
        steps = 2 * self.rounds + 8
        alone, together = ([self._begin(family, side, steps) for side in sides] for _ in range(2))
        passes = {"one by one": partial(_step_each, family, alone), "together": partial(family.step, together, pack)}
        ways = {f"{name}{mark}": (is_off, call) for name, call in passes.items() for mark, is_off in _MARKS.items()}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for index in range(2 + self.rounds):
            for way in list(ways)[:: 1 if index % 2 else -1]:
                switch.is_off, call = ways[way]
                seconds = self._seconds(call)
                if index >= 2:
                    times[way].append(seconds)
        return times

    def _begin(self, family: Family, side: int, steps: int) -> Any:
        spec = Spec(
            prompt="a red fox",
            height=side,
            width=side,
            steps=steps,
            guidance_scale=self.guidance_scale,
            seed=1,
        )
        return begin_steps(family, spec)

    def _seconds(self, way: Callable[[], object]) -> float:
        self._finish()
        start_s = time.perf_counter()
        way()
        self._finish()
        return time.perf_counter() - start_s

    def _finish(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _step_each(family: Family, states: Sequence[Any]) -> None:
    for state in states:
        family.step([state])


_MARKS = {", eager": True, "": False}
_BEST = "together"
_WAYS = ("one by one, eager", "together, eager", "one by one", _BEST)


class _Switch:
    """Switches graphs off."""

    def __init__(self, graphs: Sequence[StepGraphs]) -> None:
        self.is_off = False
        for one in graphs:
            one.is_off = partial(self._asks, one.is_off)

    def _asks(self, usual: Callable[[], bool]) -> bool:
        return self.is_off or usual()
