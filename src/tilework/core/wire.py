"""Messages between the runtime and a worker process, both ways, through a local pipe (`comm.messages`).

A worker executes commands first in, first out; only `StopWork` and `BreakGroup` overtake.

A job's state travels as blobs: a worker serializes what a stage has written, named values, to a place that all workers
of the node can read, and names the blob in its report. A worker that needs it gets the name in a command.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pickle import PickleBuffer
from typing import SupportsIndex

from tilework.core.component import Component, num_bytes
from tilework.core.cost_row import Batch, CostRow
from tilework.core.graph.stage import ResultKind
from tilework.core.lora import Lora, UsedLora
from tilework.core.model import ArgumentValue, LoraSource, ModelInfo, ModelSource
from tilework.core.request import Shape
from tilework.core.work import Group


@dataclass(frozen=True, slots=True)
class Image:
    """Pixels of a picture: RGB, 8 bits, row by row. Those of a clip's `frames` follow each other.

    Where they are pickled beside the picture, not into it, they are not copied, and arrive as a memoryview. The type
    does not say so, since pydantic, which reads pictures from the journal, knows none.
    """

    height: int
    width: int
    pixels: bytes = field(repr=False)
    frames: int = 1

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[Image], tuple[int, int, object, int]]:
        pixels = PickleBuffer(self.pixels) if int(protocol) >= 5 else bytes(self.pixels)
        return Image, (self.height, self.width, pixels, self.frames)


@dataclass(frozen=True, slots=True)
class File:
    """A result as a file."""

    content: bytes = field(repr=False)
    media_type: str


class VideoCodec(StrEnum):
    """How the frames of a video are compressed. Its file is an MP4 in any case."""

    H264 = "h264"
    VP9 = "vp9"


@dataclass(frozen=True, slots=True)
class VideoFormat:
    """How a clip becomes a video: `fps` frames a second."""

    fps: float
    codec: VideoCodec = VideoCodec.H264


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The part of a request that a worker needs to draw it. The scheduler never sees prompts.

    After every `preview_every` denoising steps, but not after the last one, the client gets a preview; 0: never.
    Previews cost time and leave the picture unchanged. `arguments` are those of `ModelInfo.arguments` that the client
    gave, by name, and `pictures` those of `ModelInfo.pictures`. A clip has `frames`. `loras` are used in this order.

    With a `video` format the result is a file, else pixels.

    `steps` are made. `whole_steps` is what the stock call is told; None: the same number. It is larger where the
    denoising of a given picture begins in the middle (see `core.model.StrengthRule`).

    A worker refuses works that would run the steps of an `exact` one in a group or together with others, or slice its
    decode: see `core.request.Request`.

    The server has checked the values against `ModelInfo`.
    """

    prompt: str
    negative_prompt: str
    height: int
    width: int
    steps: int
    guidance_scale: float
    seed: int
    preview_every: int = 0
    exact: bool = False
    frames: int = 1
    whole_steps: int | None = None
    arguments: Mapping[str, ArgumentValue] = field(default_factory=dict, hash=False)
    pictures: Mapping[str, tuple[Image, ...]] = field(default_factory=dict, hash=False)
    loras: tuple[UsedLora, ...] = ()
    video: VideoFormat | None = None

    @property
    def shape(self) -> Shape:
        return Shape(self.height, self.width, self.frames)

    @property
    def result(self) -> ResultKind:
        return ResultKind.PIXELS if self.video is None else ResultKind.VIDEO


STATES_BYTES = 2 * 10**9
"""What a device keeps of the states of jobs that have no work there, unless it is told otherwise."""


