"""Messages between the runtime and a worker process, both ways; they are pickled onto a local pipe.

A worker executes commands first in, first out; only `StopWork` and, where it may, `ExportState` overtake.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.core.request import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What to draw: everything about a request that the scheduler must not care about.

    Raises nothing; the server has checked the values against `ModelInfo`.
    """

    prompt: str
    negative_prompt: str
    height: int
    width: int
    steps: int
    guidance_scale: float
    seed: int

    @property
    def shape(self) -> Shape:
        return Shape(self.height, self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a worker finds its model and how it shall run it. `path` is a diffusers directory or a hub id."""

    path: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the edges need to know of a loaded model: its limits and the defaults of a request.

    Sides are in pixels, multiples of `side_multiple`, at most `max_side`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One line of a cost table (design section 10): seconds per step (diffuse) or per request (other stages)."""

    pipeline: str
    stage: str
    height: int
    width: int
    frames: int = 1
    degree: int = 1
    batch: int = 1
    link: str = "none"
    seconds: float
    peak_bytes: int | None = None


# Commands, runtime -> worker.


@dataclass(frozen=True, slots=True)
class Encode:
    work_id: int
    job_id: int
    spec: Spec


@dataclass(frozen=True, slots=True)
class Denoise:
    work_id: int
    job_id: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Decode:
    work_id: int
    job_id: int


@dataclass(frozen=True, slots=True)
class StopWork:
    work_id: int


@dataclass(frozen=True, slots=True)
class ExportState:
    """Hand over a job's mutable state, and its conditioning if asked for; answered by `Exported`.

    It follows the works of its own job, and goes between two steps of another job's.
    """

    job_id: int
    transfer_id: int
    conditioning: bool


@dataclass(frozen=True, slots=True)
class ImportState:
    """Take a job over. `blob` is what `Exported` carried, or None when the export failed: its works then fail."""

    job_id: int
    blob: bytes | None


@dataclass(frozen=True, slots=True)
class Forget:
    job_id: int


@dataclass(frozen=True, slots=True)
class Calibrate:
    """Warm up and time every stage for these shapes; answered by `Calibrated`."""

    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Quit:
    pass


Command = Encode | Denoise | Decode | StopWork | ExportState | ImportState | Forget | Calibrate | Quit


# Reports, worker -> runtime. Times are of the machine-wide monotonic clock.


@dataclass(frozen=True, slots=True)
class Loaded:
    info: ModelInfo
    load_ns: int


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
class Ended:
    """A work is done, or was stopped after `steps_done` steps (`stopped`)."""

    work_id: int
    start_ns: int
    end_ns: int
    steps_done: int
    stopped: bool = False
    image: Image | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    work_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exported:
    transfer_id: int
    blob: bytes | None = field(repr=False)


Report = Loaded | LoadFailed | Calibrated | Progress | Ended | Failed | Exported
