"""The live driver: turns requests and reports into events, and the controller's actions into commands.

Runs on one event loop; everything public is called on its thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

import tilework
from tilework.control.controller import Controller, ControllerConfig
from tilework.control.log import entry_line, header_line
from tilework.control.watchdog import WatchdogConfig
from tilework.core.actions import (
    Accept,
    Action,
    DropState,
    DropToBestEffort,
    Finish,
    MoveState,
    Reject,
    RunStage,
    RunSteps,
    Stop,
    WakeAt,
    jobs_of,
)
from tilework.core.checkpoint import Checkpoint, CheckpointKeeper
from tilework.core.events import (
    Cancelled,
    DeviceJoined,
    Event,
    Restored,
    Submitted,
    Woke,
)
from tilework.core.priority import DEFAULT_CLASS
from tilework.core.request import OnMiss, Request, Status
from tilework.core.time import NS_PER_S
from tilework.core.wire import Image, ModelInfo, Report, Spec
from tilework.core.work import STAGES, StageId
from tilework.cost.table import CostTable
from tilework.runtime.costs import CostCache, calibration_shapes, start_costs
from tilework.runtime.executor import Executor, WorkerStartFailed
from tilework.runtime.log_file import LogFile
from tilework.runtime.observer import Observer, Usage
from tilework.runtime.request_table import RequestTable
from tilework.runtime.state_registry import StateRegistry
from tilework.runtime.ticket import Outcome, Refusal, Ticket, Wanted
from tilework.runtime.work_dispatcher import WorkDispatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`table` is used as it is; without one the devices are measured, as far as `cache` does not know them.

    `begin_ns` is what the engine's clock shows when it is made: it may go on where a former one's has come.
    """

    controller: ControllerConfig = field(default_factory=ControllerConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    table: CostTable | None = None
    cache: CostCache | None = None
    begin_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How the engine is doing, right now. `num_jobs` are those that have not ended."""

    num_devices: int
    num_devices_up: int
    num_jobs: int
    draining: bool


@dataclass(frozen=True, slots=True)
class _Incoming:
    """A request that the controller has been told of and has not answered yet."""

    request: Request
    spec: Spec
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


class Engine:
    """One controller over one executor. `start` before anything else; `submit` answers at once.

    `log`, if given, receives the event log (`control.log`); `on_measured`, while it starts, how many of how many
    measurements are done. With a `keeper` open requests outlive the engine: the next one can `restore` them.
    """

    info: ModelInfo

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        log: TextIO | None = None,
        on_measured: Callable[[int, int], None] | None = None,
        keeper: CheckpointKeeper | None = None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._log = LogFile(log, on_lost=self._log_lost)
        self._on_measured = on_measured
        self._keeper = keeper
        self._origin_ns = time.monotonic_ns() - config.begin_ns
        self._incoming: dict[str, _Incoming] = {}
        self._requests = RequestTable()
        self._states = StateRegistry(executor)
        self._started = False
        self._draining = False
        self._stopped = False
        self._observer = Observer()

    # For the server.

    @property
    def policy(self) -> str:
        return self._config.controller.policy

    def observe(self, observer: Observer) -> None:
        """Tell this one, and no other, what happens from now on."""
        self._observer = observer
        if self._started:
            self._dispatcher.observer = observer

    async def start(self) -> None:
        """Load the model on every device and measure it. Raises WorkerStartFailed, UnknownPolicy."""
        self._loop = asyncio.get_running_loop()
        self.info = await self._executor.start(self)
        table = self._config.table or await start_costs(self._executor, self.info, self._degrees(), self._config.cache)
        if table is None:
            await self._executor.stop()
            sizes = ", ".join(map(str, calibration_shapes(self.info)))
            raise WorkerStartFailed(f"the model ran at none of {sizes}; the workers' messages say why")
        self._controller = Controller(self._config.controller, table)
        self._log.write(header_line(tilework.__version__, self._config.controller, table))
        self._dispatcher = WorkDispatcher(
            executor=self._executor,
            controller=self._controller,
            watchdog=self._config.watchdog,
            request_table=self._requests,
            states=self._states,
            keeper=self._keeper,
            observer=self._observer,
            origin_ns=self._origin_ns,
            handle=self._handle,
        )
        self._started = True
        for device_id in range(self._executor.num_devices):
            self.on_joined(device_id)

    def _log_lost(self) -> None:
        self._observer.on_log_lost()

    def _degrees(self) -> tuple[int, ...]:
        """Powers of two, as policies use them."""
        most = min(self.info.max_degree, self._executor.num_devices)
        return tuple(1 << power for power in range(most.bit_length()))

    async def stop(self) -> None:
        """End every request that is still open as cancelled, then the workers.

        With a keeper only their tickets end: what is kept of them stays, as if the process had been killed, but that
        running works may end at their next step first.
        """
        self.drain()
        if self._started:
            self._dispatcher.close()
        if self._keeper is None:
            self._end_all("the server was stopped")
        elif self._started:
            await self._dispatcher.settle()
        self._stopped = True
        for entry in self._requests:
            self._resolve(entry.ticket, Status.CANCELLED, "the server was stopped")
        self._requests.clear()
        await self._executor.stop()

    def _end_all(self, reason: str) -> None:
        for uid in self._requests.uids:
            self.cancel(uid, reason)

    def drain(self) -> None:
        """Say in `health` that no new requests are wanted; those that are in go on."""
        self._draining = True

    def now_ns(self) -> int:
        """The clock of all its times: nanoseconds since the engine was made, and `begin_ns` before that."""
        return time.monotonic_ns() - self._origin_ns

    def health(self) -> Health:
        return Health(
            num_devices=self._executor.num_devices,
            num_devices_up=len(self._dispatcher.up),
            num_jobs=self._controller.tracker.num_jobs(),
            draining=self._draining,
        )

    def usage(self) -> Usage:
        """What the engine holds, right now; takes time in proportion to the open requests."""
        tracker, now_ns = self._controller.tracker, self.now_ns()
        jobs = tracker.jobs.values()
        pids = {device_id: self._executor.pid(device_id) for device_id in range(self._executor.num_devices)}
        return Usage(
            waiting=Counter(job.request.priority for job in jobs if not job.works),
            running=Counter(job.request.priority for job in jobs if job.works),
            backlog_ns=tracker.held().device_ns + sum(max(0, device.free_ns - now_ns) for device in tracker.devices),
            state_blob_bytes=self._states.num_bytes,
            memory_bytes=dict(self._dispatcher.memory_bytes),
            pids={device_id: pid for device_id, pid in pids.items() if pid is not None},
        )

    def submit(
        self,
        specs: Mapping[str, Spec],
        *,
        deadline_ns: int | None,
        on_miss: OnMiss,
        tenant: str = "default",
        priority: str = DEFAULT_CLASS,
        weight: float = 1.0,
        tenant_weight: float = 1.0,
        room: float = 1.0,
    ) -> tuple[Ticket, ...] | Refusal:
        """Bring requests in, all of them or none. Their uids must be new; `deadline_ns` is on the engine's clock."""
        arrival_ns = self.now_ns()
        for uid, spec in specs.items():
            assert self._requests.job_id(uid) is None, f"two requests have the uid {uid}"
            wanted = Wanted(
                uid=uid,
                spec=spec,
                arrival_ns=arrival_ns,
                deadline_ns=deadline_ns,
                on_miss=on_miss,
                tenant=tenant,
                priority=priority,
                weight=weight,
                tenant_weight=tenant_weight,
                room=room,
            )
            self._incoming[uid] = _Incoming(wanted.request(self.info), spec)
        first, *others = (self._incoming[uid].request for uid in specs)
        answer = self._handle(Submitted(first, tuple(others)), arrival_ns)[0]
        if isinstance(answer, Reject):
            return Refusal(
                uid=answer.uid,
                reason=answer.reason,
                earliest_ns=answer.earliest_ns,
                code=answer.code,
                retry_ns=answer.retry_ns,
            )
        return tuple(self._requests.ticket(uid) for uid in specs)

    def restore(self, kept: Sequence[tuple[Wanted, Checkpoint]]) -> tuple[Ticket, ...]:
        """Take requests in that an engine before this one had accepted, in this order; once, before any other.

        They go on from their checkpoints, as far as these are still there. A ticket whose request cannot be served any
        more has failed already.
        """
        there = self._executor.inherit({blob for _, checkpoint in kept for blob in checkpoint.blobs})
        return tuple(self._restore(wanted, checkpoint.among(there)) for wanted, checkpoint in kept)

    def _restore(self, wanted: Wanted, checkpoint: Checkpoint) -> Ticket:
        request = wanted.request(self.info)
        self._incoming[request.uid] = _Incoming(request, wanted.spec, checkpoint)
        steps_done = None if checkpoint.conditioning is None else checkpoint.steps_done
        answer = self._handle(Restored(request, steps_done))[0]
        if isinstance(answer, Reject):
            ticket = self._ticket(request, request.arrival_ns)
            self._resolve(ticket, Status.FAILED, answer.reason)
            return ticket
        ticket = self._requests.ticket(request.uid)
        ticket.progress(checkpoint.steps_done)
        return ticket

    def release(self, uid: str) -> None:
        """The picture of a request that is done need not be made again, whatever happens: it is safe."""
        self._states.release(uid)

    def cancel(self, uid: str, reason: str) -> None:
        """End a request now; its device is free at the next step boundary. Unknown or ended uids are ignored."""
        if self._requests.job_id(uid) is not None:
            self._handle(Cancelled(uid, reason))

    def eta_ns(self, uid: str) -> int | None:
        """When an open request is expected to be done, as of now; None once it has ended."""
        job_id = self._requests.job_id(uid)
        return None if job_id is None else self._controller.eta_ns(job_id, self.now_ns())

    # For the executor.

    def on_joined(self, device_id: int) -> None:
        if not self._started:  # A worker has loaded although the start was given up meanwhile.
            return
        self._dispatcher.up.add(device_id)
        self._observer.on_joined(device_id, self.now_ns())
        stages = frozenset(StageId(self.info.name, stage) for stage in STAGES)
        self._handle(DeviceJoined(device_id, 0, stages))

    def on_lost(self, device_id: int, reason: str) -> None:
        if self._started and device_id in self._dispatcher.up:
            self._dispatcher.lose(device_id, reason)

    def on_given_up(self) -> None:
        """Nobody is left to serve what is in."""
        self._end_all("every worker was lost, and none could be started again")

    def on_report(self, device_id: int, report: Report) -> None:
        if not self._stopped:
            self._dispatcher.report(device_id, report)

    # The controller and its actions.

    def _handle(self, event: Event, now_ns: int | None = None) -> tuple[Action, ...]:
        now_ns = self.now_ns() if now_ns is None else now_ns
        began_ns = time.perf_counter_ns()
        actions = self._controller.handle(event, now_ns)
        took_ns = time.perf_counter_ns() - began_ns
        self._observer.on_decided(now_ns, took_ns, self._controller.tracker.num_waiting())
        self._log.write(entry_line(event, actions, now_ns))
        for action in actions:
            self._perform(action)
            self._note(action, now_ns)
        return actions

    def _note(self, action: Action, now_ns: int) -> None:
        """Keep an action for whoever asks why; the last one, `Finish`, is in the outcome."""
        for job_id in jobs_of(action):
            if entry := self._requests.get(job_id):
                entry.ticket.note(now_ns, action)

    def _perform(self, action: Action) -> None:
        match action:
            case Accept(job_id, uid, eta_ns):
                self._accept(job_id, uid, eta_ns)
            case Reject(uid, code=code):
                self._observer.on_refused(self._incoming.pop(uid).request, code)
            case RunStage(work) | RunSteps(work):
                self._dispatcher.run(work)
            case Stop(work_id):
                self._dispatcher.stop(work_id)
            case MoveState(job_id, targets, conditioning):
                self._dispatcher.move(job_id, targets, conditioning)
            case DropToBestEffort():
                pass
            case DropState(job_id, devices):
                self._dispatcher.forget(job_id, devices)
            case Finish(job_id, uid, status, reason):
                self._finish(job_id, uid, status, reason)
            case WakeAt(at_ns):
                delay_s = max(0, at_ns - self.now_ns()) / NS_PER_S
                self._loop.call_later(delay_s, self._wake)

    def _wake(self) -> None:
        if not self._stopped:
            self._handle(Woke())

    def _accept(self, job_id: int, uid: str, eta_ns: int) -> None:
        incoming = self._incoming.pop(uid)
        self._requests.add(job_id, incoming.spec, self._ticket(incoming.request, eta_ns))
        self._states.begin(job_id, incoming.spec, incoming.checkpoint)

    def _ticket(self, request: Request, eta_ns: int) -> Ticket:
        return Ticket(request=request, eta_ns=eta_ns, outcome=self._loop.create_future())

    def _finish(self, job_id: int, uid: str, status: Status, reason: str) -> None:
        entry = self._requests.remove(job_id)
        if self._keeper is not None and status is Status.DONE:
            self._states.hold(job_id, uid)
        else:
            self._states.end(job_id)
        self._resolve(entry.ticket, status, reason, entry.image if status is Status.DONE else None)

    def _resolve(self, ticket: Ticket, status: Status, reason: str, image: Image | None = None) -> None:
        outcome = Outcome(
            uid=ticket.request.uid,
            status=status,
            reason=reason,
            finished_ns=self.now_ns(),
            image=image,
            segments=tuple(ticket.segments),
        )
        self._observer.on_ended(ticket, outcome)
        ticket.end(outcome)
