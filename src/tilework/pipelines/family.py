"""The contract between a worker and a model family: one request, split into stages and steps.

A family computes exactly what the stock pipeline computes, bit for bit, on one device and dtype; it only returns
between the parts. It knows requests as `Spec`, never as jobs.

Stages write named values: tensors, numbers, texts, and lists, tuples and dicts of them. Values are never modified.
`serialization` makes bytes of them. States between steps are the family's own: a worker passes them back to the family
that made them.
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
"""Name of a value that stays in the worker that made it: data that a family keeps of a request between two stages.

It is never written, so a request that comes from elsewhere lacks it.
"""


ANY_SEED = "any_seed"
"""Name of a value that is True if a stage's outputs are the same for any other seed. It is never written."""


class StepState(Protocol):
    """A request between two steps of a stage, as its family keeps it. A worker reads no more of it than this.

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
        """Number of steps of the stage."""

    @property
    def steps_done(self) -> int:
        """Number of whole steps done; `num_steps` if and only if no iteration is left."""

    @property
    def is_torn(self) -> bool:
        """True if an error interrupted it where it cannot continue: it cannot be used any more."""

    def take_cache_use(self) -> CacheUse | None:
        """Return what its cache did since the last call; None if it asks for none."""


Watch = Callable[[StepState, Callable[[], Image]], None]
"""Gets a state whose step is about to end, and a function that draws a preview of the state after the step."""


class Family(Protocol):
    """One loaded model. Methods raise whatever the model raises; none keeps a reference to a request."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Modules with weights, by the names of the stages' components."""

    @property
    def loras(self) -> Loras | None:
        """LoRAs on its device, and those in use; None if it can have none."""

    @property
    def parallel(self) -> Parallel:
        """Group in which steps are made: `join` one before `step`, and leave it here afterwards.

        To `run` a stage in a group, join it here, without guidance.
        """

    def join(self, comm: Comm, spec: Spec) -> None:
        """Share the steps of this request with a group from now on; all else is the same at any degree."""

    def run(self, stage: str, specs: Sequence[Spec], values: Sequence[Values], sliced: bool = False) -> list[Values]:
        """Return the outputs of a stage without steps for each request; its `values` have at least the inputs.

        In a group every rank gives the same request and gets the same outputs. `sliced` takes less memory and more
        time; results differ by rounding.
        """

    def begin(self, stage: str, spec: Spec, values: Values) -> StepState:
        """Return the state of a stage with steps before the first: initial latents, by `spec.seed`, and a sampler."""

    def step(self, states: Sequence[Any], pack: Pack | None = None, watch: Watch | None = None) -> None:
        """Make one step of each state, in any mix of shapes and times.

        With `pack` states share a forward pass as far as they can: at degree 1, with texts of equal length, and if the
        sides of the images suit the model's layers, or are equal. Results then differ by rounding; a state that shares
        with no other has the same result. Without `pack` each state has its own forward pass.

        In a group every rank gives the same states and gets the same results. A family that draws previews passes each
        state to `watch`; a preview has the size of `core.preview.preview_shape`, shows the clean image that the model
        predicts, and changes no state. In a group, a rank may draw one without the others.

        Raises:
            GroupBroken: a member of the group is lost. As after any error, states that are not torn can go on.
        """

    def finish(self, state: Any) -> Values:
        """Return the outputs of a stage that has made all its steps."""

    def image(self, spec: Spec, values: Values) -> Image:
        """Return the outputs of the last stage as pixels."""

    def file(self, spec: Spec, values: Values) -> File:
        """Return the outputs of the last stage as a file, for a request with a format of videos."""

    def export(self, state: Any) -> Values:
        """Return what `restore` needs besides spec and values to make this state."""

    def restore(self, stage: str, spec: Spec, values: Values, exported: Values) -> StepState:
        """Undo `export`, on this family's device."""
