"""Messages between the runtime and a worker process, both ways; they are pickled onto a local pipe.

A worker executes commands first in, first out; only `StopWork` and `BreakGroup` overtake.

A job's state travels as a blob: a worker puts it down where all workers of the node can read it, and names it in its
report; a worker that needs it is told the name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilework.core.request import Shape
from tilework.core.work import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What to draw: everything about a request that the scheduler must not care about.

    After every `preview_every` denoising steps, but not after the last one, the client sees what the picture is
    becoming; 0: never. It costs time, and changes nothing of the picture.

    Raises nothing; the server has checked the values against `ModelInfo`.
    """

    prompt: str
    negative_prompt: str
    height: int
    width: int
    steps: int
    guidance_scale: float
    seed: int
    preview_every: int = 0

    @property
    def shape(self) -> Shape:
        return Shape(self.height, self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a worker finds its model and how it shall run it. `path` is a diffusers directory or a hub id.

    `memory_bytes` is what a work may take beside the loaded model; None: what the device has.
    """

    path: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSource:
    """A simulated device: a worker that sleeps for as long as `rows` say, and returns pictures of one colour.

    It has `memory_bytes`: a work for which they say a higher peak runs out of it.
    """

    pipeline: str
    hardware: str
    steps: int
    rows: tuple[CostRow, ...] = field(repr=False)
    device: str = "cpu"
    threads: int = 1
    memory_bytes: int | None = None


Source = ModelSource | SimulatedSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the edges need to know of a loaded model: its limits and the defaults of a request.

    Sides are in pixels, multiples of `side_multiple`, at most `max_side`. `two_passes` says that a guidance scale
    above 1 adds a second pass to each step (classifier-free guidance), rather than being an input of the model.
    `max_degree` is how many devices can share one request's steps. `path` is the directory that the model was loaded
    from, or its hub id; empty if there is no model. With `packs` requests of any sizes can share a forward pass.
    """

    name: str
    family: str
    side_multiple: int
    max_side: int
    default_height: int
    default_width: int
    default_steps: int
    default_guidance_scale: float
    parameters: int
    library: str
    two_passes: bool = True
    max_degree: int = 1
    packs: bool = False
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a worker lives: its device, the directory of blobs, and where groups meet.

    `rendezvous` is the directory at which groups meet, empty where none are formed.
    """

    device_id: int
    blobs: str
    rendezvous: str = ""


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A group that can communicate. An id is never used again, so no worker can meet a former member under it."""

    group_id: int
    devices: Group


@dataclass(frozen=True, slots=True)
class StateBlob:
    """The name of what a worker has put down, in the directory of blobs of its node."""

    name: str
    num_bytes: int


Batch = tuple[Shape, ...]
"""The shapes of what is made together; of what is made alone, one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One line of a cost table: seconds per step (diffuse) or per request (other stages).

    `seconds` is the median of `num_runs` runs. Below 100 of them `p99_seconds` is the longest.

    `batch` is how many outputs of this shape are made together. Of a mixed batch it has the shapes of all, by pixels;
    height, width and frames are then those of the last one. `CostRow.of` makes rows of any batch.
    """

    pipeline: str
    stage: str
    height: int
    width: int
    frames: int = 1
    degree: int = 1
    batch: int | Batch = 1
    link: str = "none"
    seconds: float
    p99_seconds: float | None = None
    peak_bytes: int | None = None
    num_runs: int | None = None

    @classmethod
    def of(cls, shapes: Sequence[Shape], **fields: Any) -> CostRow:
        """The row of outputs of these shapes made together, in any order."""
        arranged = tuple(sorted(shapes, key=lambda shape: (shape.pixels, shape)))
        last, batch = arranged[-1], arranged if len(set(arranged)) > 1 else len(arranged)
        return cls(height=last.height, width=last.width, frames=last.frames, batch=batch, **fields)

    @property
    def shape(self) -> Shape:
        """The largest one's."""
        return Shape(self.height, self.width, self.frames)

    @property
    def shapes(self) -> Batch:
        """Of all outputs that are made together."""
        return (self.shape,) * self.batch if isinstance(self.batch, int) else self.batch


# Commands, runtime -> worker. A work that is `revoked` was stopped before it was sent.


@dataclass(frozen=True, slots=True)
class Encode:
    work_id: int
    job_id: int
    spec: Spec
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class Denoise:
    """Run `num_steps` steps of each member, (job, first step), from where its state must be; with a group, in lockstep.

    Several members share forward passes; one whose state is lacking is left out. A group has but one, and the first
    worker of it decides whether and where it stops.
    """

    work_id: int
    members: tuple[tuple[int, int], ...]
    num_steps: int
    group: GroupRef | None = None
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class Decode:
    """`sliced` takes less memory and more time, and brings the same picture."""

    work_id: int
    job_id: int
    sliced: bool = False
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class StopWork:
    work_id: int


@dataclass(frozen=True, slots=True)
class ImportState:
    """Take a job over from blobs. Without `conditioning` the worker has it already; without `state` there is none.

    What the worker had of the state before is replaced.
    """

    job_id: int
    spec: Spec
    conditioning: StateBlob | None
    state: StateBlob | None


@dataclass(frozen=True, slots=True)
class EnterNode:
    """Meet all workers of the node, of which the groups used from now on are parts; only accelerators need it."""

    node: GroupRef


@dataclass(frozen=True, slots=True)
class CloseGroup:
    """Forget a group that will not be used again."""

    group_id: int


@dataclass(frozen=True, slots=True)
class BreakGroup:
    """A member of this group is lost: end what is running in it, and do not begin what is queued for it."""

    group_id: int


@dataclass(frozen=True, slots=True)
class Forget:
    job_id: int


@dataclass(frozen=True, slots=True)
class Calibrate:
    """Warm up and time the stages for these batches, with a group at its degree; answered by `Calibrated`.

    Encode and decode are timed without a group only, and for single outputs, which batches of one are. Others have no
    group. `num_runs` None means a few, within a short time.
    """

    batches: tuple[Batch, ...]
    group: GroupRef | None = None
    num_runs: int | None = None


@dataclass(frozen=True, slots=True)
class Quit:
    pass


Command = (
    Encode | Denoise | Decode | StopWork | ImportState | EnterNode | CloseGroup | BreakGroup | Forget | Calibrate | Quit
)


# Reports, worker -> runtime. Times are of the machine-wide monotonic clock.


@dataclass(frozen=True, slots=True)
class Loaded:
    """`hardware` describes the device, `identity` tells this model from another of the same name."""

    info: ModelInfo
    load_ns: int
    hardware: str = "unknown"
    identity: str = "unknown"


@dataclass(frozen=True, slots=True)
class LoadFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class Calibrated:
    rows: tuple[CostRow, ...]


@dataclass(frozen=True, slots=True)
class Image:
    """Pixels of one decoded picture: RGB, 8 bits, row by row."""

    height: int
    width: int
    pixels: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Progress:
    """A step of a running work has ended; sent between steps, not at the end of a work."""

    work_id: int
    steps_done: int


@dataclass(frozen=True, slots=True)
class Preview:
    """What a member's picture is becoming as of a step of a running work; sent before the `Progress` or `Ended` of it.

    Only the first of a group sends it. `steps_done` counts within the work, as in `Progress`; the size of `image` is
    that of `core.preview.preview_shape`.
    """

    work_id: int
    job_id: int
    steps_done: int
    image: Image


@dataclass(frozen=True, slots=True)
class Absent:
    """A member of which a worker lacks the state; with `state_lost` the blobs that it should come from are gone."""

    job_id: int
    reason: str
    state_lost: bool


@dataclass(slots=True)
class Ended:
    """A work is done; or after `steps_done` steps it was `stopped`, `broken` off with its group, or `out_of_memory`.

    `blobs` are what the work brought about, by job: conditioning (encode) or states (denoise). The first of a group
    puts them down; when the group breaks, every survivor does. `absent` members, of several, had no part in it.
    `memory_bytes` is what is in use on an accelerator then. Not frozen, since simulations make one per work.
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
    image: Image | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A work raised an error. With `state_lost` the blobs that it should have gone on from are gone."""

    work_id: int
    reason: str
    state_lost: bool = False


Report = Loaded | LoadFailed | Calibrated | Progress | Preview | Ended | Failed
