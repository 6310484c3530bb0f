"""The driver of worker processes: connects the driver core to an executor, tickets and the observer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial

from tilework.control.controller import Controller
from tilework.control.driver.core import DriverCore
from tilework.control.driver.effects import (
    BreakOff,
    Discard,
    Effects,
    HandleEvent,
    Kill,
    Message,
    ReportStuck,
    Resolve,
    in_turn,
)
from tilework.control.driver.result import WorkResult
from tilework.control.driver.state_registry import StateMove
from tilework.control.watchdog import WatchdogConfig
from tilework.core.actions import (
    Action,
    DropComponents,
    LoadComponents,
    Measure,
    MoveState,
    ReadComponents,
    RunWork,
    Stop,
)
from tilework.core.checkpoint import Checkpoint, CheckpointKeeper
from tilework.core.events import Cancelled, ComponentsLoaded, Event, NodeCordoned
from tilework.core.request import Request
from tilework.core.time import s_from_ns
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Command, DropWeights, GroupRef, LoadWeights, NoteSaved
from tilework.core.wire.reports import Ended, Failed, KeptStates, Preview, Progress, Report, WeightsLoaded
from tilework.core.work import Group, Work
from tilework.runtime.encode_cache import EncodeCache
from tilework.runtime.executor import ExecutorBlobs, ExecutorCommands
from tilework.runtime.models.turns import DeviceTurns
from tilework.runtime.observer import Observer
from tilework.runtime.outbox import Outgoing
from tilework.runtime.request_table import RequestTable
from tilework.runtime.stuck_works import StuckWorkMonitor
from tilework.runtime.wire_commands import import_command, run_command
from tilework.runtime.work_recorder import WorkRecorder

_log = logging.getLogger(__name__)

_STOP_S = 2.0  # Longer than most steps.
_STOP_POLL_S = 0.005


class WorkDispatcher:
    """Sends works and moves to devices, and passes their results to tickets and then, by `handle`, to the controller.

    Between works devices may measure models that are added: see `turns`.
    `origin_ns` is the zero of the engine's clock on the machine's clock.
    """

    def __init__(
        self,
        commands: ExecutorCommands,
        blobs: ExecutorBlobs,
        controller: Controller,
        watchdog: WatchdogConfig,
        request_table: RequestTable,
        keeper: CheckpointKeeper | None,
        observer: Observer,
        origin_ns: int,
        handle: Callable[[Event], object],
        encode_cache: EncodeCache,
    ) -> None:
        self.up: set[int] = set()
        self.memory_bytes: dict[int, int] = {}
        self.kept: dict[int, KeptStates] = {}
        self.turns = DeviceTurns(handle, self._let_idle_go)
        self._core = DriverCore(controller, watchdog)
        self._controller = controller
        self._encode_cache = encode_cache
        self._recorder = WorkRecorder(controller, request_table, keeper, observer, origin_ns)
        self._commands = commands
        self._blobs = blobs
        self._requests = request_table
        self._handle = handle
        self._groups: dict[int, GroupRef] = {}  # By work in flight, if it has one.
        self._moves: dict[StateMove, asyncio.Future[Command | None]] = {}  # Of moves that wait for the end of a work.
        self._loads: dict[int, LoadComponents] = {}  # In progress or queued on a device.
        self._let_go: dict[int, tuple[Group, Callable[[], None]]] = {}  # Devices of nodes that leave, by node.
        self._is_stopping = False
        self._monitor = StuckWorkMonitor(self._check_stuck, watchdog.tick_ns)

    def observe(self, observer: Observer) -> None:
        """Replace the observer."""
        self._recorder.observer = observer

    @property
    def is_idle(self) -> bool:
        """True if no work, move or job is left. Devices may load ahead of need."""
        is_loading = any(not load.is_ahead for load in self._loads.values())
        return self._core.is_idle and not (self._groups or self._moves or is_loading or self.turns.devices)

    def close(self) -> None:
        """Stop the check for stuck works, and wait for no measurement."""
        self._monitor.stop()
        self.turns.close()

    async def stop_all(self) -> None:
        """Begin no further works, stop running ones, and wait until they have serialized their states."""
        self._is_stopping = True
        for work_id in self._core.work_ids:
            self.perform(Stop(work_id))
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _STOP_S
        while self._core.work_ids and loop.time() < end_s:
            await asyncio.sleep(_STOP_POLL_S)

    # States of jobs.

    def begin(self, job_id: int, request: Request, checkpoint: Checkpoint) -> None:
        """Begin a job from a checkpoint, which may be empty."""
        self._core.begin_job(job_id, request, checkpoint)

    def end(self, job_id: int) -> None:
        """End a job: discard its blobs."""
        self._core.end_job(job_id)
        self._encode_cache.forget(job_id)
        self._discard(self._core.states.end(job_id))

    def hold(self, job_id: int, uid: str) -> None:
        """End a job but hold its blobs until `release`: its image may have to be made again."""
        self._core.end_job(job_id)
        self._encode_cache.forget(job_id)
        self._core.states.hold(job_id, uid)

    def release(self, uid: str) -> None:
        """Discard the blobs that are held for a request, if any."""
        self._discard(self._core.states.release(uid))

    @property
    def state_bytes(self) -> int:
        """Size of the states of all jobs."""
        return self._core.states.num_bytes

    def _discard(self, blobs: Iterable[StateBlob]) -> None:
        for blob in blobs:
            self._blobs.discard(blob)

    # Actions of the controller.

    def perform(self, action: Action) -> None:
        """Send the messages of an action to devices. Actions without any are ignored."""
        if self._is_stopping and isinstance(action, RunWork | Measure):
            return
        if isinstance(action, ReadComponents):
            self._commands.read_ahead(action)
        elif isinstance(action, Measure):
            self.turns.begin(action)
        for devices, message in self._core.perform(action):
            outgoing = self._outgoing(message)
            for device_id in devices:
                self._commands.send(device_id, outgoing)
            if isinstance(action, MoveState):
                self._recorder.observer.on_moved(action.job_id)
            elif isinstance(action, Stop):
                self._recorder.observer.on_work_stopped(action.work_id)

    def _outgoing(self, message: Message) -> Outgoing:
        match message:
            case Work():
                return self._run(message)
            case StateMove(is_resolved=False):
                future: asyncio.Future[Command | None] = asyncio.get_running_loop().create_future()
                self._moves[message] = future
                return future
            case StateMove():
                return self._import(message)
            case LoadComponents():
                self._loads[message.load_id] = message
                return LoadWeights(message.load_id, message.components, message.forgets)
            case DropComponents():
                return DropWeights(message.components)
            case _:
                return message

    def _run(self, work: Work) -> Command:
        self._recorder.begin(work)
        group = None
        if len(work.devices) > 1:
            group = self._groups[work.work_id] = self._commands.group(work.devices)
        return run_command(work, {job_id: self._requests[job_id].spec for job_id in work.job_ids}, group)

    # Reports of devices.

    def join(self, device_id: int, now_ns: int) -> None:
        """Record that a device is up."""
        self.up.add(device_id)
        self._recorder.observer.on_joined(device_id, now_ns)

    def lose(self, device_id: int, reason: str) -> None:
        """Record that a device is lost."""
        self._forget(device_id)
        self._apply(self._core.on_device_lost(device_id, reason))

    def cordon(self, event: NodeCordoned, let_go: Callable[[], None]) -> None:
        """Send no further works to devices of a node; `let_go` is called when they have none."""
        self._handle(event)
        self._let_go[event.node] = event.device_ids, let_go
        self._let_idle_go()

    def _let_idle_go(self) -> None:
        for node, (device_ids, let_go) in list(self._let_go.items()):
            if not self._core.has_works(device_ids) and set(device_ids).isdisjoint(self.turns.devices):
                del self._let_go[node]
                let_go()

    def lose_node(self, node: int, device_ids: Group, blobs: Collection[StateBlob], reason: str) -> None:
        """Record the loss of a node, with these devices, which were up, and these blobs."""
        self._let_go.pop(node, None)
        for device_id in device_ids:
            self._forget(device_id)
        self._encode_cache.lose(blobs)
        self._apply(self._core.on_node_lost(node, device_ids, blobs, reason))

    def _forget(self, device_id: int) -> None:
        self.up.remove(device_id)
        self.memory_bytes.pop(device_id, None)
        self.kept.pop(device_id, None)
        self._loads = {load_id: load for load_id, load in self._loads.items() if load.device_id != device_id}
        self._recorder.lose(device_id)
        self._recorder.observer.on_lost(device_id)

    def report(self, device_id: int, report: Report) -> None:
        match report:
            case Progress(work_id, steps_done):
                self._core.on_progress(work_id)
                self._recorder.progress(self._core.work(work_id), self._core.members(work_id), steps_done)
            case Preview():
                self._recorder.preview(self._core.work(report.work_id), self._core.members(report.work_id), report)
            case Ended() | Failed():
                if isinstance(report, Ended):
                    self._note_memory(device_id, report)
                elif report.refuses is not None and (entry := self._requests.get(report.refuses)):
                    entry.ticket.refusal = report.refusal
                    self._handle(Cancelled(entry.ticket.request.uid, report.reason))
                self._apply(self._core.on_report(device_id, report))
            case WeightsLoaded(load_id, run_ns, dropped):
                load = self._loads.pop(load_id, None)
                if load is not None:  # Otherwise the device was taken from the controller meanwhile.
                    if not dropped:
                        self._recorder.loaded(load, run_ns)
                    self._handle(ComponentsLoaded(load_id, device_id, run_ns, dropped))
            case _:
                raise AssertionError(f"unexpected report {report!r}")

    def _note_memory(self, device_id: int, report: Ended) -> None:
        if report.memory_bytes is not None:
            self.memory_bytes[device_id] = report.memory_bytes
        if report.kept is not None:
            self.kept[device_id] = report.kept

    def _check_stuck(self) -> None:
        self._apply(self._core.check_stuck())

    def _apply(self, effects: Effects) -> None:
        for effect in in_turn(effects):
            match effect:
                case HandleEvent(event):
                    self._handle(event)
                case WorkResult():
                    self._end(effect)
                case Resolve(move):
                    self._resolve(move)
                case BreakOff(work):
                    self._commands.break_off(self._groups[work.work_id])
                case Discard(blobs):
                    self._discard(blobs)
                case ReportStuck(work, limit_ns):
                    self._stuck(work, limit_ns)
                case Kill(device_id, limit_ns):
                    self._commands.kill(device_id, f"it made no progress for {s_from_ns(limit_ns):g} s")
        self._let_idle_go()

    def _end(self, result: WorkResult) -> None:
        """Pass the result of a work to tickets, then to the controller, then to the observer."""
        self._groups.pop(result.work.work_id, None)
        self._recorder.record(result)
        self._tell_members(result)
        self._keep_encoded(result)
        if result.event is not None:
            self._handle(result.event)
        self._recorder.observe(result)
        for job_id in filter(self._core.is_paused, result.work.job_ids):
            self._requests[job_id].ticket.pause()
            if self._core.is_preempted(job_id):
                self._recorder.observer.on_preempted(job_id)

    def _tell_members(self, result: WorkResult) -> None:
        """Tell the other members of a group which blob its first device has written, so that they can spill the job.

        In a cell the first device has other workers, too.
        """
        others = result.work.devices[0 if self._commands.cell_size > 1 else 1 :]
        for job_id, position in result.members.items() if others else ():
            saved = self._core.states.saved(job_id, position + result.steps_done)
            if saved is not None:
                for device_id in others:
                    self._commands.send(device_id, NoteSaved(job_id, saved))

    def _keep_encoded(self, result: WorkResult) -> None:
        """Offer outputs that a stage has written, and that are the same for any seed, to the cache."""
        report = result.report
        for job_id in result.members.keys() & report.for_any_seed if report is not None else ():
            request = self._requests[job_id].ticket.request
            costs = self._controller.costs
            index = costs.start(request).itinerary.at[result.members[job_id]].num_done
            states = partial(self._core.states.checkpoint, job_id)
            self._encode_cache.note(job_id, request, self._requests[job_id].spec, index, costs, states)

    def _resolve(self, move: StateMove) -> None:
        self._moves.pop(move).set_result(self._import(move) if move.delivers else None)

    def _stuck(self, work: Work, limit_ns: int) -> None:
        self._recorder.observer.on_stuck(work)
        _log.warning(
            "work %d (%s of job %s) made no progress for %g s on %s; if steps may take that long, raise --stuck-after",
            *(work.work_id, work.stage, ", ".join(map(str, work.job_ids)), s_from_ns(limit_ns), work.devices),
        )

    def _import(self, move: StateMove) -> Command:
        entry = self._requests[move.job_id]
        return import_command(move, entry.ticket.request.pipeline, entry.spec)
