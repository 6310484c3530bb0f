"""The interface between the engine and its devices."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

from tilework.core.actions import ReadComponents
from tilework.core.component import LoadSource
from tilework.core.cost_row import Batch, CostRow
from tilework.core.lora import Lora, UsedLora
from tilework.core.model import LoraSource, ModelSource
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import GroupRef
from tilework.core.wire.reports import DeviceReading, LoadedModel, NotLoaded, Report, WeightsRead
from tilework.core.work import Group
from tilework.cost.profile import ProfileKey
from tilework.runtime.outbox import Outgoing


class WorkerStartFailed(RuntimeError):
    """No worker could be started; the message says why."""


class CannotRun(Exception):
    """Nothing of what was to be measured can run on these devices; the message says why, in one line."""


class ModelRefused(Exception):
    """A model or LoRA cannot be served; the message says why."""


def none_loaded(not_loaded: Sequence[NotLoaded]) -> str:
    """What the error of a start says of which no model can be loaded."""
    if len(not_loaded) == 1:
        return f"{not_loaded[0].name} cannot be loaded: {not_loaded[0].reason}"
    return "no model can be loaded: " + "; ".join(f"{one.name}: {one.reason}" for one in not_loaded)


def name_taken(name: str) -> str:
    """Why a model cannot be added under this name."""
    return f"{name} is served already; give the model another name, or remove that one before"


class Listener(Protocol):
    """Receives the reports of an executor, always on the event loop's thread."""

    def on_loading(self, num_ready: int) -> None:
        """While the devices start: `num_ready` of them have loaded the model."""

    def on_report(self, device_id: int, report: Report) -> None: ...
    def on_lost(self, device_id: int, reason: str) -> None: ...
    def on_joined(self, device_id: int) -> None: ...
    def on_links_changed(self) -> None:
        """Other accelerators than before are alone (`Executor.alone`), or it is known whether that changes soon."""

    def on_read(self, read: WeightsRead) -> None:
        """The host has read ahead of need, or could not."""

    def on_given_up(self, left: Collection[int]) -> None:
        """A device is lost and will not be restarted. Others are `left`; none if it was the last one of its kind."""


class NodesListener(Listener, Protocol):
    """Receives the reports of an executor over several nodes."""

    def on_fetched(self, origin: int, node: int, num_bytes: int, run_ns: int) -> None:
        """A node has fetched `num_bytes` of states from the node `origin`, in this time."""

    def on_node_leaving(self, node: int, device_ids: Group, reason: str, let_go: Callable[[], None]) -> None:
        """A node is about to leave, with these of its devices that are up.

        It goes after `let_go`, which is to be called when they have no works; `on_node_lost` follows.
        """

    def on_silent(self, nodes: tuple[int, ...]) -> None:
        """These nodes, and no others, have said nothing for a moment."""

    def on_node_lost(self, node: int, device_ids: Group, blobs: Collection[StateBlob], reason: str) -> None:
        """A node is lost, with those of these devices that were up, and these blobs, which no other node has."""


