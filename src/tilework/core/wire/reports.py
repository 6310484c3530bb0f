"""From a worker to the runtime. Times are of the machine-wide monotonic clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

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
    """A model of a worker. `identity` distinguishes models of the same name, and those of one `architecture` take the
    same time.

    `stage_keys` say by name which stages take the same time, also of other models: those with equal keys. `components`
    are those of its stages, by name; empty if all stay on the device: then `weights` are their bytes, by name. `loras`
    are those that its requests may use, by name, and `refused` says of the others why they may not. To load it took
    `load_ns`.
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
        """The stage that needs the most memory for a request that uses these LoRAs, and how many bytes.

        It needs its weights, and what it declares beyond them.
        """
        beyond = {stage.name: stage.spec.memory_bytes for stage in self.info.graph.stages}
        sizes = {stage: num_bytes(needed) + beyond[stage] for stage, needed in self.needed(loras).items()}
        largest = max(sizes, key=sizes.__getitem__)
        return largest, sizes[largest]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """How large a model is that no device has loaded: what its stages need, and how that is divided in a cell.

    `stages` are the names of the components that each needs, by its name. At most `max_degree` devices share a request.
    """

    name: str
    max_degree: int
    stages: Mapping[str, tuple[str, ...]]
    components: Mapping[str, WeightBlocks]

    def held_bytes(self, cell_size: int) -> dict[str, int]:
        """What each device of a cell of this size needs for each stage, by its name."""
        held = {name: one.held_bytes(cell_size) for name, one in self.components.items()}
        return {stage: sum(held[name] for name in names) for stage, names in self.stages.items()}


@dataclass(frozen=True, slots=True)
class Sized:
    """The answer of a process that was started to say how large models are."""

    models: tuple[ModelSize, ...]


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """The model of the source at this `place`, from 0, of those of a start could not be loaded."""

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

    They take it over by its `skeleton`, the model without weights, for `AddModel`. It never lies in a file.
    """

    loaded: Loaded
    skeleton: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """A `LoadWeights` is done, in `run_ns` without what the worker did meanwhile, but with the drops just before it.

    It was told to drop `dropped` before it had loaded them.
    """

    load_id: Count
    run_ns: Duration
    dropped: tuple[Name, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightsRead:
    """The answer to `ReadWeights`. Not `is_kept`: the host could not read them, or has no room for them."""

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
    """The answer to `StartOver`: nothing of what came before it is reported after this."""


@dataclass(frozen=True, slots=True)
class NodeFormed:
    """The answer to `EnterNode`: the node's communicator stands, after `run_ns`; or `error` says why it does not."""

    group_id: int
    run_ns: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The answer to `Calibrate`. With an `error` it stands for what this worker could not run, or not go on with."""

    rows: tuple[CostRow, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """A step of a running work has ended; not sent of its last one."""

    work_id: Count
    steps_done: Count


@dataclass(frozen=True, slots=True)
class Preview:
    """A preview of a member after a step of a running work; sent before the `Progress` or `Ended` of that step.

    Only the first worker of a group sends it. `steps_done` counts within the work, as in `Progress`; `image` has the
    size that `core.preview.preview_shape` gives.
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
    """What a worker keeps of jobs that have no work there: tensors of `num_bytes`.

    Since its start it dropped those of a job `num_spills` times, and read them again `num_returns` times.
    """

    num_bytes: Count
    num_spills: Count
    num_returns: Count


@dataclass(slots=True)
class Ended:
    """A work is done; or after `steps_done` steps it was `stopped`, `broken` off with its group, or `out_of_memory`.

    `blobs` are what it has written, by job: the outputs of its stage, or the state after its last step. The first
    worker of a group writes them; when the group breaks, every survivor does. The last stage on a request's way writes
    `images` or `files`, by job, instead. `absent` are the members that were left out. `memory_bytes` is the memory in
    use on an accelerator at the end; `kept` is what the worker kept of jobs when the work before this one had ended.
    For jobs `for_any_seed`, a stage without steps has written what it would for any other seed. `cache_use` is what the
    caches of jobs did in this work. Not frozen, since
    simulations make one per work.
    """

    work_id: Count
    start_ns: Time
    end_ns: Time
    steps_done: Count
    stopped: bool = False
    broken: bool = False
    out_of_memory: bool = False
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

    `by_model`: the model raised it, so that the same request may raise it again. With `refuses`, a job, the model does
    not serve its request, for the reason `refusal`: that ends, and no device tries it again.
    """

    work_id: Count
    reason: Text
    state_lost: bool = False
    by_model: bool = False
    refuses: Count | None = None
    refusal: Refusal = Refusal.CONTENT


SLOWDOWNS = ("power cap", "power brake", "temperature", "hardware", "other cards", "fixed clock")
"""What may keep the clock of a card down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardReading:
    """What a card says of itself, by NVML; None: it does not tell.

    `busy` is the share of the last moments in which a kernel ran. Of the memory, the worker itself has `worker_bytes`.
    The clock is that of the multiprocessors, and those of SLOWDOWNS in `slowed_by` keep it down.
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
    """What torch's allocator of CUDA memory has counted in a worker.

    It has `reserved_bytes`, of which tensors take `allocated_bytes`; they took `peak_bytes` at most since the device
    was measured, or since the start. `split_bytes` are free pieces of blocks of which tensors have others: fragments. A
    retry is an allocation for which it had to give back what it keeps first; a failure ran out of memory.
    """

    reserved_bytes: Count
    allocated_bytes: Count
    peak_bytes: Count
    split_bytes: Count
    num_retries: Count
    num_failures: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMemory:
    """What a CUDA device had when its worker had loaded, in bytes.

    The process had `context_bytes` beside torch's allocator, for CUDA's context and libraries; where NVML does not tell
    of the process, those of other programs are among them. Tensors took `weights_bytes`, and could take `free_bytes`
    more.
    """

    context_bytes: Count
    weights_bytes: Count
    free_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """A worker's card and allocator, every few seconds, and what it had at the start; None where nothing tells."""

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
