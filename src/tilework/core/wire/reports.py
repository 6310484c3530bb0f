"""Reports from a worker to the runtime. Times are of the machine-wide monotonic clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tilework.core.cache import CacheUse
from tilework.core.component import Component, WeightBlocks, num_bytes
from tilework.core.cost_row import CostRow
from tilework.core.lora import Lora
from tilework.core.model import ModelInfo
from tilework.core.request import Refusal
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.ranges import Amount, Count, Duration, Name, Share, Text, Time
from tilework.core.wire.spec import File, Image


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model of a worker.
    `identity` distinguishes models of the same name. Models of one `architecture` take the same time.

    `stage_keys` has a key of each stage, by name: stages with equal keys take the same time, also of different models.
    `components` are those of its stages, by name; empty if all stay on the device: then `weights` are their bytes, by
    name. `loras` are those that its requests may use, by name, and `refused` says why the others may not be used.
    Loading took `load_ns`.
    """

    info: ModelInfo
    identity: Text = "unknown"
    architecture: Text = "unknown"
    stage_keys: Mapping[str, str] = field(default_factory=dict)
    components: Mapping[str, Component] = field(default_factory=dict)
    weights: Mapping[str, Count] = field(default_factory=dict)
    loras: Mapping[str, Lora] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    load_ns: Duration = 0

    def needed(self, loras: Collection[str] = ()) -> dict[str, tuple[Component, ...]]:
        """Return the components of each stage, by its name, for a request that uses these LoRAs."""
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
        """Return the stage that needs the most memory for a request that uses these LoRAs, and how many bytes.

        It needs its weights, and what it declares beyond them.
        """
        beyond = {stage.name: stage.spec.memory_bytes for stage in self.info.graph.stages}
        sizes = {stage: num_bytes(needed) + beyond[stage] for stage, needed in self.needed(loras).items()}
        largest = max(sizes, key=sizes.__getitem__)
        return largest, sizes[largest]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The size of a model that no device has loaded: the components of its stages, and their division in a cell.

    `stages` are the names of the components that each needs, by its name. At most `max_degree` devices share a request.
    """

    name: str
    max_degree: int
    stages: Mapping[str, tuple[str, ...]]
    components: Mapping[str, WeightBlocks]

    def held_bytes(self, cell_size: int) -> dict[str, int]:
        """Return the bytes that each device of a cell of this size needs for each stage, by its name."""
        held = {name: one.held_bytes(cell_size) for name, one in self.components.items()}
        return {stage: sum(held[name] for name in names) for stage, names in self.stages.items()}


@dataclass(frozen=True, slots=True)
class Sized:
    """The answer of a process that was started to say how large models are."""

    models: tuple[ModelSize, ...]


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """The source at this `place`, from 0, among those given at the start has a model that could not be loaded."""

    place: Count
    name: Text
    reason: Text


@dataclass(frozen=True, slots=True)
class Loaded:
    """The worker is ready. `hardware` describes the device. The models are in the order of their sources."""

    models: tuple[LoadedModel, ...]
    load_ns: int
    hardware: str = "unknown"
    not_loaded: tuple[NotLoaded, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRead:
    """The answer of a process that was started to read a model, the only one of `loaded`, for workers that serve.

    They take the model over by its `skeleton`, the model without weights, for `AddModel`. It is never stored in a file.
    """

    loaded: Loaded
    skeleton: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """A `LoadWeights` is done, in `run_ns`: without what the worker did meanwhile, but with the drops just before it.

    `dropped` are components that it was told to drop before they were loaded.
    """

    load_id: Count
    run_ns: Duration
    dropped: tuple[Name, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightsRead:
    """The answer to `ReadWeights`. Unless `is_kept`, the host could not read them, or has no room for them."""

    read_id: Count
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
class StartedOver:
    """The answer to `StartOver`: nothing from before it is reported after this."""


@dataclass(frozen=True, slots=True)
class NodeFormed:
    """The answer to `EnterNode`: the node's communicator is formed, after `run_ns`; or `error` says why it is not."""

    group_id: int
    run_ns: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The answer to `Calibrate`. An `error` says why this worker could not run it, or not all of it."""

    rows: tuple[CostRow, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """A step of a running work has ended; not sent for the last step."""

    work_id: Count
    steps_done: Count


@dataclass(frozen=True, slots=True)
class Preview:
    """A preview of a member after a step of a running work; sent before the `Progress` or `Ended` of that step.

    Only the first worker of a group sends it. `steps_done` counts within the work, as in `Progress`; `image` has the
    size that `core.preview.preview_shape` returns.
    """

    work_id: Count
    job_id: Count
    steps_done: Count
    image: Image


@dataclass(frozen=True, slots=True)
class Absent:
    """A member that was left out, since the worker lacks its state; with `state_lost` its blobs are gone, too."""

    job_id: Count
    reason: Text
    state_lost: bool


@dataclass(frozen=True, slots=True)
class KeptStates:
    """The tensors, of `num_bytes`, that a worker keeps of jobs that have no work there.

    Since its start it has dropped a job's tensors `num_spills` times, and read them again `num_returns` times.
    """

    num_bytes: Count
    num_spills: Count
    num_returns: Count


class Ending(StrEnum):
    """Way in which a work ended.

    Devices report the first four in `Ended`, and a failure by `Failed`; none can report that it is lost.
    """

    DONE = "done"
    STOPPED = "stopped"
    BROKEN = "broken"
    """Some of its devices were lost, so the others broke it off."""
    OUT_OF_MEMORY = "out_of_memory"
    """Lack of memory on a device; the jobs are retried in another way."""
    FAILED = "failed"
    LOST = "lost"
    """All its devices were lost."""

    @property
    def is_cut_off(self) -> bool:
        """True if a device could not go on; then the other devices of its group cannot go on, either."""
        return self is Ending.BROKEN or self is Ending.OUT_OF_MEMORY


@dataclass(slots=True)
class Ended:
    """A work has ended on a device, after `steps_done` steps.

    `blobs` are those that it has written, by job: the outputs of its stage, or the state after its last step. The first
    worker of a group writes them; when the group breaks, every survivor does. The last stage on a request's way writes
    `images` or `files`, by job, instead. `absent` are the members that were left out. `memory_bytes` is the memory in
    use on an accelerator at the end; `kept` is what the worker kept of jobs when the work before this one had ended.
    For jobs `for_any_seed`, a stage without steps has written what it would write for any other seed, too. `cache_use`
    is what the caches of jobs computed and skipped in this work. Not frozen, since simulations make one per work.
    """

    work_id: Count
    start_ns: Time
    end_ns: Time
    steps_done: Count
    ending: Ending = Ending.DONE
    blobs: Mapping[Count, StateBlob] = field(default_factory=dict)
    absent: tuple[Absent, ...] = ()
    images: Mapping[Count, Image] = field(default_factory=dict)
    files: Mapping[Count, File] = field(default_factory=dict)
    memory_bytes: Count | None = None
    for_any_seed: frozenset[Count] = frozenset()
    kept: KeptStates | None = None
    cache_use: Mapping[Count, CacheUse] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """A work raised an error. With `state_lost` the blobs that it should have started from are gone.

    `by_model`: the model raised it, so that the same request may raise it again. `refuses` is a job whose request the
    model does not serve, for the reason `refusal`: the job ends, and no device tries it again.
    """

    work_id: Count
    reason: Text
    state_lost: bool = False
    by_model: bool = False
    refuses: Count | None = None
    refusal: Refusal = Refusal.CONTENT


SLOWDOWNS = ("power cap", "power brake", "temperature", "hardware", "other cards", "fixed clock")
"""Causes that may keep the clock of a card down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardReading:
    """The state of a card as NVML reports it; None: not reported.

    `busy` is the share of the last moments in which a kernel ran. Of the memory, the worker itself has `worker_bytes`.
    The clock is that of the multiprocessors; `slowed_by` are those of SLOWDOWNS that keep it down.
    """

    busy: Share | None = None
    total_bytes: Count | None = None
    used_bytes: Count | None = None
    worker_bytes: Count | None = None
    celsius: int | None = None
    watts: Amount | None = None
    limit_watts: Amount | None = None
    hertz: Count | None = None
    most_hertz: Count | None = None
    slowed_by: tuple[Name, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorReading:
    """Counts of torch's allocator of CUDA memory in a worker.

    It has `reserved_bytes`, of which tensors take `allocated_bytes`; they took at most `peak_bytes` since the device
    was measured, or since the start. `split_bytes` are fragments: free pieces of blocks whose other pieces tensors
    have. A retry is an allocation for which it first had to give back what it keeps; a failure ran out of memory.
    """

    reserved_bytes: Count
    allocated_bytes: Count
    peak_bytes: Count
    split_bytes: Count
    num_retries: Count
    num_failures: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMemory:
    """Memory of a CUDA device when its worker had loaded, in bytes.

    The process had `context_bytes` beside torch's allocator, for CUDA's context and libraries; where NVML does not
    report per process, those of other programs are included. Tensors took `weights_bytes`, and could take `free_bytes`
    more.
    """

    context_bytes: Count
    weights_bytes: Count
    free_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """A worker's card and allocator, every few seconds, and its memory at the start; None where nothing reports it."""

    card: CardReading | None
    allocator: AllocatorReading | None
    start: StartMemory | None = None


Report = (
    Loaded
    | Sized
    | ModelRead
    | LoadFailed
    | WeightsLoaded
    | WeightsRead
    | ModelAdded
    | LoraAdded
    | StartedOver
    | NodeFormed
    | Calibrated
    | Progress
    | Preview
    | Ended
    | Failed
    | DeviceReading
)