class Executor(Protocol):
    """Carries commands to devices, first in, first out per device.

    Its listener hears no report that cannot be: the sender is lost instead.
    """

    @property
    def num_devices(self) -> int:
        """Accelerators; their ids count from 0."""

    @property
    def cell_size(self) -> int:
        """How many workers each accelerator is. They have its weights together, and run its works together."""

    @property
    def devices_up(self) -> Group:
        """The accelerators that have loaded and are not lost."""

    @property
    def slots_up(self) -> Group:
        """The CPU slots that have loaded and are not lost."""

    @property
    def num_slots(self) -> int:
        """CPU slots, known once the devices are up; their ids follow those of the accelerators."""

    def node(self, device_id: int) -> int:
        """The node of an accelerator or CPU slot: groups lie on one node, and states are quicker there."""

    @property
    def alone(self) -> Group:
        """The accelerators that can run in no group now, up or not: none of their node is connected with them."""

    @property
    def is_linking(self) -> bool:
        """Whether some of them are being connected, which takes seconds."""

    @property
    def serving(self) -> Mapping[str, tuple[int, ...]]:
        """The accelerators of each model that not all serve, by its name; known once they are up."""

    @property
    def weights_bytes(self) -> int | None:
        """What a device has for weights: they are loaded when they are needed. None: all are there from the start."""

    @property
    def host_bytes(self) -> int | None:
        """How much of what devices have read the host keeps, known once they are up.

        None: all, or nothing is loaded.
        """

    async def start(self, listener: NodesListener) -> tuple[LoadedModel, ...]:
        """Start every device; returns the models in the order of their configuration, but those that cannot be loaded.

        Raises WorkerStartFailed.
        """

    @property
    def not_loaded(self) -> Sequence[NotLoaded]:
        """Models of the start that could not be loaded; known once it is over. The others are served."""

    def profile_key(self, model: str) -> ProfileKey:
        """Identifies hardware, model and settings of measurements; known once the devices are up."""

    def calibrate(
        self,
        model: str,
        batches: tuple[Batch, ...],
        degree: int = 1,
        num_runs: int | None = None,
        loras: tuple[UsedLora, ...] = (),
        known: frozenset[str] = frozenset(),
        devices: Group | None = None,
    ) -> Awaitable[tuple[CostRow, ...]]:
        """Measure a model; `known` stages are run, not timed.

        With no runs (0) all are only warmed up, and the last of these runs is timed. The answer raises
        WorkerStartFailed if a device is lost, and CannotRun if none can run any of the batches.

        Without `devices` it is measured on all accelerators that serve it at once, in groups of `degree`. The weights
        of the model and of these LoRAs are loaded before, and stay until others are needed. On these `devices`, which
        are `degree`, it is measured once, between the commands that were sent to them before this call and those that
        are sent after it; nothing stays there. If a device has no room for all weights, it loads those of each stage
        when it comes to that.
        """

    async def end_calibration(self) -> Mapping[LoadSource, float]:
        """Drop the weights that were loaded to measure and have stayed.

        Returns the speeds at which sources gave such weights, in bytes per second.
        """

    async def read_model(self, source: ModelSource, served: Collection[str]) -> LoadedModel:
        """Read a further model, beside what devices do. Raises ModelRefused, also if its name is one of `served`.

        `add_model` or `remove_model` must follow.
        """

    async def add_model(self, source: ModelSource) -> None:
        """Let all devices serve a model that was read; the source has its name. Raises ModelRefused."""

    async def add_lora(self, model: str, lora: LoraSource) -> Lora:
        """Let requests for a model use another LoRA, on all devices. Raises ModelRefused."""

    def remove_model(self, model: str) -> None:
        """Forget a model that was read, and let no device serve it any more."""

    def remove_lora(self, model: str, name: str) -> None:
        """Let requests for a model use a LoRA no more."""

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        """Memory of the workers that there are, by device: "0"; in a cell by device and rank: "0.1".

        Shared pages included; only where there is /proc.
        """

    @property
    def readings(self) -> Mapping[str, DeviceReading]:
        """What the device of each worker said of itself last, by the same names; only of CUDA devices."""

    @property
    def bad_reports(self) -> Mapping[int, int]:
        """How often the node at each place was lost, or a worker there, since it had reported what cannot be."""

    def send(self, device_id: int, outgoing: Outgoing) -> None: ...
    def read_ahead(self, read: ReadComponents) -> None:
        """Let the host read components; `on_read` follows. It reads once at a time."""

    def group(self, devices: Group) -> GroupRef:
        """The group of these devices, for commands that are sent next."""

    def break_off(self, ref: GroupRef) -> None:
        """End a group, since one member cannot continue."""

    def kill(self, device_id: int, reason: str) -> None:
        """Kill the worker of a device; `on_lost` with this reason follows."""

    def inherit(self, blobs: Collection[StateBlob]) -> set[StateBlob]:
        """Keep the blobs of an earlier server; returns those that still exist.

        Call it once, before any blob is written; all other blobs of that server are removed.
        """

    def copy(self, blob: StateBlob) -> StateBlob | None:
        """Another name for what a blob holds, to be discarded by itself; None if that is gone."""

    def discard(self, blob: StateBlob) -> None:
        """Remove a blob that is no longer needed."""

    async def stop(self) -> None: ...
