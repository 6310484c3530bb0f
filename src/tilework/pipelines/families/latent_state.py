"""The state of a request between two steps, for families that call the denoiser and the sampler themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilework.core.cache import CacheUse
from tilework.core.packing import Reuse
from tilework.core.wire.spec import Spec
from tilework.pipelines.caching.steps import StepCache


@dataclass(frozen=True, slots=True, eq=False)
class Conditioning:
    """The inputs of the denoiser that depend on text and size only, by name. They are never modified.

    With guidance on, the negative half comes first along the batch dimension, as in the stock pipelines.
    """

    tensors: Mapping[str, Tensor]


@dataclass(slots=True, kw_only=True, eq=False)
class LatentState:
    """A `StepState`: the mutable latents, sampler and generator, and the conditioning.

    `generator` drew the initial latents and draws what a stochastic sampler needs; it lives on the CPU unless the
    request names another device.

    The stock loop iterates over `sampler.timesteps`, once per forward. A step is `sampler.order` iterations; the last
    step takes the rest. `num_steps` are those of its `stage`. `reuse` is what its passes keep, by blocks or of whole
    steps; None if the request asks for no cache. A text says why it has none.
    """

    spec: Spec
    stage: str
    num_steps: int
    conditioning: Conditioning
    latents: Tensor
    sampler: Any
    generator: torch.Generator
    iteration_index: int = 0
    is_torn: bool = False
    reuse: Reuse | StepCache | str | None = None

    @property
    def steps_done(self) -> int:
        """See `StepState`."""
        return self._steps_after(self.iteration_index)

    @property
    def ends_step(self) -> bool:
        """True if a step is done with the next iteration."""
        return self._steps_after(self.iteration_index + 1) > self.steps_done

    @property
    def timestep(self) -> Tensor:
        """Time of the next iteration, without dimensions."""
        timestep: Tensor = self.sampler.timesteps[self.iteration_index]
        return timestep

    def take_cache_use(self) -> CacheUse | None:
        """See `StepState`."""
        if self.reuse is None or isinstance(self.reuse, str):
            return None if self.reuse is None else CacheUse(off=self.reuse)
        use, self.reuse.use = self.reuse.use, CacheUse()
        return use

    def _steps_after(self, num_iterations: int) -> int:
        if num_iterations == len(self.sampler.timesteps):
            return self.num_steps
        order: int = self.sampler.order
        return min(num_iterations // order, self.num_steps - 1)
