"""Worker processes of several nodes as one executor: an agent on each node, a connection to each agent."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from tilework.comm.net.channel import Channel
from tilework.comm.net.frames import BadFrame
from tilework.comm.net.limits import BadMessage
from tilework.control.nodes.blobs import NodeBlobs
from tilework.control.nodes.numbers import DeviceNumbers
from tilework.control.nodes.places import NodePlaces
from tilework.core.actions import ReadComponents
from tilework.core.component import LoadSource
from tilework.core.cost_row import Batch, CostRow
from tilework.core.lora import Lora, UsedLora
from tilework.core.model import LoraSource, ModelSource, SimulatedSource
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Command, GroupRef, ImportState
from tilework.core.wire.node_blobs import BlobsFetched, KeepBlobs
from tilework.core.wire.reports import DeviceReading, Ended, LoadedModel, NotLoaded, Report, WeightsRead
from tilework.core.work import Group
from tilework.cost.profile import ProfileKey
from tilework.runtime.executor import NodesListener, WorkerStartFailed, none_loaded
from tilework.runtime.links.groups import GroupTable
from tilework.runtime.nodes.agent_port import AgentPort
from tilework.runtime.nodes.config import NodesConfig
from tilework.runtime.nodes.departures import Departures
from tilework.runtime.nodes.measuring import NodeMeasuring
from tilework.runtime.nodes.messages import (
    BeginNode,
    BreakOffGroup,
    Contents,
    KillWorker,
    Leave,
    Leaving,
    Links,
    Loading,
    MeasureModel,
    Started,
    StartFailed,
    WorkerJoined,
    WorkerLost,
    WorkersLeft,
)
from tilework.runtime.nodes.models import NodeModels
from tilework.runtime.nodes.node_check import OF_DEVICES, NodeCheck
from tilework.runtime.nodes.remote_node import LAST_WORD_S, RemoteNode, with_devices
from tilework.runtime.outbox import Outgoing

_log = logging.getLogger(__name__)
_OUTDATED = "the models have changed while it was started"


class AgentStarter(Protocol):
    """Starts the agents of a server, and ends them. Both may wait, and are called on a thread."""

    def start(self, num_nodes: int, host: str, port: int, token: bytes) -> None:
        """Let this number of agents connect to this address. Raises WorkerStartFailed."""

    def close(self) -> None: ...


class NodesExecutor:
    """An `Executor` of agents (`nodes.agent`), which connect to it.
    It starts when the least number of agents that it needs have connected, by default as many as there are places.

    A node that is lost leaves its place to the next agent that connects. All nodes have the same models, hardware and
    number of workers. A job continues on another node from its blobs: that node fetches them from the one that has
    them.

    Each message of an agent is checked. An impossible message loses its node, and ends its agent, which is broken.

    Agents that have waited for this server bring workers that are up, and blobs, to be `inherit`ed. When a durable
    server stops, they wait again.
    """

    def __init__(self, config: NodesConfig, starter: AgentStarter | None = None) -> None:
        """Prepare to start. `starter` starts the agents; without one they are started by hand."""
        self._config = config
        each = config.each
        self._starter = starter
        self._port = AgentPort(config, self._serve)
        self._num_each = config.num_devices_each
        self._numbers = DeviceNumbers(num_nodes=config.num_nodes, num_workers=self._num_each, num_slots=0)
        self._places = NodePlaces[RemoteNode](config.num_nodes)
        self._nodes = self._places.there
        self._models = NodeModels(each.sources, self._nodes)
        self._measuring = NodeMeasuring(self._nodes)
        self._check = NodeCheck(each=each)
        self._bad_reports = Counter[int]()
        self._first: Started | None = None
        self._groups = GroupTable(max_per_worker=1 << 30)  # Agents close groups that have not been used for long.
        prefix = f"copy-{secrets.token_hex(6)}"  # No name is ever used again.
        self._blobs = NodeBlobs(self._nodes, fetch_s=config.fetch_s, copies=config.state_copies, prefix=prefix)
        self._departures = Departures(self._blobs)
        self._absence: asyncio.TimerHandle | None = None
        self._may_inherit = each.owner is not None
        self._has_started = self._is_stopping = False

    # Properties.

    @property
    def port(self) -> int:
        """Port at which agents connect, once it has begun to start."""
        return self._port.number

    @property
    def nodes(self) -> Mapping[int, RemoteNode]:
        """Current nodes, by their place."""
        return self._nodes

    @property
    def num_devices(self) -> int:
        return self._numbers.num_accelerators

    @property
    def num_slots(self) -> int:
        return self._numbers.num_nodes * self._numbers.num_slots

    def node(self, device_id: int) -> int:
        return self._numbers.node(device_id)

    @property
    def devices_up(self) -> Group:
        return tuple(device_id for device_id in self._up() if device_id < self.num_devices)

    @property
    def slots_up(self) -> Group:
        return tuple(device_id for device_id in self._up() if device_id >= self.num_devices)

    @property
    def alone(self) -> Group:
        nodes = self._nodes.values()
        return tuple(sorted(self._numbers.of(node.node, one) for node in nodes for one in node.links.alone))

    @property
    def is_linking(self) -> bool:
        return any(node.links.is_linking for node in self._nodes.values())

    def _up(self) -> list[int]:
        staying = (node for node in self._nodes.values() if node.leave is None)
        return sorted(self._numbers.of(node.node, one) for node in staying for one in node.up)

    @property
    def host(self) -> str:
        """Host on which it listens for agents."""
        return self._config.host

    @property
    def address(self) -> str | None:
        """HOST:PORT at which agents connect, once it has begun to start."""
        return self._port.address

    @property
    def most_nodes(self) -> int:
        return self._config.num_nodes

    @property
    def least_nodes(self) -> int:
        return self._config.num_first

    @property
    def node_names(self) -> Mapping[str, Group]:
        """Accelerators of each node whose workers are up, by the name of its agent."""
        there = {node.started.name: node.node for node in self._nodes.values() if node.started is not None}
        return {name: self._numbers.all_of(place)[: self._num_each] for name, place in there.items()}

    @property
    def serving(self) -> Mapping[str, tuple[int, ...]]:
        return self._models.serving

    @property
    def weights_bytes(self) -> int | None:
        return self._config.each.weights_bytes

    @property
    def host_bytes(self) -> int | None:
        return None if self._first is None else self._first.host_bytes

    def profile_key(self, model: str) -> ProfileKey:
        return self._models.keys[model]

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        """Memory of workers, as nodes last reported it."""
        return {
            self._name(node, worker): num_bytes
            for node in self._nodes.values()
            for worker, num_bytes in node.resident_bytes.items()
        }

    @property
    def readings(self) -> Mapping[str, DeviceReading]:
        """Readings of devices, as nodes last reported them."""
        return {
            self._name(node, worker): reading
            for node in self._nodes.values()
            for worker, reading in node.readings.items()
        }

    @property
    def bad_reports(self) -> Mapping[int, int]:
        return {place: self._bad_reports[place] for place in range(self._config.num_nodes)}

    def _name(self, node: RemoteNode, worker: str) -> str:
        """Return the name of a node's worker in this executor."""
        on_node, dot, rank = worker.partition(".")
        return f"{self._numbers.of(node.node, int(on_node))}{dot}{rank}"

    @property
    def cell_size(self) -> int:
        return self._config.each.cell_size

    # Start and end.

    async def listen(self) -> None:
        """Let agents connect from now on. Raises OSError."""
        await self._port.listen()

    @property
    def not_loaded(self) -> Sequence[NotLoaded]:
        return self._models.not_loaded

    def report_to(self, listener: NodesListener) -> None:
        self._listener = listener

    async def start(self, listener: NodesListener) -> tuple[LoadedModel, ...]:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._port.admit()
        await self._port.listen()
        timeout_s = self._config.each.start_timeout_s
        try:
            if self._starter is not None:
                where = self._config.num_nodes, self._config.host, self.port, self._config.token
                await self._loop.run_in_executor(None, self._starter.start, *where)
            async with asyncio.timeout(timeout_s):
                await self._ready
            self._has_started = True
        except TimeoutError:
            num = sum(node.started is not None for node in self._nodes.values())
            await self.stop()
            raise WorkerStartFailed(
                f"{num} of {self._config.num_first} nodes connected within {timeout_s:g} s; start an agent on each: "
                f"tilework agent {self._config.host}:{self._config.port or '...'}"
            ) from None
        except WorkerStartFailed:
            await self.stop()
            raise
        assert self._first is not None
        return tuple(one for one in self._first.models if one.info.name in self._models.keys)

    async def stop(self) -> None:
        self._is_stopping = True
        if self._absence is not None:
            self._absence.cancel()
        self._port.close()
        for node in list(self._nodes.values()):  # Others may end meanwhile.
            if self._config.each.owner is None or self._starter is not None or not self._has_started:
                node.tell(Leave("the server has ended"))
                await node.channel.drain()
            else:
                node.channel.close()
        await self._port.ended(self._config.each.stop_grace_s)
        if self._starter is not None:
            await self._loop.run_in_executor(None, self._starter.close)

    async def _serve(self, channel: Channel) -> None:
        place = self._places.free
        if place is None or self._is_stopping:
            channel.send(Leave(f"all {self._config.num_nodes} places for nodes are taken"))
            await channel.drain()
            return
        begin = self._begin(place)
        num_models = len(begin.models) + len(begin.simulated)
        pinged = self._config.ping_s, self._config.silence_s
        node = RemoteNode(place, channel, *pinged, self._models.version, num_models, self._tell_silent)
        self._places.take(place, node)
        node.tell(begin)
        reason = "its agent has closed the connection"
        try:
            async for address, message in channel.messages():
                # Called later, so that a bug in handling a report does not end the connection.
                self._loop.call_soon(self._handle, node, address, message, time.monotonic_ns())
        except BadMessage as error:
            self._loop.call_soon(self._reject, node, error)
            await channel.discard(LAST_WORD_S)
        except BadFrame as error:
            reason = str(error)
        finally:
            reason = f"it said nothing for {self._config.silence_s:g} s" if node.is_silent else reason
            self._loop.call_soon(self._end, node, reason)

    def _tell_silent(self) -> None:
        """Report which nodes have sent nothing for a moment."""
        if self._ready.done() and not self._is_stopping:
            self._listener.on_silent(tuple(sorted(one.node for one in self._nodes.values() if one.may_be_lost)))

    def _end(self, node: RemoteNode, reason: str, last_word: Leave | None = None) -> None:
        """End the connection to a node, if it is still open with this last word."""
        node.close(reason, last_word)
        self._lose(node, reason)

    def _begin(self, place: int) -> BeginNode:
        each = self._config.each
        return BeginNode(
            node=place,
            silence_s=self._config.silence_s,
            models=tuple(self._on_node(one, place) for one in self._models.to_begin if isinstance(one, ModelSource)),
            simulated=tuple(one for one in self._models.to_begin if isinstance(one, SimulatedSource)),
            num_workers=each.num_workers,
            num_slots=each.num_slots,
            weights_bytes=each.weights_bytes,
            states_bytes=each.states_bytes,
            cache_bytes=each.cache_bytes,
            cell_size=each.cell_size,
            collectives=each.collectives,
        )

    def _on_node(self, source: ModelSource, place: int) -> ModelSource:
        """Return a model with those of its devices that lie on a node, by their numbers there."""
        if source.devices is None:
            return source
        here = (one for one in source.devices if self._numbers.node(one) == place)
        return replace(source, devices=tuple(map(self._numbers.on_node, here)))

    # Messages of nodes.

    def _handle(self, node: RemoteNode, address: int, message: Any, received_ns: int) -> None:
        if not self._places.is_current(node.node, node):
            return
        node.heard(message, received_ns)
        try:
            self._check.check(node, address, message, received_ns)
        except BadMessage as error:
            self._reject(node, error)
            return
        if isinstance(message, OF_DEVICES):
            self._report(node, self._numbers.of(node.node, address), message)
        elif not node.take(message, received_ns):
            self._on_message(node, message)

    def _reject(self, node: RemoteNode, error: BadMessage) -> None:
        """Handle an impossible message: the node is lost, and its agent, which may send more, is told to end."""
        if self._places.is_current(node.node, node):
            self._bad_reports[node.node] += 1
            reason = f"it has sent an impossible message: {error}"
            node.leave = None
            self._end(node, reason, Leave(reason, is_final=True))

    def _on_message(self, node: RemoteNode, message: Any) -> None:
        match message:
            case Started():
                self._on_started(node, message)
            case StartFailed(reason):
                self._fail_start(f"node {node.node} could not start: {reason}")
                self._dismiss(node, Leave(f"node {node.node} could not start: {reason}"))
            case Contents(contents):
                node.contents = contents
                if (differs := self._models.content_difference(node)) is not None:
                    self._send_away(node, differs)
            case Loading():
                if not self._ready.done():
                    self._listener.on_loading(sum(len(one.up) for one in self._nodes.values()) + message.num_ready)
            case WorkerLost() | WorkerJoined() | WorkersLeft():
                self._on_workers(node, message)
            case BlobsFetched():
                self._on_fetched(node, message)
            case Links():
                node.links = message
                self._listener.on_links_changed()
            case Leaving(reason):
                self._dismiss(node, Leave(reason, is_final=True))
            case WeightsRead():
                node.reads.discard(message.read_id)
                self._listener.on_read(message)
            case _:
                raise AssertionError(f"unexpected message {message!r}")

    def _report(self, node: RemoteNode, device_id: int, report: Report) -> None:
        if isinstance(report, Ended):
            self._blobs.written(report.blobs.values(), node)
        self._listener.on_report(device_id, report)
        if isinstance(report, Ended):
            self._blobs.copy_to_others(report.blobs.values(), node)

    def _on_started(self, node: RemoteNode, started: Started) -> None:
        """Let a node whose workers are up join, unless others are still awaited for the start."""
        if node.leave is not None:  # The node was sent away, and has not read that yet.
            return
        if self._models.is_outdated(node.models_version):
            self._dismiss(node, Leave(_OUTDATED))
            return
        if started.not_loaded and not self._ready.done():
            self._models.leave_out(node.node, started.not_loaded)
            if not self._models.sources:
                self._fail_start(none_loaded(self._models.not_loaded))
                return
            if self._first is not None:
                self._dismiss(node, Leave(_OUTDATED))
                return
        if self._first is None:
            self._first = started
            self._models.take(started)
            self._numbers = DeviceNumbers(
                num_nodes=self._config.num_nodes,
                num_workers=self._num_each,
                num_slots=started.num_slots,
            )
        elif (differs := self._difference(self._first, started)) is not None:
            self._send_away(node, differs)
            return
        node.begin(started, self._num_each, partial(self._prepared, node), self._blobs.is_taken)
        if started.blobs and not self._may_inherit:
            node.tell(KeepBlobs(()))
        if self._absence is not None:
            self._absence.cancel()
        if self._ready.done():
            _log.warning("node %d has joined from %s", node.node, node.channel.host)
            for device_id in self._numbers.all_of(node.node):
                self._listener.on_joined(device_id)
        elif sum(one.started is not None for one in self._nodes.values()) == self._config.num_first:
            self._ready.set_result(None)

    def _send_away(self, node: RemoteNode, differs: str) -> None:
        """Send away a node that is not like the others; `differs` describes the difference."""
        reason = f"node {node.node} {differs}: all nodes of a server must be alike"
        self._fail_start(reason)
        self._dismiss(node, Leave(reason, differs=True))

    def _fail_start(self, reason: str) -> None:
        """Fail the start: a server starts with all its nodes or not at all. A serving one goes on without the node."""
        if self._ready.done():
            _log.error("%s", reason)
        else:
            self._ready.set_exception(WorkerStartFailed(reason))

    def _on_fetched(self, node: RemoteNode, answer: BlobsFetched) -> None:
        missing = set(node.fetches[answer.fetch_id].blobs) - set(answer.blobs)
        origin = self._blobs.fetched(answer, node)
        if any(map(self._blobs.nodes, missing)):  # A blob that was discarded meanwhile is not missed.
            _log.warning("node %d: %s", node.node, answer.reason)
        if origin is not None:
            self._listener.on_fetched(origin, node.node, sum(blob.num_bytes for blob in answer.blobs), answer.run_ns)
        self._departures.go_on()

    def _on_workers(self, node: RemoteNode, change: WorkerLost | WorkerJoined | WorkersLeft) -> None:
        match change:
            case WorkerLost(on_node, reason):
                device_id = self._numbers.of(node.node, on_node)
                node.lose(on_node)
                self._groups.forget_device(device_id)
                self._listener.on_lost(device_id, reason)
            case WorkerJoined(on_node):
                node.up.add(on_node)
                if node.leave is None:
                    self._listener.on_joined(self._numbers.of(node.node, on_node))
            case WorkersLeft(left):
                node.left = frozenset(left)
                self._listener.on_given_up(self._left())
                if not left:
                    reason = "its workers were lost, and none could be started again"
                    self._dismiss(node, Leave(reason))

    def _left(self) -> Collection[int]:
        """Return the devices that are not given up; none if all accelerators are, or all CPU slots."""
        left = {self._numbers.of(node.node, one) for node in self._nodes.values() for one in node.left}
        kinds = range(self.num_devices), range(self.num_devices, self.num_devices + self.num_slots)
        return () if any(kind and left.isdisjoint(kind) for kind in kinds) else left

    def dismiss(self, place: int, reason: str) -> None:
        """Let the node at this place leave, and its agent end: see `_dismiss`. Without a node nothing happens."""
        if (node := self._nodes.get(place)) is not None:
            self._dismiss(node, Leave(reason, is_final=True))

    def _dismiss(self, node: RemoteNode, leave: Leave) -> None:
        """Let a node leave: it gets no further works, and is told to go when its states are on other nodes.

        Nothing happens if it is leaving already.
        """
        if node.leave is not None:
            return
        node.leave = leave
        if node.started is None or not self._ready.done():
            node.tell(leave)
            return
        _log.warning("node %d leaves: %s", node.node, leave.reason)
        up = tuple(sorted(self._numbers.of(node.node, one) for one in node.up))
        self._listener.on_node_leaving(node.node, up, leave.reason, partial(self._departures.begin, node))

    def _lose(self, node: RemoteNode, reason: str) -> None:
        """Handle the end of a node's connection: its devices are lost, and the states that only it had."""
        if not self._places.lose(node.node, node):
            return
        reason = reason if node.leave is None else f"it has left: {node.leave.reason}"
        devices = self._numbers.all_of(node.node) if node.started is not None else ()
        for device_id in devices:
            self._groups.forget_device(device_id)
        gone = self._blobs.lose(node)
        self._departures.lost(node)
        if self._is_stopping:
            return
        if not self._ready.done() and node.leave != Leave(_OUTDATED):
            self._fail_start(f"node {node.node} was lost: {reason}")
        elif node.leave is None:
            _log.error("node %d was lost: %s", node.node, reason)
        elif node.started is not None:  # The reason has been logged.
            _log.warning("node %d has left", node.node)
        if node.started is not None:
            self._listener.on_node_lost(node.node, devices, gone, reason)
        if node.may_be_lost:
            self._tell_silent()
        for read_id in sorted(node.reads):
            self._listener.on_read(WeightsRead(read_id, False))
        if not self._nodes:
            self._absence = self._loop.call_later(self._config.absent_s, self._listener.on_given_up, ())

    # Commands.

    def send(self, device_id: int, outgoing: Outgoing) -> None:
        """Send a command. Nothing is sent to a node that is lost."""
        node = self._nodes.get(self.node(device_id))
        if node is not None and node.started is not None:
            node.send(self._numbers.on_node(device_id), outgoing)

    def _prepared(self, node: RemoteNode, command: Command) -> Command:
        """Return a command in the node's numbers. First let the node fetch the blobs that it lacks for an import."""
        if isinstance(command, ImportState):
            self._blobs.bring([state.blob for state in command.states], node)
        return with_devices(command, self._numbers)

    def read_ahead(self, read: ReadComponents) -> None:
        node = self._nodes.get(read.node)
        if node is None:
            self._loop.call_soon(self._listener.on_read, WeightsRead(read.read_id, False))
        else:
            node.reads.add(read.read_id)
            node.tell(read)

    def kill(self, device_id: int, reason: str) -> None:
        node = self._nodes.get(self.node(device_id))
        if node is not None:
            node.tell(KillWorker(self._numbers.on_node(device_id), reason))

    def group(self, devices: Group) -> GroupRef:
        ref, _ = self._groups.use(devices)
        return ref

    def break_off(self, ref: GroupRef) -> None:
        node = self._nodes.get(self.node(ref.devices[0]))
        self._groups.forget(ref)
        if node is not None:
            node.tell(BreakOffGroup(ref.group_id, tuple(self._numbers.on_node(one) for one in ref.devices)))

    # Blobs.

    def inherit(self, blobs: Collection[StateBlob]) -> set[StateBlob]:
        self._may_inherit = False  # The blobs of a node that comes later are not used any more.
        found = set[StateBlob]()
        for node in self._nodes.values():
            if node.started is not None and node.started.blobs:
                names = set(node.started.blobs)
                kept = tuple(blob for blob in blobs if blob.name in names)
                node.tell(KeepBlobs(kept))
                self._blobs.written(kept, node)
                found.update(kept)
        return found

    def copy(self, blob: StateBlob) -> StateBlob | None:
        return self._blobs.copy(blob)

    def discard(self, blob: StateBlob) -> None:
        self._blobs.discard(blob)

    # Models.

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
        serving = self.serving.get(model, range(self.num_devices)) if devices is None else devices
        on_node = None if devices is None else tuple(map(self._numbers.on_node, devices))
        asked = MeasureModel(
            model=model,
            batches=batches,
            degree=degree,
            num_runs=num_runs,
            loras=loras,
            known=known,
            devices=on_node,
        )
        return self._measuring.run(asked, {self._numbers.node(one) for one in serving})

    async def end_calibration(self) -> Mapping[LoadSource, float]:
        return await self._measuring.end()

    async def read_model(self, source: ModelSource, served: Collection[str]) -> LoadedModel:
        return await self._models.read(source, served)

    async def add_model(self, source: ModelSource) -> None:
        await self._models.add(source)

    async def add_lora(self, model: str, lora: LoraSource) -> Lora:
        return await self._models.add_lora(model, lora)

    def remove_model(self, model: str) -> None:
        self._models.remove(model)

    def remove_lora(self, model: str, name: str) -> None:
        self._models.remove_lora(model, name)

    def _difference(self, first: Started, other: Started) -> str | None:
        """Return what another node has instead of what the first has; None if they are alike."""
        if first.num_slots != other.num_slots:
            return f"has {other.num_slots} CPU slots, not {first.num_slots}"
        return self._models.difference(other)
