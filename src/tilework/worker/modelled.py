"""A family without a model: each stage and step takes as long as a cost table says, and computes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from tilework.core.request import Shape
from tilework.core.time import NS_PER_S
from tilework.core.wire import Image, ModelInfo, ModelledSource, Spec
from tilework.core.work import DECODE, DIFFUSE, ENCODE, StageId
from tilework.cost.table import CostTable, TableCosts
from tilework.pipelines import freight
from tilework.pipelines.family import Conditioning, StepState
from tilework.pipelines.parallel import Parallel

_SIDE_MULTIPLE = 16
_LATENT_CHANNELS, _PIXELS_PER_LATENT = 16, 8


class ModelledFamily:
    """A `Family` that sleeps. Groups, messages and parcels are real; states are as large as FLUX's in half precision.

    Within a work the steps follow the table's clock: what the worker does between two steps is hidden in the sleep, as
    it would be behind an accelerator. What it does between two works is not.
    """

    def __init__(self, source: ModelledSource) -> None:
        self._costs = TableCosts(CostTable(hardware=source.hardware, rows=source.rows))
        self._pipeline = source.pipeline
        self._parallel = _Clocked()
        rows = [row for row in source.rows if (row.pipeline, row.stage) == (source.pipeline, DIFFUSE)]
        shapes = sorted({Shape(row.height, row.width, row.frames) for row in rows}, key=lambda shape: shape.pixels)
        default = shapes[len(shapes) // 2]
        self._info = ModelInfo(
            name=source.pipeline,
            family="modelled",
            side_multiple=_SIDE_MULTIPLE,
            max_side=2 * max(max(shape.height, shape.width) for shape in shapes),
            default_height=default.height,
            default_width=default.width,
            default_steps=source.steps,
            default_guidance_scale=1.0,
            parameters=0,
            library=f"no model; times of {source.hardware}",
            two_passes=False,
            max_degree=max(row.degree for row in rows),
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def parallel(self) -> Parallel:
        return self._parallel

    def encode(self, spec: Spec) -> Conditioning:
        self._sleep(ENCODE, spec)
        return Conditioning({})

    def begin(self, spec: Spec, conditioning: Conditioning) -> StepState:
        side = _PIXELS_PER_LATENT
        latents = torch.zeros(_LATENT_CHANNELS, spec.height // side, spec.width // side, dtype=torch.bfloat16)
        sampler = SimpleNamespace(timesteps=range(spec.steps), order=1)
        generator = torch.Generator()
        return StepState(spec=spec, conditioning=conditioning, latents=latents, sampler=sampler, generator=generator)

    def predict(self, states: Sequence[StepState]) -> list[Tensor]:
        for state in states:
            due_ns = self._parallel.next_due_ns(self._run_ns(DIFFUSE, state.spec, self._parallel.degree))
            if self._parallel.degree > 1:  # The table's step time contains what the ranks say to each other.
                self._parallel.gather(torch.zeros(1, 1), None)
            time.sleep(max(0, due_ns - time.monotonic_ns()) / NS_PER_S)
        return [state.latents for state in states]

    def advance(self, state: StepState, prediction: Tensor) -> None:
        state.iteration_index += 1

    def decode(self, state: StepState) -> Image:
        """A picture of one colour, which the seed chooses."""
        spec = state.spec
        self._sleep(DECODE, spec)
        colour = bytes((64 + 37 * spec.seed * channel) % 256 for channel in (1, 3, 7))
        return Image(height=spec.height, width=spec.width, pixels=colour * (spec.height * spec.width))

    def export(self, state: StepState) -> freight.Freight:
        return freight.pack((state.latents, state.iteration_index))

    def restore(self, blob: freight.Freight, spec: Spec, conditioning: Conditioning) -> StepState:
        state = self.begin(spec, conditioning)
        state.latents, state.iteration_index = freight.unpack(blob, self.device)
        return state

    def export_conditioning(self, conditioning: Conditioning) -> freight.Freight:
        return freight.pack(dict(conditioning.tensors))

    def restore_conditioning(self, blob: freight.Freight) -> Conditioning:
        return Conditioning(freight.unpack(blob, self.device))

    def _run_ns(self, stage: str, spec: Spec, degree: int) -> int:
        return self._costs.run_ns(StageId(self._pipeline, stage), (spec.shape,), degree)

    def _sleep(self, stage: str, spec: Spec) -> None:
        time.sleep(self._run_ns(stage, spec, 1) / NS_PER_S)


class _Clocked(Parallel):
    """A `Parallel` that knows when the next step of the running work is due."""

    def leave(self) -> None:
        super().leave()
        self._due_ns: int | None = None

    def next_due_ns(self, run_ns: int) -> int:
        begin_ns = time.monotonic_ns() if self._due_ns is None else self._due_ns
        self._due_ns = begin_ns + run_ns
        return self._due_ns
