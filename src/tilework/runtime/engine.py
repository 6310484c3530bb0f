"""The live driver: turns requests and reports into events, and the controller's actions into commands.

Runs on one event loop; everything public is called on its thread.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TextIO

import tilework
from tilework.control.controller import Controller, ControllerConfig
from tilework.control.log import entry_line, header_line
from tilework.core.actions import (
    Accept,
    Action,
    DropState,
    Finish,
    MoveState,
    Reject,
    RunStage,
    RunSteps,
    Stop,
    WakeAt,
)
from tilework.core.events import (
    Cancelled,
    Event,
    GpuJoined,
    GpuLost,
    StageFinished,
    StepsFinished,
    Stopped,
    Submitted,
    Woke,
    WorkFailed,
)
from tilework.core.request import OnMiss, Request, Shape, Status
from tilework.core.time import NS_PER_S
from tilework.core.wire import (
    Command,
    Decode,
    Denoise,
    Encode,
    Ended,
    Exported,
    ExportState,
    Failed,
    Forget,
    Image,
    ImportState,
    ModelInfo,
    Progress,
    Report,
    Spec,
    StopWork,
)
from tilework.core.work import DIFFUSE, ENCODE, STAGES, StageId, Work
from tilework.cost.table import CostTable
from tilework.runtime.executor import Executor, WorkerStartFailed
from tilework.runtime.ticket import Outcome, Refusal, Segment, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`hardware` names what the cost table was measured on."""

    controller: ControllerConfig = field(default_factory=ControllerConfig)
    hardware: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How the engine is doing, right now. A running job has work on a device, or queued there as the next one."""

    num_devices: int
    num_devices_up: int
    num_jobs: int
    num_running: int
    draining: bool


@dataclass(slots=True, kw_only=True, eq=False)
class _Live:
    """What the engine keeps of an accepted request beside its ticket."""

    spec: Spec
    ticket: Ticket
    image: Image | None = None
    steps_before_work: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    """A job's state on its way: what its target's queue waits for."""

    job_id: int
    source: int
    arrival: asyncio.Future[Command]

    def arrive(self, blob: bytes | None) -> None:
        """`blob` is None if the source was lost, or did not have the job."""
        self.arrival.set_result(ImportState(self.job_id, blob))


class Engine:
    """One controller over one executor. `start` before anything else; `submit` answers at once.

    `log`, if given, receives the event log (`control.log`).
    """

    info: ModelInfo

    def __init__(self, config: EngineConfig, executor: Executor, log: TextIO | None = None) -> None:
        self._config = config
        self._executor = executor
        self._log = log
        self._origin_ns = time.monotonic_ns()
        self._incoming: dict[str, tuple[Request, Spec]] = {}
        self._live: dict[int, _Live] = {}
        self._job_ids: dict[str, int] = {}
        self._works: dict[int, Work] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._next_transfer_id = 0
        self._up: set[int] = set()
        self._draining = False

    # For the server.

    async def start(self) -> None:
        """Load the model on every device and measure it. Raises WorkerStartFailed, UnknownPolicy."""
        self._loop = asyncio.get_running_loop()
        self.info = await self._executor.start(self)
        shapes = calibration_shapes(self.info)
        rows = await self._executor.calibrate(shapes)
        if not rows:
            await self._executor.stop()
            sizes = ", ".join(map(str, shapes))
            raise WorkerStartFailed(f"the model ran at none of {sizes}; the workers' messages say why")
        table = CostTable(hardware=self._config.hardware, rows=rows)
        self._controller = Controller(self._config.controller, table)
        self._write(header_line(tilework.__version__, self._config.controller, table))
        for gpu in range(self._executor.num_gpus):
            self.on_joined(gpu)

    async def stop(self) -> None:
        """End every request that is still open as cancelled, then the workers."""
        self.drain()
        self._end_all("the server was stopped")
        await self._executor.stop()

    def _end_all(self, reason: str) -> None:
        for uid in list(self._job_ids):
            self.cancel(uid, reason)

    def drain(self) -> None:
        """Say in `health` that no new requests are wanted; those that are in go on."""
        self._draining = True

    def now_ns(self) -> int:
        """Nanoseconds since the engine was made; the clock of all its times."""
        return time.monotonic_ns() - self._origin_ns

    def health(self) -> Health:
        tracker = self._controller.tracker
        return Health(
            num_devices=self._executor.num_gpus,
            num_devices_up=len(self._up),
            num_jobs=tracker.num_jobs(),
            num_running=tracker.num_jobs() - tracker.num_waiting(),
            draining=self._draining,
        )

    def submit(
        self,
        spec: Spec,
        *,
        uid: str,
        deadline_ns: int | None,
        on_miss: OnMiss,
        tenant: str = "default",
        priority: int = 0,
    ) -> Ticket | Refusal:
        """Bring a request in. `uid` must be new; `deadline_ns` is on the engine's clock."""
        assert uid not in self._job_ids, f"two requests have the uid {uid}"
        request = Request(
            uid=uid,
            pipeline=self.info.name,
            shape=spec.shape,
            steps=spec.steps,
            arrival_ns=self.now_ns(),
            seed=spec.seed,
            deadline_ns=deadline_ns,
            on_miss=on_miss,
            tenant=tenant,
            priority=priority,
            guided=spec.guidance_scale > 1,
        )
        self._incoming[uid] = request, spec
        answer = self._handle(Submitted(request), request.arrival_ns)[0]
        if isinstance(answer, Reject):
            return Refusal(uid=uid, reason=answer.reason, earliest_ns=answer.earliest_ns)
        return self._live[self._job_ids[uid]].ticket

    def cancel(self, uid: str, reason: str) -> None:
        """End a request now; its device is free at the next step boundary. Unknown or ended uids are ignored."""
        if uid in self._job_ids:
            self._handle(Cancelled(uid, reason))

    # For the executor.

    def on_joined(self, gpu: int) -> None:
        self._up.add(gpu)
        stages = frozenset(StageId(self.info.name, stage) for stage in STAGES)
        self._handle(GpuJoined(gpu, 0, stages))

    def on_lost(self, gpu: int, reason: str) -> None:
        if gpu not in self._up:
            return
        self._up.remove(gpu)
        lost = [transfer_id for transfer_id, transfer in self._transfers.items() if transfer.source == gpu]
        for transfer_id in lost:
            self._transfers.pop(transfer_id).arrive(None)
        self._works = {work_id: work for work_id, work in self._works.items() if gpu not in work.gpus}
        self._handle(GpuLost(gpu, reason))

    def on_given_up(self) -> None:
        """Nobody is left to serve what is in."""
        self._end_all("every worker was lost, and none could be started again")

    def on_report(self, gpu: int, report: Report) -> None:
        match report:
            case Progress(work_id, steps_done):
                self._progress(work_id, steps_done)
            case Ended():
                self._ended(report)
            case Failed(work_id, reason):
                if self._works.pop(work_id, None) is not None:
                    self._handle(WorkFailed(work_id, reason))
            case Exported(transfer_id, blob):
                self._transfers.pop(transfer_id).arrive(blob)
            case _:
                raise AssertionError(f"unexpected report {report!r}")

    def _progress(self, work_id: int, steps_done: int) -> None:
        for live in self._members(self._works.get(work_id)):
            live.ticket.steps_done = live.steps_before_work + steps_done

    def _ended(self, ended: Ended) -> None:
        work = self._works.pop(ended.work_id, None)
        if work is None:  # From a worker already declared lost.
            return
        for live in self._members(work):
            self._record(live, work, ended)
        run_ns = ended.end_ns - ended.start_ns
        if ended.stopped:
            self._handle(Stopped(work.work_id, ended.steps_done))
        elif work.stage.name == DIFFUSE:
            self._handle(StepsFinished(work.work_id, run_ns))
        else:
            self._handle(StageFinished(work.work_id, run_ns))

    def _members(self, work: Work | None) -> list[_Live]:
        return [self._live[job_id] for job_id in work.job_ids if job_id in self._live] if work else []

    def _record(self, live: _Live, work: Work, ended: Ended) -> None:
        """Add a finished work to the story of a request."""
        segment = Segment(
            stage=work.stage.name,
            gpus=work.gpus,
            num_steps=ended.steps_done,
            start_ns=ended.start_ns - self._origin_ns,
            end_ns=ended.end_ns - self._origin_ns,
        )
        ticket = live.ticket
        ticket.segments.append(segment)
        if ticket.first_start_ns is None:
            ticket.first_start_ns = segment.start_ns
        if work.stage.name == ENCODE:  # A new attempt begins its steps again.
            live.steps_before_work = 0
        elif work.stage.name == DIFFUSE:
            live.steps_before_work += ended.steps_done
        ticket.steps_done = live.steps_before_work
        live.image = ended.image

    # The controller and its actions.

    def _handle(self, event: Event, now_ns: int | None = None) -> tuple[Action, ...]:
        now_ns = self.now_ns() if now_ns is None else now_ns
        actions = self._controller.handle(event, now_ns)
        self._write(entry_line(event, actions, now_ns))
        for action in actions:
            self._perform(action)
        return actions

    def _write(self, line: str) -> None:
        if self._log is not None:
            self._log.write(line + "\n")
            self._log.flush()

    def _perform(self, action: Action) -> None:
        match action:
            case Accept(job_id, uid, eta_ns):
                self._accept(job_id, uid, eta_ns)
            case Reject(uid):
                del self._incoming[uid]
            case RunStage(work) | RunSteps(work):
                self._works[work.work_id] = work
                self._send_work(work)
            case Stop(work_id):
                for gpu in self._works[work_id].gpus:
                    self._executor.send(gpu, StopWork(work_id))
            case MoveState(job_id, source, target, conditioning):
                self._move(job_id, source, target, conditioning)
            case DropState(job_id, gpus):
                for gpu in gpus:
                    self._executor.send(gpu, Forget(job_id))
            case Finish(job_id, uid, status, reason):
                self._finish(job_id, uid, status, reason)
            case WakeAt(at_ns):
                delay_s = max(0, at_ns - self.now_ns()) / NS_PER_S
                self._loop.call_later(delay_s, self._handle, Woke())

    def _accept(self, job_id: int, uid: str, eta_ns: int) -> None:
        request, spec = self._incoming.pop(uid)
        ticket = Ticket(request=request, eta_ns=eta_ns, outcome=self._loop.create_future())
        self._live[job_id] = _Live(spec=spec, ticket=ticket)
        self._job_ids[uid] = job_id

    def _send_work(self, work: Work) -> None:
        (job_id,) = work.job_ids
        for gpu in work.gpus:
            match work.stage.name:
                case "encode":
                    self._executor.send(gpu, Encode(work.work_id, job_id, self._live[job_id].spec))
                case "diffuse":
                    self._executor.send(gpu, Denoise(work.work_id, job_id, work.num_steps))
                case "decode":
                    self._executor.send(gpu, Decode(work.work_id, job_id))

    def _move(self, job_id: int, source: int, target: int, conditioning: bool) -> None:
        """The target's queue waits for the blob, as a future; the source exports behind its own queue."""
        transfer_id = self._next_transfer_id
        self._next_transfer_id += 1
        arrival: asyncio.Future[Command] = self._loop.create_future()
        self._transfers[transfer_id] = _Transfer(job_id=job_id, source=source, arrival=arrival)
        self._executor.send(source, ExportState(job_id, transfer_id, conditioning))
        self._executor.send(target, arrival)

    def _finish(self, job_id: int, uid: str, status: Status, reason: str) -> None:
        live = self._live.pop(job_id)
        del self._job_ids[uid]
        outcome = Outcome(
            uid=uid,
            status=status,
            reason=reason,
            finished_ns=self.now_ns(),
            image=live.image if status is Status.DONE else None,
            segments=tuple(live.ticket.segments),
        )
        if not live.ticket.outcome.done():  # The waiter may have been cancelled itself.
            live.ticket.outcome.set_result(outcome)


def calibration_shapes(info: ModelInfo) -> tuple[Shape, ...]:
    """Squares of half, one and one and a half times the default size, as far as the model goes."""
    sides = {round(info.default_height * share / info.side_multiple) * info.side_multiple for share in (0.5, 1.0, 1.5)}
    return tuple(Shape(side, side) for side in sorted(sides) if info.side_multiple <= side <= info.max_side)
