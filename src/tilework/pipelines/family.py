"""The contract between a worker and a model family: one request, split into stages and steps.

A family computes exactly what the stock pipeline computes, bit for bit, on one device and dtype; it only returns
between the parts. It knows requests as `Spec`, never as jobs.

What stages write are named values: tensors, numbers, texts, and lists, tuples and dicts of them. They are never
modified. `serialization` makes bytes of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tilework.core.model import ModelInfo
from tilework.core.packing import Pack
from tilework.core.wire import Image, Spec
from tilework.pipelines.parallel import Parallel

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Conditioning:
    """The inputs of the denoiser that depend on text and size only, by name. They are never modified.

    With guidance on, the negative half comes first along the batch dimension, as in the stock pipelines.
    """

    tensors: Mapping[str, Tensor]


@dataclass(slots=True, kw_only=True, eq=False)
class StepState:
    """A request between its steps: the mutable latents, sampler and generator, and the conditioning.

    `generator` drew the initial latents and draws what a stochastic sampler needs; it lives on the CPU unless the
    request names another device.

    The stock loop iterates over `sampler.timesteps`, once per forward. A *step*, which is what requests and works
    count, is `sampler.order` iterations, as on the stock progress bar: a Heun step is two, its last one is one. The
    last step takes what remains. Rejected: counting iterations, since a request of 28 steps would then be a job of 55
    whose number only a loaded model knows. `num_steps` are those of its
    `stage`.
    """

    spec: Spec
    stage: str
    num_steps: int
    conditioning: Conditioning
    latents: Tensor
    sampler: Any
    generator: torch.Generator
    iteration_index: int = 0

    @property
    def steps_done(self) -> int:
        """Whole steps done; `num_steps` if and only if no iteration is left."""
        return self._steps_after(self.iteration_index)

    @property
    def steps_done_next(self) -> int:
        """`steps_done` after the next iteration."""
        return self._steps_after(self.iteration_index + 1)

    @property
    def timestep(self) -> Tensor:
        """Time of the next iteration, without dimensions."""
        timestep: Tensor = self.sampler.timesteps[self.iteration_index]
        return timestep

    def _steps_after(self, num_iterations: int) -> int:
        if num_iterations == len(self.sampler.timesteps):
            return self.num_steps
        order: int = self.sampler.order
        return min(num_iterations // order, self.num_steps - 1)


class Family(Protocol):
    """One loaded model. Methods raise whatever the model raises; none keeps a reference to a request."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def parallel(self) -> Parallel:
        """Join a group here before `predict`, and leave it afterwards; all else is the same at any degree."""

    def run(self, stage: str, specs: Sequence[Spec], values: Sequence[Values], sliced: bool = False) -> list[Values]:
        """The outputs of a stage without steps for each request, whose `values` hold at least its inputs.

        `sliced` takes less memory and more time; results differ by rounding.
        """

    def begin(self, stage: str, spec: Spec, values: Values) -> StepState:
        """The state of a stage with steps before the first: initial latents, by `spec.seed`, and a sampler."""

    def predict(self, states: Sequence[StepState], pack: Pack | None = None) -> list[Tensor]:
        """The guided prediction for the next iteration of each state, in order; any mix of shapes and times.

        With `pack` states share a forward pass as far as they can: at degree 1, with texts of equal length, and where
        the sides of the pictures suit the model's layers, or equal each other. Predictions then differ by rounding,
        and for a state that shares with none, by nothing. Without `pack` each state has a forward pass of its own.

        In a group every rank gives the same states and gets the same predictions. Changes no state.

        Raises:
            GroupBroken: a member of the group is lost; the states are unchanged.
        """

    def advance(self, state: StepState, prediction: Tensor) -> None:
        """Take the iteration that `prediction` is for."""

    def preview(self, state: StepState, prediction: Tensor) -> Image:
        """A preview of the picture in the size of `core.preview.preview_shape`.

        It is the clean image that the model believes in by `prediction`, the one for the state's next iteration; ask
        before `advance`. Changes no state; in a group, a rank's own affair.
        """

    def finish(self, state: StepState) -> Values:
        """The outputs of a stage that has made all its steps."""

    def image(self, spec: Spec, values: Values) -> Image:
        """The outputs of the last stage as pixels."""

    def export(self, state: StepState) -> Values:
        """The mutable part of a state between two steps: all that `restore` needs besides spec and values."""

    def restore(self, stage: str, spec: Spec, values: Values, exported: Values) -> StepState:
        """Undo `export`, on this family's device."""
