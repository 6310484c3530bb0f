"""Receives the reports of an engine's devices: passes them to the dispatcher, and what changes to the controller."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tilework.control.controller import Controller
from tilework.core.events import (
    Cancelled,
    ComponentsRead,
    DeviceJoined,
    LinksChanged,
    NodeCordoned,
    NodesSilent,
    StatesFetched,
)
from tilework.core.graph.stage import DeviceKind
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.reports import Report, WeightsRead
from tilework.core.work import Group
from tilework.runtime.control_loop import ControlLoop
from tilework.runtime.executor import Executor, NodesListener
from tilework.runtime.request_table import RequestTable
from tilework.runtime.work_dispatcher import WorkDispatcher


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceListener(NodesListener):
    """The listener of an executor whose engine serves."""

    executor: Executor
    controller: Controller
    control: ControlLoop
    dispatcher: WorkDispatcher
    requests: RequestTable
    now_ns: Callable[[], int]
    _links: LinksChanged = field(default_factory=lambda: LinksChanged((), False))

    def on_joined(self, device_id: int) -> None:
        self.dispatcher.join(device_id, self.now_ns())
        is_slot = device_id >= self.executor.num_devices
        kind = DeviceKind.CPU if is_slot else DeviceKind.ACCELERATOR
        room = None if is_slot else self.executor.weights_bytes
        read = tuple(component.digest for component in self.controller.costs.weights.all)  # When it started.
        there = () if room is not None else read
        self.control.handle(DeviceJoined(device_id, self.executor.node(device_id), kind, there, room, read))

    def on_links_changed(self) -> None:
        links = LinksChanged(self.executor.alone, self.executor.is_linking)
        if links != self._links:
            self._links = links
            self.control.handle(links)

    def on_lost(self, device_id: int, reason: str) -> None:
        if device_id in self.dispatcher.up:
            self.dispatcher.lose(device_id, reason)

    def on_fetched(self, origin: int, node: int, num_bytes: int, run_ns: int) -> None:
        self.control.handle(StatesFetched(origin, node, num_bytes, run_ns))

    def on_node_leaving(self, node: int, device_ids: Group, reason: str, let_go: Callable[[], None]) -> None:
        if not self.control.is_stopped:
            up = tuple(device_id for device_id in device_ids if device_id in self.dispatcher.up)
            self.dispatcher.cordon(NodeCordoned(node, up, reason), let_go)

    def on_silent(self, nodes: tuple[int, ...]) -> None:
        self.control.handle(NodesSilent(nodes))

    def on_node_lost(self, node: int, device_ids: Group, blobs: Collection[StateBlob], reason: str) -> None:
        if not self.control.is_stopped:
            up = tuple(device_id for device_id in device_ids if device_id in self.dispatcher.up)
            self.dispatcher.lose_node(node, up, blobs, reason)

    def on_given_up(self, left: Collection[int]) -> None:
        """Fail the open requests that no worker is left to serve."""
        requests = [entry.ticket.request for entry in self.requests]
        unserved = self.controller.costs.pools.unserved({one.pipeline for one in requests}, left)
        for request in requests:
            if request.pipeline in unserved and self.requests.job_id(request.uid) is not None:
                reason = "every worker that a stage needs was lost, and none could be started again"
                self.control.handle(Cancelled(request.uid, reason))

    def on_read(self, read: WeightsRead) -> None:
        self.control.handle(ComponentsRead(read.read_id, read.is_kept))

    def on_report(self, device_id: int, report: Report) -> None:
        if self.control.is_stopped:
            return
        try:
            self.dispatcher.report(device_id, report)
        except Exception as error:  # Of the controller, which has failed then, or of what is known of works in flight.
            self.control.fail(error, report)
            raise
