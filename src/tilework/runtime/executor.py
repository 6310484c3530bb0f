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
    """No batch of a measurement can run on these devices; the message says why, in one line."""


class ModelRefused(Exception):
    """A model or LoRA cannot be served; the message says why."""


def none_loaded(not_loaded: Sequence[NotLoaded]) -> str:
    """Return the message for a start of which no model can be loaded."""
    if len(not_loaded) == 1:
        return f"{not_loaded[0].name} cannot be loaded: {not_loaded[0].reason}"
    return "no model can be loaded: " + "; ".join(f"{one.name}: {one.reason}" for one in not_loaded)


def name_taken(name: str) -> str:
    """Return why a model cannot be added under this name."""
    return f"{name} is served already; give the model another name, or remove that one first"


class Listener:
    """Receives the reports of an executor, always on the event loop's thread. This base ignores them."""

    def on_loading(self, num_ready: int) -> None:
        """Note that `num_ready` devices have loaded the model; called while the devices start."""

    def on_report(self, device_id: int, report: Report) -> None: ...
    def on_lost(self, device_id: int, reason: str) -> None: ...
    def on_joined(self, device_id: int) -> None: ...
    def on_links_changed(self) -> None:
        """Note that other accelerators are alone (`Executor.alone`), or that it is known whether that changes soon."""

    def on_read(self, read: WeightsRead) -> None:
        """Note that the host has read ahead of need, or could not."""

    def on_given_up(self, left: Collection[int]) -> None:
        """Note that a device is lost for good. Others are `left`; none if it was the last one of its kind."""


class NodesListener(Listener):
    """Receives the reports of an executor over several nodes."""

    def on_fetched(self, origin: int, node: int, num_bytes: int, run_ns: int) -> None:
        """Note that a node has fetched `num_bytes` of states from the node `origin`, in this time."""

    def on_node_leaving(self, node: int, device_ids: Group, reason: str, let_go: Callable[[], None]) -> None:
        """Note that a node is about to leave, with these of its devices that are up.

        The node goes after `let_go`, which is to be called when they have no works; `on_node_lost` follows.
        """

    def on_silent(self, nodes: tuple[int, ...]) -> None:
        """Note that exactly these nodes have sent nothing for a moment."""

    def on_node_lost(self, node: int, device_ids: Group, blobs: Collection[StateBlob], reason: str) -> None:
        """Note the loss of a node, with those of these devices that were up, and blobs that no other node has."""


class ExecutorDevices(Protocol):
    """The devices of an executor: which there are, how they are connected, what they report of themselves."""

    @property
    def num_devices(self) -> int:
        """Number of accelerators; their ids count from 0."""

    @property
    def num_slots(self) -> int:
        """Number of CPU slots, known once the devices are up; their ids follow those of the accelerators."""

    @property
    def devices_up(self) -> Group:
        """Accelerators that have loaded and are not lost."""

    @property
    def slots_up(self) -> Group:
        """CPU slots that have loaded and are not lost."""

    def report_to(self, listener: NodesListener) -> None:
        """Let another listener have all further reports."""

    def node(self, device_id: int) -> int:
        """Return the node of an accelerator or CPU slot: groups lie on one node, and states move faster there."""

    @property
    def alone(self) -> Group:
        """Accelerators that can run in no group now, up or not: no other one of their node is connected with them."""

    @property
    def is_linking(self) -> bool:
        """True if some of them are being connected, which takes seconds."""

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        """Memory of the existing workers, by device: "0"; in a cell by device and rank: "0.1".

        Shared pages included; only where there is /proc.
        """

    @property
    def readings(self) -> Mapping[str, DeviceReading]:
        """Latest readings that the device of each worker has reported, by the same names; only of CUDA devices."""

    @property
    def bad_reports(self) -> Mapping[int, int]:
        """Number of times that the node at each place, or a worker there, was lost after an impossible report."""

    async def start(self, listener: NodesListener) -> tuple[LoadedModel, ...]:
        """Start every device; returns the models that can be loaded, in the order of their configuration.

        Raises WorkerStartFailed.
        """

    async def stop(self) -> None:
        """End every device. May be called twice, or without `start`."""


