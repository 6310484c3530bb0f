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
    rounds: int = 12
    guidance_scale: float = 5.0

    @classmethod
    def make(cls, quick: bool) -> MixedSteps:
        if not on_gpu():
            return cls(device="cpu", dtype="float32", model=TOY.model, mixes=_TOY_MIXES, rounds=2)
        return cls(device="cuda", dtype="bfloat16", model="SDXL", mixes=_MIXES[: 2 if quick else None])

    def measure(self, note: Note) -> Finding:
        pin_numerics(threads=1)
        quiet()
        family = load(ModelSource(path=folder_of(self.model, note), device=self.device, dtype=self.dtype))
        note(f"{self.model} is loaded")
        checks, rows = [], []
        for mix in self.mixes:
            alone_s, together_s = self._mix(family, mix.sides)
            ratios = [alone / together for alone, together in zip(alone_s, together_s, strict=True)]
            name = " + ".join(map(str, mix.sides))
            note(f"{name}: {median(ratios):.2f}")
            if mix.goal is not None:
                what = f"{self.model}, {name} px: one by one / together"
                checks.append(Check(what=what, measured=extremes(ratios), low=mix.goal))
            times = (f"{1e3 * median(alone_s):.1f}", f"{1e3 * median(together_s):.1f}")
            rows.append((name, *times, f"{median(ratios):.2f}"))
        return Finding(
            checks=tuple(checks),
            method=(
                "One process, the same family for both ways, which take turns: a step of each picture one after "
                "another, each guided (two rows), and one step of all of them in one forward pass. Times until the "
                "device is done. The interval is that of all rounds.",
                "Random weights of real size (`tilework fake`).",
            ),
            tables=(
                Table(
                    title="Time of a step of all, in ms (median)",
                    columns=("sides, px", "one by one", "together", "ratio"),
                    rows=tuple(rows),
                ),
            ),
        )

    def _mix(self, family: Family, sides: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds of a step of all, one by one and together, by round."""
        alone_s, together_s = [], []
        steps = self.rounds + 3
        alone, together = ([self._begin(family, side, steps) for side in sides] for _ in range(2))
        for index in range(2 + self.rounds):
            one_by_one = partial(_step_each, family, alone)
            at_once = partial(family.step, together, pack)
            times = {way: self._seconds(way) for way in ((one_by_one, at_once) if index % 2 else (at_once, one_by_one))}
            if index >= 2:
                alone_s.append(times[one_by_one])
                together_s.append(times[at_once])
        return alone_s, together_s

    def _begin(self, family: Family, side: int, steps: int) -> Any:
        spec = Spec(
            prompt="a red fox",
            negative_prompt="",
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
