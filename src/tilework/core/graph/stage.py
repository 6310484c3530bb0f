"""The stages of a pipeline: what each reads and writes, and how it may be run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from tilework.core.cache import CacheChoice
from tilework.core.lora import UsedLora

if TYPE_CHECKING:
    from tilework.core.request import Shape


class DeviceKind(StrEnum):
    """Type of device that runs a stage. A *CPU slot* is a process of a node for stages that need no accelerator."""

    ACCELERATOR = "accelerator"
    CPU = "cpu"


class ResultKind(StrEnum):
    """Kind of result that a request asks for: the pixels of its frames, or a file with a video of them."""

    PIXELS = "pixels"
    VIDEO = "video"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """The steps of a request that a stage makes: those from the share `first` to the share `last`, or always `count`.

    Shares that follow each other, such as 0 to 0.8 and 0.8 to 1, cover all steps of a request, each once, if each has
    one.
    """

    first: float = 0.0
    last: float = 1.0
    count: int | None = None

    def of(self, steps: int) -> int:
        """Return the number of a request's `steps` that this stage makes; at least one."""
        return max(1, round(self.last * steps) - round(self.first * steps)) if self.count is None else self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A stage's inputs, outputs and components, and how it may be run.

    Attributes:
        name: the name of the stage, which is unique in its graph.
        components: names of the weights that it needs.
        inputs: names of the values that it reads. Those that no stage writes come with the request.
        outputs: names of the values that it writes; no other stage writes them.
        steps: the steps of a request that it makes; None for a stage that runs at once.
        degrees: the numbers of devices that may share it for one request; None: all that were profiled.
        batchable: True if several requests may share its forward passes.
        one_shape: True if those that share must have one size and number of frames.
        sliceable: True if it can run in slices, which takes less memory and more time.
        previews: the stage that draws previews between its steps; empty if there are none.
        memory_bytes: the least memory that a run needs on each device beyond the weights, as its author declares.
        device_kind: what runs it. A stage on a CPU slot has no steps, and one slot runs it for one request at a time.
        result: the kind of result that it makes; only requests for this kind pass through it. None: all requests do.
    """

    name: str
    components: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    steps: StepShare | None = None
    degrees: tuple[int, ...] | None = (1,)
    batchable: bool = False
    one_shape: bool = False
    sliceable: bool = False
    previews: str = ""
    memory_bytes: int = 0
    device_kind: DeviceKind = DeviceKind.ACCELERATOR
    result: ResultKind | None = None

    def takes(self, shapes: Sequence[Shape]) -> bool:
        """Return whether one run may be for outputs of these shapes together."""
        return len(shapes) == 1 or (self.batchable and not (self.one_shape and len(set(shapes)) > 1))


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """A stage of a pipeline, with the LoRAs and the cache that a request uses in it. `spec` says how it runs.

    `caches` holds that cache, or nothing. Stages are equal if pipeline, name, LoRAs and cache are: only requests whose
    stages are equal can share works.
    """

    pipeline: str
    name: str
    spec: StageSpec = field(compare=False, repr=False)
    loras: tuple[UsedLora, ...] = ()
    caches: tuple[CacheChoice, ...] = ()
    has_steps: bool = field(init=False, compare=False, repr=False)
    kind: DeviceKind = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_steps", self.spec.steps is not None)
        object.__setattr__(self, "kind", self.spec.device_kind)

    @property
    def is_parallel(self) -> bool:
        """True if several devices may share it."""
        return self.spec.degrees != (1,)

    def allows(self, degree: int) -> bool:
        """Return whether this number of devices may share it."""
        return self.spec.degrees is None or degree in self.spec.degrees

    def with_cache(self, cache: CacheChoice) -> Stage:
        """Return the stage with a cache. With one of whole steps it runs one request at a time on one device."""
        alone = replace(self.spec, batchable=False, degrees=(1,)) if cache.kind.is_of_steps else self.spec
        return replace(self, spec=alone, caches=(cache,))

    def __str__(self) -> str:
        loras = f"[{','.join(map(str, self.loras))}]" if self.loras else ""
        caches = f"{{{self.caches[0]}}}" if self.caches else ""
        return f"{self.pipeline}/{self.name}{loras}{caches}"
