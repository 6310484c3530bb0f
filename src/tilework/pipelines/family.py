"""The contract between a worker and a model family: one request, split into stages and steps.

A family computes exactly what the stock pipeline computes, bit for bit, on one device and dtype; it only returns
between the parts. It knows requests as `Spec`, never as jobs.

What stages write are named values: tensors, numbers, texts, and lists, tuples and dicts of them. They are never
modified. `serialization` makes bytes of them. States between steps are the family's own: a worker gives back to a
family what that has made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from tilework.core.cache import CacheUse
from tilework.core.comm import Comm
from tilework.core.model import ModelInfo
from tilework.core.packing import Pack
from tilework.core.wire.spec import File, Image, Spec
from tilework.pipelines.lora import Loras
from tilework.pipelines.parallel import Parallel

Values = Mapping[str, Any]


LIVE = "live"
"""The name of a value that stays in the worker that made it: what a family keeps of a request between two stages.

It is never written, so a request that comes from elsewhere is without it.
"""


ANY_SEED = "any_seed"
"""The name of a value that says whether a stage has written what it would for any other seed. It is never written."""


class StepState(Protocol):
    """A request between two steps of a stage, as its family keeps it. A worker reads no more than this of it.

    A *step* is what requests and works count, as on the stock progress bar. It may be several iterations of the stock
    loop: a Heun step is two, its last one is one. Rejected: counting iterations, since a request of 28 steps would then
    be a job of 55 whose number only a loaded model knows.
    """

    @property
    def spec(self) -> Spec: ...
    @property
    def stage(self) -> str: ...
    @property
    def num_steps(self) -> int:
        """The steps of the stage."""

    @property
    def steps_done(self) -> int:
        """Whole steps done; `num_steps` if and only if no iteration is left."""

    @property
    def is_torn(self) -> bool:
        """Whether an error interrupted it where it cannot go on: it is of no more use."""

    def take_cache_use(self) -> CacheUse | None:
        """What its cache did since this was asked last; None if it asks for none."""


Watch = Callable[[StepState, Callable[[], Image]], None]
"""Told of a state whose step is about to end, with a function that draws a preview of it as it will be then."""


class Family(Protocol):
    """One loaded model. Methods raise whatever the model raises; none keeps a reference to a request."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """What has weights, by the names of the stages' components."""

    @property
    def loras(self) -> Loras | None:
        """The LoRAs on its device, and those in use; None if it can have none."""

    @property
    def parallel(self) -> Parallel:
        """The group in which steps are made: `join` one before `step`, and leave it here afterwards.

        To `run` a stage in a group, join it here, without guidance.
        """

    def join(self, comm: Comm, spec: Spec) -> None:
        """Share the steps of this request with a group from now on; all else is the same at any degree."""

    def run(self, stage: str, specs: Sequence[Spec], values: Sequence[Values], sliced: bool = False) -> list[Values]:
        """The outputs of a stage without steps for each request, whose `values` hold at least its inputs.

        In a group every rank gives the same request and gets the same outputs. `sliced` takes less memory and more
        time; results differ by rounding.
        """

    def begin(self, stage: str, spec: Spec, values: Values) -> StepState:
        """The state of a stage with steps before the first: initial latents, by `spec.seed`, and a sampler."""

    def step(self, states: Sequence[Any], pack: Pack | None = None, watch: Watch | None = None) -> None:
        """Make one step of each state, in any mix of shapes and times.

        With `pack` states share a forward pass as far as they can: at degree 1, with texts of equal length, and where
        the sides of the pictures suit the model's layers, or equal each other. Results then differ by rounding,
        and for a state that shares with none, by nothing. Without `pack` each state has a forward pass of its own.

        In a group every rank gives the same states and gets the same results. A family that draws previews tells
        `watch` of each state; a preview has the size of `core.preview.preview_shape`, shows the clean image that the
        model believes in, and changes no state. In a group, drawing one is a rank's own affair.

        Raises:
            GroupBroken: a member of the group is lost. As after any error, states that are not torn can go on.
        """

    def finish(self, state: Any) -> Values:
        """The outputs of a stage that has made all its steps."""

    def image(self, spec: Spec, values: Values) -> Image:
        """The outputs of the last stage as pixels."""

    def file(self, spec: Spec, values: Values) -> File:
        """The outputs of the last stage as a file, for a request with a format of videos."""

    def export(self, state: Any) -> Values:
        """What `restore` needs besides spec and values to make this state."""

    def restore(self, stage: str, spec: Spec, values: Values, exported: Values) -> StepState:
        """Undo `export`, on this family's device."""
