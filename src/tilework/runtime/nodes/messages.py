"""Messages between the engine and the agent of a node, beside commands for devices and their reports.

Those are the messages of `core.wire`, with the number of the device on its node as their address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from tilework.comm.net.codec import Codec
from tilework.core.actions import ReadComponents
from tilework.core.component import LoadSource
from tilework.core.cost_row import Batch, CostRow
from tilework.core.lora import Lora, UsedLora
from tilework.core.model import LoraSource, ModelSource, SimulatedSource
from tilework.core.wire.commands import AddModel, Command, RemoveLora, RemoveModel
from tilework.core.wire.content import FileContent
from tilework.core.wire.node_blobs import BlobsFetched, CopyBlob, DiscardBlob, FetchBlobs, KeepBlobs, LeaveOrigin
from tilework.core.wire.ranges import Amount, Count, Name, Port, Text, Time
from tilework.core.wire.reports import DeviceReading, LoadedModel, NotLoaded, Report
from tilework.core.wire.reports import ModelRead as SkeletonLeft
from tilework.core.work import Group
from tilework.cost.profile import ProfileKey

# From the engine.


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginNode:
    """Start the workers of this node: see `runtime.local_config.LocalConfig`. Either type of sources is empty.

    Workers that were started for an equal message are used again. The session ends when the server sends nothing for
    `silence_s`.
    """

    node: int = field(compare=False)
    silence_s: float = field(compare=False)
    models: tuple[ModelSource, ...]
    simulated: tuple[SimulatedSource, ...]
    num_workers: int
    num_slots: int
    weights_bytes: int | None
    states_bytes: int
    cache_bytes: int
    cell_size: int
    collectives: str | None


@dataclass(frozen=True, slots=True)
class BreakOffGroup:
    """End a group of devices of this node. `group_id` is the one in its commands."""

    group_id: int
    devices: Group


@dataclass(frozen=True, slots=True)
class KillWorker:
    device_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureModel:
    """See `Executor.calibrate`. Answered by `ModelMeasured`."""

    model: str
    batches: tuple[Batch, ...]
    degree: int
    num_runs: int | None
    loras: tuple[UsedLora, ...]
    known: frozenset[str]
    devices: Group | None


@dataclass(frozen=True, slots=True)
class EndMeasuring:
    """See `Executor.end_calibration`. Answered by `LoadSpeeds`."""


@dataclass(frozen=True, slots=True)
class ReadModel:
    """See `Executor.read_model`. Answered by `ModelRead`."""

    source: ModelSource
    served: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServeModel:
    """See `Executor.add_model`. Answered by `Changed`."""

    source: ModelSource


@dataclass(frozen=True, slots=True)
class ReadLora:
    """See `Executor.add_lora`. Answered by `LoraRead`."""

    model: str
    lora: LoraSource


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered by `Pong`, at once."""

    sent_ns: Time


@dataclass(frozen=True, slots=True)
class Leave:
    """End the workers: the server has ended, has no place for this node, or cannot use it as it is.

    If it `is_final`, the agent ends, too. If the node `differs` from others, the server cannot use it until it changes.
    """

    reason: str
    is_final: bool = False
    differs: bool = False


# From the agent.


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """All workers are up; messages that follow report exceptions.

    Blobs can be fetched at `port`. `keys` are those of the models, by name. Other models are `not_loaded`. `name` is
    the name of this node, and `blobs` are the names of those that it has kept from an earlier session.
    """

    models: tuple[LoadedModel, ...]
    keys: Mapping[str, ProfileKey]
    num_slots: Count
    host_bytes: Count | None
    port: Port
    name: Name
    blobs: tuple[Name, ...] = ()
    not_loaded: tuple[NotLoaded, ...] = ()


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of the files of the models, by the names of the models: all that is known of them now.

    Sent before workers are started and before the answer to `ReadModel`, and when whole files of weights were read.
    """

    models: Mapping[Name, Mapping[Name, FileContent]]


@dataclass(frozen=True, slots=True)
class StartFailed:
    reason: Text


@dataclass(frozen=True, slots=True)
class Loading:
    num_ready: Count


@dataclass(frozen=True, slots=True)
class WorkerLost:
    device_id: Count
    reason: Text


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    device_id: Count


@dataclass(frozen=True, slots=True)
class Links:
    """See `Executor.alone` and `Executor.is_linking`; until the first such message, none is alone."""

    alone: tuple[Count, ...]
    is_linking: bool


@dataclass(frozen=True, slots=True)
class WorkersLeft:
    """A worker was given up; these remain, none if it was the last of its kind."""

    device_ids: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class Leaving:
    """The node is about to go, and waits for `Leave`."""

    reason: Text


@dataclass(frozen=True, slots=True)
class ModelMeasured:
    """Rows, or an `error`: a worker was lost, or with `cannot_run` the model does not run there."""

    rows: tuple[CostRow, ...]
    error: Text = ""
    cannot_run: bool = False


@dataclass(frozen=True, slots=True)
class LoadSpeeds:
    """Bytes per second by source."""

    bytes_per_s: Mapping[LoadSource, Amount]


@dataclass(frozen=True, slots=True)
class ModelRead:
    """The model and its key; or `error` says why there is none."""

    model: LoadedModel | None = None
    key: ProfileKey | None = None
    error: Text = ""


@dataclass(frozen=True, slots=True)
class LoraRead:
    """The LoRA; or `error` says why there is none."""

    lora: Lora | None = None
    error: Text = ""


@dataclass(frozen=True, slots=True)
class Changed:
    """The node serves the model now; or `error` says why it does not."""

    error: Text = ""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Memory that each worker process of the node uses, and readings of its device, as in `Executor`.

    It follows each `Pong`.
    """

    resident_bytes: Mapping[Name, Count]
    readings: Mapping[str, DeviceReading]


@dataclass(frozen=True, slots=True)
class Pong:
    """`sent_ns` is that of the `Ping`, `now_ns` the clock of the node."""

    sent_ns: Time
    now_ns: Time


ToNode = (
    BeginNode
    | BreakOffGroup
    | KillWorker
    | FetchBlobs
    | LeaveOrigin
    | KeepBlobs
    | CopyBlob
    | DiscardBlob
    | ReadComponents
    | RemoveModel
    | RemoveLora
    | MeasureModel
    | EndMeasuring
    | ReadModel
    | ServeModel
    | ReadLora
    | Ping
    | Leave
)
"""Messages that concern a node as a whole."""

FromNode = (
    Contents
    | Started
    | StartFailed
    | Loading
    | WorkerLost
    | WorkerJoined
    | Links
    | WorkersLeft
    | BlobsFetched
    | Leaving
    | ModelMeasured
    | LoadSpeeds
    | ModelRead
    | LoraRead
    | Changed
    | NodeMemory
    | Pong
)

THE_NODE = -1
"""Address of messages that concern the node, or come from it, and from no device."""


_OF_SKELETONS = (AddModel, SkeletonLeft)
"""Messages of processes of one machine: reading a skeleton runs code in it, so none comes over the network."""


def node_codec() -> Codec:
    """Return the codec of the messages between engine and agents."""
    every = dict.fromkeys((*get_args(ToNode), *get_args(FromNode), *get_args(Command), *get_args(Report)))
    return Codec(tuple(one for one in every if one not in _OF_SKELETONS))
