"""Commands from the runtime to a worker. A `revoked` work was stopped before it was sent."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from tilework.core.cache import CacheChoice
from tilework.core.comm import LINK_TIMEOUT_S, SOCKETS
from tilework.core.component import Component
from tilework.core.cost_row import Batch
from tilework.core.lora import UsedLora
from tilework.core.model import LoraSource, ModelInfo, ModelSource
from tilework.core.wire.blobs import SavedState
from tilework.core.wire.spec import Spec
from tilework.core.work import Group

STATES_BYTES = 2 * 10**9
"""Default limit of the bytes that a device keeps of the states of jobs that have no work there."""
CACHE_BYTES = 4 * 10**9
"""Default limit of the bytes that a device keeps of steps, for later steps of requests with a cache."""


WEIGHTS = "weights"
"""Name of the directory, inside that of the blobs, with the weights that all CPU workers of a node share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The place of a worker: its device, the directory of `blobs`, and the directory where groups meet.

    `rendezvous` is empty where no groups are formed. With `loads_on_demand` a worker has no weights on its device until
    a command loads them; otherwise it has those of all its models from the start. A worker that `replaces` a lost one
    serves those of its models that it can. It keeps at most `states_bytes` of states of jobs that have no work there;
    the blobs of other such jobs are read again. It keeps at most `cache_bytes` of results that steps of jobs with a
    cache leave for later steps. A worker `for_others` serves nothing: it reads its one model, answers `ModelRead` and
    waits for its end. One that `reads` serves nothing either: it takes `ReadWeights` alone. One that `sizes` only
    reports how large its models are.

    The workers of a `cell`, which include this one, have a part of all weights each, and run every work together.
    Groups communicate by `collectives`, a key of `core.comm.COLLECTIVES`.

    A CPU slot gets descriptions of its models in `infos`, in the order of its sources: it may need nothing else of
    them. A worker logs messages of at least `log_level`, one of `logging`.
    """

    device_id: int
    blobs: str
    rendezvous: str = ""
    loads_on_demand: bool = False
    states_bytes: int = STATES_BYTES
    cache_bytes: int = CACHE_BYTES
    replaces: bool = False
    for_others: bool = False
    reads: bool = False
    sizes: bool = False
    infos: tuple[ModelInfo, ...] = ()
    cell: Group = ()
    collectives: str = SOCKETS
    link_timeout_s: float = LINK_TIMEOUT_S
    log_level: int = logging.NOTSET


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A group that can communicate. An id is never used again, so no worker can meet a former member under it.

    The group is a part of the node's communicator that was entered as `node_id`; None: its members connect by
    themselves.
    """

    group_id: int
    devices: Group
    node_id: int | None = None


@dataclass(frozen=True, slots=True)
class Execute:
    """Run a stage of a model for each member, (job, position), from its state on this worker.

    A stage with steps makes `num_steps` of them; the workers of a group run in lockstep. Several members share forward
    passes; a member whose state is missing is left out. A group has one member only, and the group's first worker
    decides whether and where it stops. `specs`, by job, are given for members of which nothing is done yet. A `sliced`
    work takes less memory and more time; results differ by rounding. `caches` has the cache of its steps, or nothing: a
    member may have begun with another.
    """

    work_id: int
    model: str
    stage: str
    members: tuple[tuple[int, int], ...]
    num_steps: int = 1
    specs: Mapping[int, Spec] = field(default_factory=dict, hash=False)
    group: GroupRef | None = None
    sliced: bool = False
    caches: tuple[CacheChoice, ...] = ()
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class StopWork:
    work_id: int


@dataclass(frozen=True, slots=True)
class ImportState:
    """Load a job of a model from blobs, in the order of its stages; it is then at `position`.

    With `known` the worker has the outputs of the stages before the first of `states`, and keeps them. A state that it
    has of a later stage is dropped.
    """

    job_id: int
    model: str
    spec: Spec
    position: int
    states: tuple[SavedState, ...]
    known: bool


@dataclass(frozen=True, slots=True)
class NoteSaved:
    """Record that a blob, written by another worker, holds a job's state after a work of a group."""

    job_id: int
    saved: SavedState


@dataclass(frozen=True, slots=True)
class EnterNode:
    """Connect with all workers of the node, beside the works that run; answered by `NodeFormed`.

    Groups that name it are subsets of it. Groups that communicate by sockets need none.
    """

    node: GroupRef


@dataclass(frozen=True, slots=True)
class CloseGroup:
    """Forget a group that will not be used again."""

    group_id: int


@dataclass(frozen=True, slots=True)
class BreakGroup:
    """End the work that is running in this group, a member of which is lost; do not begin those queued for it."""

    group_id: int


@dataclass(frozen=True, slots=True)
class Forget:
    job_id: int


@dataclass(frozen=True, slots=True)
class Calibrate:
    """Warm up and time a model's stages for these batches, with a group at its degree; answered by `Calibrated`.

    Batches of several requests have no group; they are timed for batchable stages, groups for stages that they may
    share. `num_runs` None means a few, within a short time; 0 means none after the warm-up, whose last run is timed.
    `known` stages are run, not timed. Requests use these `loras`. Where a device has no room for all stages, `weights`
    are the digests of the components of each stage, by its name: they are loaded before the stage, the others dropped.
    """

    model: str
    batches: tuple[Batch, ...]
    group: GroupRef | None = None
    num_runs: int | None = None
    loras: tuple[UsedLora, ...] = ()
    weights: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    known: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Bring components, by digest, to the device. Answered by `WeightsLoaded`; a worker that cannot do it ends.

    The worker loads block by block, while it has no other command or one that needs them. Other commands need not wait.

    Where the host has no room to keep what is read, it forgets `forgets` first, in this order.
    """

    load_id: int
    components: tuple[str, ...]
    forgets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DropWeights:
    """Free the device's memory of components, by digest. The part of them that is still to be loaded never is."""

    components: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ComponentFiles:
    """The place of a component on disk: a part of a model, or the file of a LoRA."""

    component: Component
    source: ModelSource
    part: str = ""
    lora: str = ""


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """Read components from the disk into the memory of the host; answered by `WeightsRead`. For a worker that `reads`.

    Where the host has no room, it forgets `forgets` first, by digest, in this order.
    """

    read_id: int
    files: tuple[ComponentFiles, ...]
    forgets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AddModel:
    """Serve another model, by its skeleton of `ModelRead`; answered by `ModelAdded`.

    Only workers that load on demand get it.
    """

    source: ModelSource
    skeleton: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AddLora:
    """Let requests for a model use another LoRA; answered by `LoraAdded`."""

    model: str
    source: LoraSource


@dataclass(frozen=True, slots=True)
class RemoveModel:
    """Stop serving a model."""

    model: str


@dataclass(frozen=True, slots=True)
class RemoveLora:
    """Stop letting requests for a model use this LoRA."""

    model: str
    name: str


@dataclass(frozen=True, slots=True)
class StartOver:
    """Stop all earlier works and forget all jobs; answered by `StartedOver`, after their reports."""


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
    | StartOver
    | Quit
)