WEIGHTS = "weights"
"""The directory, inside that of the blobs, of the weights that all CPU workers of a node share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The place of a worker: its device, the directory of `blobs`, and the directory where groups meet.

    `rendezvous` is empty where no groups are formed. With `loads_on_demand` a worker has no weights on its device until
    a command loads them; otherwise it has those of all its models from the start. One that `replaces` a lost worker
    serves what it can of its models. Of jobs that have no work there it keeps `states_bytes` at most; of others their
    blobs are read again. With a `skeleton` it serves nothing: it reads its one model, leaves the skeleton
    in this file and waits for its end. One that `reads` serves nothing either: it takes `ReadWeights` alone.

    A CPU slot is told what its models are, in `infos`, in the order of its sources: it may need nothing else of them.
    """

    device_id: int
    blobs: str
    rendezvous: str = ""
    loads_on_demand: bool = False
    states_bytes: int = STATES_BYTES
    replaces: bool = False
    skeleton: str = ""
    reads: bool = False
    infos: tuple[ModelInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A group that can communicate. An id is never used again, so no worker can meet a former member under it."""

    group_id: int
    devices: Group


@dataclass(frozen=True, slots=True)
class StateBlob:
    """The name and size of a serialized state, in the directory of blobs of its node."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a stage has written of a request: its outputs, or the state between two of its steps.

    `position` is where the request is after it (`core.graph.itinerary.Itinerary`), `index` that of the stage.
    """

    index: int
    position: int
    blob: StateBlob


# Commands, runtime -> worker. A `revoked` work was stopped before it was sent.


@dataclass(frozen=True, slots=True)
class Execute:
    """Run a stage of a model for each member, (job, position), from its state on this worker.

    A stage with steps makes `num_steps` of them, a group in lockstep. Several members share forward passes; a member
    whose state is missing is left out. A group has one member only, and the group's first worker decides whether and
    where it stops. `specs`, by job, are there for members of which nothing is done yet. `sliced` takes less memory and
    more time; results differ by rounding.
    """

    work_id: int
    model: str
    stage: str
    members: tuple[tuple[int, int], ...]
    num_steps: int = 1
    specs: Mapping[int, Spec] = field(default_factory=dict, hash=False)
    group: GroupRef | None = None
    sliced: bool = False
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class StopWork:
    work_id: int


@dataclass(frozen=True, slots=True)
class ImportState:
    """Load a job of a model from blobs, in the order of its stages; it is at `position` then.

    With `known` the worker has what the stages before the first of `states` wrote, and keeps it. A state that it has
    of a later stage is dropped.
    """

    job_id: int
    model: str
    spec: Spec
    position: int
    states: tuple[SavedState, ...]
    known: bool


@dataclass(frozen=True, slots=True)
class NoteSaved:
    """A blob holds what a work of a group has made of a job: another member than this worker has written it."""

    job_id: int
    saved: SavedState


@dataclass(frozen=True, slots=True)
class EnterNode:
    """Connect with all workers of the node; later groups are subsets of it. Only accelerators need it."""

    node: GroupRef


@dataclass(frozen=True, slots=True)
class CloseGroup:
    """Forget a group that will not be used again."""

    group_id: int


@dataclass(frozen=True, slots=True)
class BreakGroup:
    """A member of this group is lost: end the work that is running in it, and do not begin those queued for it."""

    group_id: int


@dataclass(frozen=True, slots=True)
class Forget:
    job_id: int


@dataclass(frozen=True, slots=True)
class Calibrate:
    """Warm up and time a model's stages for these batches, with a group at its degree; answered by `Calibrated`.

    Batches of several have no group; they are timed for batchable stages, groups for stages that they may share.
    `num_runs` None means a few, within a short time. Requests use these `loras`. Where a device has no room for all
    stages, `weights` are the digests of what each stage needs, by its name: they are loaded before it, the others
    dropped.
    """

    model: str
    batches: tuple[Batch, ...]
    group: GroupRef | None = None
    num_runs: int | None = None
    loras: tuple[UsedLora, ...] = ()
    weights: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Bring components, by digest, to the device. Answered by `WeightsLoaded`; a worker that cannot do it ends.

    It does so block by block while it has no other command, or one that needs them. Others need not wait.

    Where the host has no room to keep what is read, it forgets `forgets` first, in this order.
    """

    load_id: int
    components: tuple[str, ...]
    forgets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DropWeights:
    """Give back the device's memory of components, by digest. What is still to be loaded of them never is."""

    components: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ComponentFiles:
    """Where a component can be read: as this part of a model, or as the file of a LoRA."""

    component: Component
    source: ModelSource
    part: str = ""
    lora: str = ""


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """Read components from the disk into the memory of the host; answered by `WeightsRead`. For a reader alone.

    Where the host has no room, it forgets `forgets` first, by digest, in this order.
    """

    read_id: int
    files: tuple[ComponentFiles, ...]
    forgets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AddModel:
    """Serve another model, from its skeleton in a file; answered by `ModelAdded`. For workers that load on demand."""

    source: ModelSource
    skeleton: str


@dataclass(frozen=True, slots=True)
class AddLora:
    """Let requests for a model use another LoRA; answered by `LoraAdded`."""

    model: str
    source: LoraSource


@dataclass(frozen=True, slots=True)
class RemoveModel:
    """Serve a model no more."""

    model: str


@dataclass(frozen=True, slots=True)
class RemoveLora:
    """Let requests for a model use this LoRA no more."""

    model: str
    name: str


@dataclass(frozen=True, slots=True)
class Quit:
    pass


ModelChange = AddModel | AddLora | RemoveModel | RemoveLora

Command = (
    Execute
    | StopWork
    | ImportState
    | NoteSaved
    | EnterNode
    | CloseGroup
    | BreakGroup
    | Forget
    | Calibrate
    | LoadWeights
    | DropWeights
    | ReadWeights
    | ModelChange
    | Quit
)


# Reports, worker -> runtime. Times are of the machine-wide monotonic clock.


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model of a worker. `identity` distinguishes models of the same name.

    `components` are those of its stages, by name; empty if all stay on the device. `loras` are those that its requests
    may use, by name, and `refused` says of the others why they may not.
    """

    info: ModelInfo
    identity: str = "unknown"
    components: Mapping[str, Component] = field(default_factory=dict)
    loras: Mapping[str, Lora] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def needed(self, loras: Collection[str] = ()) -> dict[str, tuple[Component, ...]]:
        """What each stage needs, by its name, for a request that uses these LoRAs."""
        used = [self.loras[name] for name in loras]
        return {
            stage.name: tuple(
                dict.fromkeys(
                    [
                        *(self.components[name] for name in stage.spec.components if name in self.components),
                        *(
                            one.component
                            for one in used
                            if one.component is not None and not one.changes.isdisjoint(stage.spec.components)
                        ),
                    ]
                )
            )
            for stage in self.info.graph.stages
        }

    def largest_stage(self, loras: Collection[str] = ()) -> tuple[str, int]:
        """The stage whose weights are the most for a request that uses these LoRAs, and their bytes."""
        sizes = {stage: num_bytes(needed) for stage, needed in self.needed(loras).items()}
        largest = max(sizes, key=sizes.__getitem__)
        return largest, sizes[largest]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The worker is ready. `hardware` describes the device."""

    models: tuple[LoadedModel, ...]
    load_ns: int
    hardware: str = "unknown"


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """A `LoadWeights` is done, in `run_ns` without what the worker did meanwhile, but with the drops just before it.

    It was told to drop `dropped` before it had loaded them.
    """

    load_id: int
    run_ns: int
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightsRead:
    """The answer to `ReadWeights`. Not `is_kept`: the host could not read them, or has no room for them."""

    read_id: int
    is_kept: bool


@dataclass(frozen=True, slots=True)
class ModelAdded:
    """The answer to `AddModel`; `error` says why the model cannot be served."""

    model: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class LoraAdded:
    """The answer to `AddLora`: the LoRA, or why it cannot be used."""

    lora: Lora | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class Calibrated:
    rows: tuple[CostRow, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """A step of a running work has ended; sent between steps, not at the end of a work."""

    work_id: int
    steps_done: int


@dataclass(frozen=True, slots=True)
class Preview:
    """A preview of a member after a step of a running work; sent before the `Progress` or `Ended` of that step.

    Only the first worker of a group sends it. `steps_done` counts within the work, as in `Progress`; `image` has the
    size that `core.preview.preview_shape` gives.
    """

    work_id: int
    job_id: int
    steps_done: int
    image: Image


@dataclass(frozen=True, slots=True)
class Absent:
    """A member that was left out, since the worker lacks its state; with `state_lost` its blobs are gone, too."""

    job_id: int
    reason: str
    state_lost: bool


@dataclass(frozen=True, slots=True)
class KeptStates:
    """What a worker keeps of jobs that have no work there: tensors of `num_bytes`.

    Since its start it dropped those of a job `num_spills` times, and read them again `num_returns` times.
    """

    num_bytes: int
    num_spills: int
    num_returns: int


@dataclass(slots=True)
class Ended:
    """A work is done; or after `steps_done` steps it was `stopped`, `broken` off with its group, or `out_of_memory`.

    `blobs` are what it has written, by job: the outputs of its stage, or the state after its last step. The first
    worker of a group writes them; when the group breaks, every survivor does. The last stage on a request's way writes
    `images` or `files`, by job, instead. `absent` are the members that were left out. `memory_bytes` is the memory in
    use on an accelerator at the end; `kept` is what the worker kept of jobs when the work before this one had ended.
    For jobs `for_any_seed`, a stage without steps has written what it would for any other seed. Not frozen, since
    simulations make one per work.
    """

    work_id: int
    start_ns: int
    end_ns: int
    steps_done: int
    stopped: bool = False
    broken: bool = False
    out_of_memory: bool = False
    blobs: Mapping[int, StateBlob] = field(default_factory=dict)
    absent: tuple[Absent, ...] = ()
    images: Mapping[int, Image] = field(default_factory=dict)
    files: Mapping[int, File] = field(default_factory=dict)
    memory_bytes: int | None = None
    for_any_seed: frozenset[int] = frozenset()
    kept: KeptStates | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A work raised an error. With `state_lost` the blobs that it should have started from are gone.

    `by_model`: the model raised it, so that the same request may raise it again.
    """

    work_id: int
    reason: str
    state_lost: bool = False
    by_model: bool = False


Report = (
    Loaded
    | LoadFailed
    | WeightsLoaded
    | WeightsRead
    | ModelAdded
    | LoraAdded
    | Calibrated
    | Progress
    | Preview
    | Ended
    | Failed
)
