"""The agent of a node: starts its workers, and carries commands and reports between them and the engine."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from tilework.comm.net.channel import Channel
from tilework.comm.net.files import FileServer, fetch_file
from tilework.comm.net.frames import BadFrame
from tilework.comm.net.handshake import TIMEOUT_S, Refused, join
from tilework.core.actions import ReadComponents
from tilework.core.cost_row import CostRow
from tilework.core.model import ModelSource
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Command, Execute, GroupRef, ImportState, RemoveLora, RemoveModel
from tilework.core.wire.node_blobs import (
    BlobsFetched,
    CopyBlob,
    DiscardBlob,
    FetchBlobs,
    KeepBlobs,
    LeaveOrigin,
    Origin,
)
from tilework.core.wire.reports import Report, WeightsRead
from tilework.core.work import Group
from tilework.runtime.executor import CannotRun, Listener, ModelRefused, WorkerStartFailed
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.nodes.messages import (
    THE_NODE,
    BeginNode,
    BreakOffGroup,
    Changed,
    Contents,
    EndMeasuring,
    KillWorker,
    Leave,
    Leaving,
    Links,
    Loading,
    LoadSpeeds,
    LoraRead,
    MeasureModel,
    ModelMeasured,
    ModelRead,
    NodeMemory,
    Ping,
    Pong,
    ReadLora,
    ReadModel,
    ServeModel,
    Started,
    StartFailed,
    WorkerJoined,
    WorkerLost,
    WorkersLeft,
    node_codec,
)
from tilework.runtime.nodes.node_workers import NodeWorkers
from tilework.runtime.nodes.session_chores import end_if_failed
from tilework.worker.models.contents import NodeContents

_log = logging.getLogger(__name__)
_RETRY_S = 0.25
_AFTER_FAILURE_S = 5.0  # Pause before workers that could not start are started again.
_FIRST_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0  # Pause before a server for which other nodes differ is asked again.
_MOST_WORKS = 8  # Works of a group whose groups of workers are remembered.
_CONNECT_S = 5.0  # A machine that is off refuses nothing, and the kernel would go on trying for minutes.
_READ_S = 0.05  # Time in which a suspended agent reads what has come meanwhile, before it counts a server as silent.
_FIRST_SILENCE_S = 10.0  # Until the server has sent how long it may be silent.
Address = tuple[str, int]
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Servers:
    """Addresses where a server listens for agents, or its standby will, and their common token. May change any time."""

    addresses: Sequence[Address]
    token: bytes


@dataclass(slots=True)
class _Tries:
    """The end of the last try at an address, and the time of the next one, on the clock of the loop.

    The next try is put off by `pause_s` if this node differs from others there, or is not admitted, each time longer.
    """

    reason: str = ""
    due_s: float = 0.0
    pause_s: float = 0.0

    def ended(self, agent: _Agent | None, reason: str, host: str, port: int, *, is_refused: bool) -> None:
        """Record the end of a try, of this agent if it got so far. A reason is logged once, until it changes."""
        if reason != self.reason:
            _log.warning("this node belongs to no server at %s:%d: %s", host, port, reason)
        self.reason = reason
        is_for_longer = is_refused or (agent is not None and agent.differs)
        self.pause_s = min(max(_FIRST_PAUSE_S, 2 * self.pause_s), _MOST_PAUSE_S) if is_for_longer else 0.0
        usual_s = _AFTER_FAILURE_S if agent is not None and agent.has_failed else _RETRY_S
        self.due_s = asyncio.get_running_loop().time() + (self.pause_s or usual_s)


async def serve_node(
    servers: Servers, leaving: asyncio.Event | None = None, name: str | None = None, wait_s: float = 60.0
) -> None:
    """Be a node of the server that listens at one of these addresses, and of the next server when that one has ended.

    Ends when cancelled, or when the server lets the node go: because the node asks for that, or after `leaving` was
    set. By then the server has given the node's work and states to other nodes. If a server is gone without a message,
    the workers wait `wait_s` for the next one. A server for which this node differs from others is asked again after a
    pause that grows. `name` is the name of this node for servers (default: `default_name`).
    """
    # Starting workers imports this, which takes seconds, and a node must not be silent for that time.
    await asyncio.to_thread(importlib.import_module, "tilework.worker.process")
    codec = node_codec()
    leaving = leaving or asyncio.Event()
    all_tries: dict[Address, _Tries] = {}
    workers = NodeWorkers(wait_s)
    try:
        while not leaving.is_set():
            host, port = min(servers.addresses, key=lambda one: all_tries.setdefault(one, _Tries()).due_s)
            token = servers.token
            tries = all_tries[host, port]
            agent = None
            is_refused = False
            if (left_s := tries.due_s - asyncio.get_running_loop().time()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, _RETRY_S)):  # The server's address may change meanwhile.
                        await leaving.wait()
                continue
            try:
                reader, writer = await _connection(host, port)
                try:
                    channel = Channel(reader, writer, codec, await join(reader, writer, token, codec.digest))
                    agent = _Agent(channel, token, leaving, name or default_name(), workers)
                    reason = await agent.run()
                finally:
                    writer.close()
            except (OSError, TimeoutError) as error:  # Refused and BadFrame are among these.
                reason = _said(error)
                is_refused = isinstance(error, Refused)
            tries.ended(agent, reason, host, port, is_refused=is_refused)
    finally:
        await workers.close()


def _said(error: Exception) -> str:
    """Return what has happened to a connection, in words."""
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    return str(error) or f"it has not answered within {TIMEOUT_S:g} s"


async def _connection(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection. Raises OSError; TimeoutError if nothing answers there."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            return await asyncio.open_connection(host, port)
    except TimeoutError:
        raise TimeoutError(f"nothing there has answered within {_CONNECT_S:g} s") from None


def default_name() -> str:
    """Return the name of an agent that was given none: its machine and its process."""
    return f"{socket.gethostname()}-{os.getpid()}"


class _Agent(Listener):
    """One session with an engine, which has the workers of this node: it is their `Listener`.

    They end when the engine lets the node go. When the session breaks off, they wait for the next one. When the node is
    `leaving`, it asks the engine to let it go. The engine may also do that unasked.
    """

    def __init__(self, channel: Channel, token: bytes, leaving: asyncio.Event, name: str, workers: NodeWorkers) -> None:
        self._channel = channel
        self._token = token
        self._leaving = leaving
        self._name = name
        self._workers = workers
        self._executor: LocalExecutor | None = None  # None until its workers are up.
        self._contents = NodeContents()
        self.has_failed = False  # Workers could not start, or a chore that the session needs failed.
        self.differs = False  # The server that has let it go said so.
        self._heard_s = time.monotonic()
        self._silence = ""
        self._watching: asyncio.Task[None] | None = None
        self._files: FileServer | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._fetches: dict[asyncio.Task[None], Origin] = {}
        self._coming: dict[str, asyncio.Task[None]] = {}  # By the name of a blob.
        # The engine's id, and the workers' groups by work: the members of a work must know the same group.
        self._groups: dict[Group, tuple[int, dict[int, GroupRef]]] = {}
        self._broken: set[int] = set()  # Ids of those that were broken off.

    async def run(self) -> str:
        """Handle messages until the engine lets it go or is gone; returns why. Raises BadFrame."""
        self._begin_chore(self._ask_to_leave())
        self._watch(_FIRST_SILENCE_S)
        let_go: Leave | None = None
        try:
            async for address, message in self._channel.messages():
                self._heard_s = time.monotonic()
                if isinstance(message, Leave):
                    let_go = message
                    break
                self._handle(address, message)
        except BadFrame:
            if not self._silence:
                raise
        finally:
            for task in self._tasks:
                task.cancel()
            self._contents.close()
            if self._files is not None:
                self._files.close()
            if let_go is None:
                self._workers.wait({ref for _, refs in self._groups.values() for ref in refs.values()})
        if let_go is not None:
            if let_go.is_final:
                self._leaving.set()
            self.differs = let_go.differs
            await self._workers.let_go()
            return let_go.reason
        return self._silence or "the server has closed the connection"

    def _watch(self, silence_s: float) -> None:
        """Break off the session if, from now on, the server sends nothing for this time."""
        if self._watching is not None:
            self._watching.cancel()
        self._watching = self._begin_chore(self._watch_for_silence(silence_s))

    async def _watch_for_silence(self, silence_s: float) -> None:
        while (left_s := self._heard_s + silence_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
            await asyncio.sleep(_READ_S)
        self._silence = f"the server has said nothing for {silence_s:g} s"
        self._channel.abort()

    def _handle(self, address: int, message: Any) -> None:
        if isinstance(message, Ping):
            self._channel.send(Pong(message.sent_ns, time.monotonic_ns()))
            if self._executor is not None:
                self._channel.send(NodeMemory(self._executor.resident_bytes, self._executor.readings))
        elif isinstance(message, BeginNode):
            self._begin_chore(self._start(message))
        elif self._executor is not None:
            if address == THE_NODE:
                self._change(self._executor, message)
            else:
                self._send(self._executor, address, message)

    async def _ask_to_leave(self) -> None:
        """Ask for leave when the node is leaving. Without workers that are up there is nothing to hand over."""
        await self._leaving.wait()
        if self._files is None:
            self._channel.close()
        else:
            self._channel.send(Leaving("its agent was told to end"))

    def _begin_task(self, coroutine: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin_chore(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task that nothing waits for, and that the session needs."""
        task = self._begin_task(coroutine)
        task.add_done_callback(self._chore_ended)
        return task

    def _chore_ended(self, task: asyncio.Task[None]) -> None:
        self.has_failed |= end_if_failed(self._channel, task)

    async def _start(self, begin: BeginNode) -> None:
        self._watch(begin.silence_s)
        await self._tell_contents(begin.models)
        try:
            executor = await self._workers.begin(begin, self.on_loading)
        except (WorkerStartFailed, OSError) as error:
            self.has_failed = True
            self._channel.send(StartFailed(str(error)))
            return
        self._files = FileServer(executor.blobs.path, self._token, self._channel.epoch)
        await self._files.start(self._channel.own_host)
        self._executor = executor
        self._channel.send(self._started(executor, self._files.port))
        _log.warning("this node works for the server at %s", self._channel.host)
        self._workers.attach(self)
        await self._read_whole()

    async def _tell_contents(self, sources: Sequence[ModelSource]) -> None:
        """Send the contents of model files before workers load them, in vain if they differ between nodes."""
        await asyncio.to_thread(self._contents.add, sources)
        self._channel.send(Contents(self._contents.models))

    async def _read_whole(self) -> None:
        """Read all of the weights, of which only samples were sent, while works run; send their contents."""
        if await asyncio.get_running_loop().run_in_executor(self._contents.thread, self._contents.read_whole):
            self._channel.send(Contents(self._contents.models))

    def _started(self, executor: LocalExecutor, port: int) -> Started:
        keys = {one.info.name: executor.profile_key(one.info.name) for one in self._workers.models}
        return Started(
            models=self._workers.models,
            keys=keys,
            num_slots=executor.num_slots,
            host_bytes=executor.host_bytes,
            port=port,
            name=self._name,
            blobs=tuple(sorted(executor.blobs.names)),
            not_loaded=tuple(executor.not_loaded),
        )

    def _send(self, executor: LocalExecutor, device_id: int, command: Command) -> None:
        """Pass a command on. An import waits for its blobs, and later commands wait for the import."""
        match command:
            case Execute(group=GroupRef() as group):
                executor.send(device_id, replace(command, group=self._group(executor, group, command.work_id)))
            case ImportState() if coming := self._coming_for(command):
                executor.send(device_id, self._begin_task(_after(coming, command)))
            case _:
                executor.send(device_id, command)

    def _coming_for(self, command: ImportState) -> list[asyncio.Task[None]]:
        names = [one.blob.name for one in command.states]
        return list(dict.fromkeys(self._coming[name] for name in names if name in self._coming))

    def _group(self, executor: LocalExecutor, group: GroupRef, work_id: int) -> GroupRef:
        """Return the workers' group for a work. The engine gives a group another number after it was broken off.

        A group that was broken off stays so. Otherwise it is a new one if the workers have been reconnected meanwhile.
        """
        refs = self._refs(group)
        if work_id not in refs:
            is_broken = group.group_id in self._broken and refs
            refs[work_id] = next(reversed(refs.values())) if is_broken else executor.group(group.devices)
            if len(refs) > _MOST_WORKS:
                del refs[next(iter(refs))]
        return refs[work_id]

    def _refs(self, group: GroupRef) -> dict[int, GroupRef]:
        number, refs = self._groups.get(group.devices, (0, dict[int, GroupRef]()))
        if number != group.group_id:
            self._broken.discard(number)
            refs = {}
            self._groups[group.devices] = group.group_id, refs
        return refs

    def _break_off(self, executor: LocalExecutor, message: BreakOffGroup) -> None:
        """End a group, also if none of its commands has come yet: later ones are then for a group that is broken."""
        group = GroupRef(message.group_id, message.devices)
        if not self._refs(group):
            self._group(executor, group, 0)
        self._broken.add(message.group_id)
        for ref in dict.fromkeys(self._refs(group).values()):
            executor.break_off(ref)

    def _change(self, executor: LocalExecutor, message: Any) -> None:
        match message:
            case BreakOffGroup():
                self._break_off(executor, message)
            case KillWorker(device_id, reason):
                executor.kill(device_id, reason)
            case FetchBlobs():
                self._fetch(executor, message)
            case LeaveOrigin(origin):
                for task in [one for one, where in self._fetches.items() if where == origin]:
                    task.cancel()
            case KeepBlobs(blobs):
                executor.blobs.keep_only(blobs)
            case CopyBlob(blob, name):
                executor.blobs.copy(blob, name)
            case DiscardBlob(blob):
                executor.discard(blob)
            case ReadComponents():
                executor.read_ahead(message)
            case _:
                self._change_models(executor, message)

    def _change_models(self, executor: LocalExecutor, message: Any) -> None:
        match message:
            case MeasureModel():
                self._measure(executor, message)
            case EndMeasuring():
                self._begin_chore(self._end_measuring(executor))
            case RemoveModel(model):
                self._workers.note_change()
                self._contents.remove(model)
                executor.remove_model(model)
            case RemoveLora(model, name):
                self._workers.note_change()
                executor.remove_lora(model, name)
            case ReadModel() | ServeModel() | ReadLora():
                self._workers.note_change()
                self._begin_chore(self._add(executor, message))
            case _:
                raise BadFrame(f"a node does not handle {type(message).__name__}")

    def _measure(self, executor: LocalExecutor, asked: MeasureModel) -> None:
        """Measure at once: later commands for these workers are sent to them after the measurement."""
        what = asked.model, asked.batches, asked.degree, asked.num_runs, asked.loras, asked.known, asked.devices
        self._begin_chore(self._answer_measured(executor.calibrate(*what)))

    async def _answer_measured(self, rows: Awaitable[tuple[CostRow, ...]]) -> None:
        try:
            self._channel.send(ModelMeasured(await rows))
        except (WorkerStartFailed, CannotRun) as error:
            self._channel.send(ModelMeasured((), str(error), isinstance(error, CannotRun)))

    async def _end_measuring(self, executor: LocalExecutor) -> None:
        self._channel.send(LoadSpeeds(await executor.end_calibration()))

    async def _add(self, executor: LocalExecutor, message: ReadModel | ServeModel | ReadLora) -> None:
        """Read or serve a model, or read a LoRA; send the result."""
        try:
            match message:
                case ReadModel(source, served):
                    await self._tell_contents([source])
                    model = await executor.read_model(source, served)
                    self._channel.send(ModelRead(model, executor.profile_key(model.info.name)))
                case ServeModel(source):
                    await executor.add_model(source)
                    self._channel.send(Changed())
                    await self._read_whole()
                case ReadLora(name, lora):
                    self._channel.send(LoraRead(await executor.add_lora(name, lora)))
        except ModelRefused as refused:
            answers = {ReadModel: ModelRead, ServeModel: Changed, ReadLora: LoraRead}
            self._channel.send(answers[type(message)](error=str(refused)))

    # Blobs of other nodes.

    def _fetch(self, executor: LocalExecutor, message: FetchBlobs) -> None:
        fetched = list[StateBlob]()
        task = self._begin_task(self._fetch_all(executor, message, fetched))
        self._fetches[task] = message.origin
        self._coming |= {blob.name: task for blob in message.blobs}
        task.add_done_callback(partial(self._answer_fetch, message, fetched, time.monotonic_ns()))

    async def _fetch_all(self, executor: LocalExecutor, message: FetchBlobs, fetched: list[StateBlob]) -> None:
        """Fetch one blob after another into `fetched`. Raises FetchFailed: without one the others are of no use."""
        for blob in message.blobs:
            path = executor.blobs.path / blob.name
            await fetch_file(message.origin, self._token, blob.name, path, message.timeout_s)
            executor.blobs.add(blob)
            fetched.append(blob)

    def _answer_fetch(
        self, message: FetchBlobs, fetched: list[StateBlob], begin_ns: int, task: asyncio.Task[None]
    ) -> None:
        """Send the result of a fetch, also of one that was cancelled before it could begin."""
        del self._fetches[task]
        for blob in message.blobs:
            del self._coming[blob.name]
        reason = "its node was lost" if task.cancelled() else str(task.exception() or "")
        run_ns = time.monotonic_ns() - begin_ns
        self._channel.send(BlobsFetched(message.fetch_id, tuple(fetched), run_ns, reason))

    # For the executor.

    def on_loading(self, num_ready: int) -> None:
        self._channel.send(Loading(num_ready))

    def on_report(self, device_id: int, report: Report) -> None:
        self._channel.send(report, device_id)

    def on_lost(self, device_id: int, reason: str) -> None:
        self._channel.send(WorkerLost(device_id, reason))

    def on_joined(self, device_id: int) -> None:
        self._channel.send(WorkerJoined(device_id))

    def on_links_changed(self) -> None:
        if self._executor is not None:
            self._channel.send(Links(self._executor.alone, self._executor.is_linking))

    def on_read(self, read: WeightsRead) -> None:
        self._channel.send(read)

    def on_given_up(self, left: Collection[int]) -> None:
        self._channel.send(WorkersLeft(tuple(sorted(left))))


async def _after(coming: Iterable[asyncio.Task[None]], command: ImportState) -> Command | None:
    """Return the import, once its blobs have come or cannot: then the worker reports that it lacks them."""
    await asyncio.wait(coming)
    return command