class ExecutorModels(Protocol):
    """The models of an executor: what its devices serve and have room for, how that changes, what it costs."""

    @property
    def serving(self) -> Mapping[str, tuple[int, ...]]:
        """Accelerators of each model that not all serve, by its name; known once they are up."""

    @property
    def not_loaded(self) -> Sequence[NotLoaded]:
        """Models of the start that could not be loaded; known once the start is over. The others are served."""

    @property
    def weights_bytes(self) -> int | None:
        """Memory of a device for weights, which are loaded when they are needed. None: all are there from the start."""

    @property
    def host_bytes(self) -> int | None:
        """Bytes that the host keeps of what devices have read, known once they are up.

        None: no limit, or no weights are loaded on demand.
        """

    def profile_key(self, model: str) -> ProfileKey:
        """Return the hardware, model and settings that identify measurements; known once the devices are up."""

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

        With no runs (0) all stages are only warmed up, and the last of these runs is timed. The answer raises
        WorkerStartFailed if a device is lost, and CannotRun if no device can run any of the batches.

        Without `devices` the model is measured on all accelerators that serve it at once, in groups of `degree`. The
        weights of the model and of these LoRAs are loaded before, and stay until others are needed. With `devices`, of
        which there are `degree`, it is measured once, after the commands that were sent to them before this call and
        before those that are sent later; no weights stay there. If a device has no room for all weights, it loads those
        of each stage before it measures the stage.
        """

    async def end_calibration(self) -> Mapping[LoadSource, float]:
        """Drop the weights that were loaded for measurements and have stayed.

        Returns the speeds at which sources gave such weights, in bytes per second.
        """

    async def read_model(self, source: ModelSource, served: Collection[str]) -> LoadedModel:
        """Read a further model while devices run works. Raises ModelRefused, also if its name is one of `served`.

        `add_model` or `remove_model` must follow.
        """

    async def add_model(self, source: ModelSource) -> None:
        """Let all devices serve a model that was read; the source has its name. Raises ModelRefused."""

    async def add_lora(self, model: str, lora: LoraSource) -> Lora:
        """Let requests for a model use another LoRA, on all devices. Raises ModelRefused."""

    def remove_model(self, model: str) -> None:
        """Forget a model that was read, and let no device serve it any more."""

    def remove_lora(self, model: str, name: str) -> None:
        """Stop letting requests for a model use a LoRA."""


class ExecutorCommands(Protocol):
    """The way of commands to the devices of an executor, first in, first out per device."""

    @property
    def cell_size(self) -> int:
        """Number of workers that form each accelerator. They hold its weights together, and run its works together."""

    def send(self, device_id: int, outgoing: Outgoing) -> None:
        """Send a command after the earlier ones; nothing is sent to a lost device."""

    def group(self, devices: Group) -> GroupRef:
        """Return the group of these devices, for commands that are sent next."""

    def break_off(self, ref: GroupRef) -> None:
        """End a group, since one member cannot continue."""

    def kill(self, device_id: int, reason: str) -> None:
        """Kill the worker of a device; `on_lost` with this reason follows."""

    def read_ahead(self, read: ReadComponents) -> None:
        """Let the host read components; `on_read` follows. It does one read at a time."""


class ExecutorBlobs(Protocol):
    """The state blobs that the devices of an executor have written."""

    def inherit(self, blobs: Collection[StateBlob]) -> set[StateBlob]:
        """Keep the blobs of an earlier server; returns those that still exist.

        To be called once, before any blob is written; all other blobs of that server are removed.
        """

    def copy(self, blob: StateBlob) -> StateBlob | None:
        """Give a blob another name, to be discarded on its own; None if the blob is gone."""

    def discard(self, blob: StateBlob) -> None:
        """Remove a blob that is no longer needed."""


class Executor(ExecutorDevices, ExecutorModels, ExecutorCommands, ExecutorBlobs, Protocol):
    """All that an engine asks of its devices.

    Its listener gets no impossible report: the sender is lost instead.
    """
