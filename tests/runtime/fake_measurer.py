"""A model that is measured without workers, and its measurements."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from builders import PROFILE_KEY
from stages import DECODE
from tilework.core.component import LoadSource
from tilework.core.cost_row import Batch, CostRow
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.lora import UsedLora
from tilework.core.model import ModelInfo
from tilework.core.request import Shape
from tilework.cost.profile import ProfileKey
from tilework.runtime.executor import CannotRun
from tilework.runtime.models.costs import (
    calibration_shapes,
)

INFO = ModelInfo(
    name="toy",
    family="none",
    side_multiple=16,
    max_side=192,
    default_height=128,
    default_width=128,
    default_steps=4,
    default_guidance_scale=1.5,
    parameters=1,
    library="torch 2",
    max_degree=4,
    stages=tuple(replace(one, batchable=False) for one in latent_diffusion("").specs),
)
PACKING = replace(INFO, stages=latent_diffusion("").specs)
SMALL, LARGE = Shape(64, 64), Shape(128, 128)

KEY = PROFILE_KEY
SHAPES = calibration_shapes(INFO)
SLOWER = 1.5  # A step with a LoRA.


class FakeMeasurer:
    """Two groups; a step takes as many seconds as 1000 pixels divided by the degree, and decode twice as many."""

    too_large: Set[Shape] = frozenset()
    slow = 1.0  # As many times as long.

    def __init__(self, *, key: ProfileKey = KEY, info: ModelInfo | None = None) -> None:
        self.profile_key = key
        self.info = info or INFO
        self.asked: list[tuple[Batch, int, int | None]] = []
        self.known: list[frozenset[str]] = []

    def _timed(self, batch: Batch, degree: int) -> list[str]:
        return [one.name for one in self.info.stages if one.takes(batch) and (degree == 1 or one.degrees is None)]

    async def calibrate(
        self,
        batches: tuple[Batch, ...],
        degree: int = 1,
        num_runs: int | None = None,
        loras: tuple[UsedLora, ...] = (),
        known: frozenset[str] = frozenset(),
    ) -> tuple[CostRow, ...]:
        self.known.append(known)
        self.asked += [(batch, degree, num_runs) for batch in batches]
        if batches and all(self.too_large & set(batch) for batch in batches):
            raise CannotRun(f"{batches[0][0]} cannot run here (MemoryError: no memory)")
        return tuple(
            CostRow.of(
                batch,
                pipeline=self.info.name,
                stage=stage,
                degree=degree,
                seconds=pixels / 1e6 / degree * (2 if stage == DECODE else 1) + group * 0.0002,
                p99_seconds=pixels / 1e6 / degree * (2 if stage == DECODE else 1) + 0.001,
                num_runs=5 if num_runs is None else num_runs,
            )
            for group in range(2)
            for batch in batches
            for pixels in [self.slow * sum(shape.pixels for shape in batch)]
            if not self.too_large & set(batch)
            for stage in self._timed(batch, degree)
            if stage not in known
        )


@dataclass
class FakeExecutor:
    """Measures by a `FakeMeasurer` for each model, of which the `broken` ones run at no size.

    `tried` are those that were only warmed up.
    """

    measured: list[str] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    broken: frozenset[str] = frozenset()
    timed: list[tuple[str, str]] = field(default_factory=list)
    weights_bytes: int | None = None
    num_devices: int = 1
    serving: dict[str, tuple[int, ...]] = field(default_factory=dict)
    slow: float = 1.0
    now_s: float = 0.0

    def profile_key(self, model: str) -> ProfileKey:
        return replace(KEY, architecture=model)

    def measurer(self, info: ModelInfo) -> FakeMeasurer:
        measurer = FakeMeasurer(info=info)
        measurer.too_large = set(SHAPES) if info.name in self.broken else set()
        measurer.slow = self.slow
        return measurer

    async def calibrate(
        self,
        model: str,
        batches: Any,
        degree: int = 1,
        num_runs: int | None = None,
        loras: Sequence[Any] = (),
        known: frozenset[str] = frozenset(),
    ) -> tuple[CostRow, ...]:
        (self.tried if num_runs == 0 else self.measured).append(model)
        self.now_s += num_runs != 0  # A clock: what is measured takes a second.
        measurer = self.measurer(replace(INFO, name=model))
        rows = await measurer.calibrate(batches, degree, num_runs, known=known)
        self.timed += [(model, row.stage) for row in rows]
        return tuple(replace(row, seconds=row.seconds * SLOWER, p99_seconds=None) for row in rows) if loras else rows

    async def end_calibration(self) -> dict[LoadSource, float]:
        return {LoadSource.DISK: 1e9}
