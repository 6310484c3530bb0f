"""The live driver: turns requests and reports into events, and the controller's actions into commands.

Runs on one event loop; everything public is called on its thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

import tilework
from tilework.control.controller import Controller, ControllerConfig
from tilework.control.log import entry_line, header_line
from tilework.control.watchdog import Watchdog, WatchdogConfig
from tilework.core.actions import (
    Accept,
    Action,
    DropState,
    Finish,
    MoveState,
    Reject,
    RunStage,
    RunSteps,
    SetAside,
    Stop,
    WakeAt,
    jobs_of,
)
from tilework.core.checkpoint import Checkpoint, CheckpointKeeper
from tilework.core.classes import DEFAULT_CLASS
from tilework.core.events import (
    Cancelled,
    Event,
    GpuJoined,
    GpuLost,
    Restored,
    Submitted,
    Woke,
    WorkFailed,
)
from tilework.core.request import OnMiss, Request, Status
from tilework.core.time import NS_PER_S
from tilework.core.wire import (
    Command,
    Decode,
    Denoise,
    Encode,
    Ended,
    Failed,
    Forget,
    Image,
    ModelInfo,
    Parcel,
    Preview,
    Progress,
    Report,
    Spec,
    StopWork,
)
from tilework.core.work import ENCODE, STAGES, StageId, Work
from tilework.cost.table import CostTable
from tilework.runtime.cargo import Cargo
from tilework.runtime.costs import CostCache, calibration_shapes, start_costs
from tilework.runtime.executor import Executor, WorkerStartFailed
from tilework.runtime.flights import Flight, Flights, Landing, is_cut_off
from tilework.runtime.log_file import LogFile
from tilework.runtime.lookout import Lookout
from tilework.runtime.observer import EndedWork, Ending, Observer, Usage
from tilework.runtime.ticket import Outcome, Refusal, Segment, Ticket, Wanted
from tilework.runtime.ticket import Preview as TicketPreview

_SETTLE_S = 2.0  # Longer than most steps take.
_SETTLE_POLL_S = 0.005


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


@dataclass(slots=True, kw_only=True, eq=False)
class _Live:
    """What the engine keeps of an accepted request beside its ticket; `last_work` is its latest."""

    spec: Spec
    ticket: Ticket
    image: Image | None = None
    last_work: Work | None = None


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
        self._live: dict[int, _Live] = {}
        self._job_ids: dict[str, int] = {}
        self._flights = Flights()
        self._cargo = Cargo(executor)
        self._up: set[int] = set()
        self._memory_bytes: dict[int, int] = {}
        self._draining = False
        self._lookout: Lookout | None = None
        self._settling = False
        self._stopped = False
        self._observer = Observer()

    # For the server.

    @property
    def policy(self) -> str:
        return self._config.controller.policy

    def observe(self, observer: Observer) -> None:
        """Tell this one, and no other, what happens from now on."""
        self._observer = observer

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
        self._lookout = self._look_out()
        for gpu in range(self._executor.num_gpus):
            self.on_joined(gpu)

    def _look_out(self) -> Lookout:
        config = self._config.watchdog
        self._watchdog = Watchdog(self._controller.tracker, self._controller.costs, config)
        return Lookout(self._watchdog, config.tick_ns, self._flights, self._executor, self._stuck)

    def _stuck(self, work: Work) -> None:
        self._observer.on_stuck(work)

    def _log_lost(self) -> None:
        self._observer.on_log_lost()

    def _degrees(self) -> tuple[int, ...]:
        """Powers of two, as policies use them."""
        most = min(self.info.max_degree, self._executor.num_gpus)
        return tuple(1 << power for power in range(most.bit_length()))

    async def stop(self) -> None:
        """End every request that is still open as cancelled, then the workers.

        With a keeper only their tickets end: what is kept of them stays, as if the process had been killed, but that
        running works may end at their next step first.
        """
        self.drain()
        if self._lookout is not None:
            self._lookout.stop()
        if self._keeper is None:
            self._end_all("the server was stopped")
        else:
            await self._settle()
        self._stopped = True
        for live in self._live.values():
            self._resolve(live.ticket, Status.CANCELLED, "the server was stopped")
        self._live.clear()
        self._job_ids.clear()
        await self._executor.stop()

    async def _settle(self) -> None:
        """Begin nothing any more, and let what runs put down how far it has come."""
        self._settling = True
        for work_id in self._flights.work_ids:
            self._stop_work(work_id)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _SETTLE_S
        while self._flights.work_ids and loop.time() < end_s:
            await asyncio.sleep(_SETTLE_POLL_S)

    def _end_all(self, reason: str) -> None:
        for uid in list(self._job_ids):
            self.cancel(uid, reason)

    def drain(self) -> None:
        """Say in `health` that no new requests are wanted; those that are in go on."""
        self._draining = True

    def now_ns(self) -> int:
        """The clock of all its times: nanoseconds since the engine was made, and `begin_ns` before that."""
        return time.monotonic_ns() - self._origin_ns

    def health(self) -> Health:
        return Health(
            num_devices=self._executor.num_gpus,
            num_devices_up=len(self._up),
            num_jobs=self._controller.tracker.num_jobs(),
            draining=self._draining,
        )

    def usage(self) -> Usage:
        """What the engine holds, right now; takes time in proportion to the open requests."""
        tracker, now_ns = self._controller.tracker, self.now_ns()
        jobs = tracker.jobs.values()
        pids = {gpu: self._executor.pid(gpu) for gpu in range(self._executor.num_gpus)}
        return Usage(
            waiting=Counter(job.request.priority for job in jobs if not job.works),
            running=Counter(job.request.priority for job in jobs if job.works),
            backlog_ns=tracker.held().gpu_ns + sum(max(0, gpu.free_ns - now_ns) for gpu in tracker.gpus),
            parcel_bytes=self._cargo.num_bytes,
            memory_bytes=dict(self._memory_bytes),
            pids={gpu: pid for gpu, pid in pids.items() if pid is not None},
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
            assert uid not in self._job_ids, f"two requests have the uid {uid}"
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
        return tuple(self._live[self._job_ids[uid]].ticket for uid in specs)

    def restore(self, kept: Sequence[tuple[Wanted, Checkpoint]]) -> tuple[Ticket, ...]:
        """Take requests in that an engine before this one had accepted, in this order; once, before any other.

        They go on from their checkpoints, as far as these are still there. A ticket whose request cannot be served any
        more has failed already.
        """
        there = self._executor.inherit({parcel for _, checkpoint in kept for parcel in checkpoint.parcels})
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
        ticket = self._live[self._job_ids[request.uid]].ticket
        ticket.progress(checkpoint.steps_done)
        return ticket

    def release(self, uid: str) -> None:
        """The picture of a request that is done need not be made again, whatever happens: it is safe."""
        self._cargo.release(uid)

    def cancel(self, uid: str, reason: str) -> None:
        """End a request now; its device is free at the next step boundary. Unknown or ended uids are ignored."""
        if uid in self._job_ids:
            self._handle(Cancelled(uid, reason))

    def eta_ns(self, uid: str) -> int | None:
        """When an open request is expected to be done, as of now; None once it has ended."""
        job_id = self._job_ids.get(uid)
        return None if job_id is None else self._controller.eta_ns(job_id, self.now_ns())

    # For the executor.

    def on_joined(self, gpu: int) -> None:
        self._up.add(gpu)
        self._observer.on_joined(gpu, self.now_ns())
        stages = frozenset(StageId(self.info.name, stage) for stage in STAGES)
        self._handle(GpuJoined(gpu, 0, stages))

    def on_lost(self, gpu: int, reason: str) -> None:
        if gpu not in self._up:
            return
        self._up.remove(gpu)
        self._memory_bytes.pop(gpu, None)
        orphans, landings = self._flights.lose(gpu)
        for flight in orphans:
            self._write_off(flight, Ending.LOST)
        self._observer.on_lost(gpu)
        self._handle(GpuLost(gpu, reason))
        self._pause(job_id for flight in orphans for job_id in flight.work.job_ids)
        for landing in landings:
            self._land(landing)

    def on_given_up(self) -> None:
        """Nobody is left to serve what is in."""
        self._end_all("every worker was lost, and none could be started again")

    def on_report(self, gpu: int, report: Report) -> None:
        if self._stopped:
            return
        match report:
            case Progress(work_id, steps_done):
                self._watchdog.progressed(work_id)
                self._progress(work_id, steps_done)
            case Preview(work_id, steps_done, image):
                self._previewed(work_id, steps_done, image)
            case Ended():
                self._ended(gpu, report)
            case Failed(work_id, reason, state_lost):
                self._failed(work_id, reason, state_lost)
            case _:
                raise AssertionError(f"unexpected report {report!r}")

    def _progress(self, work_id: int, steps_done: int) -> None:
        if flight := self._flights.get(work_id):
            for job_id, first_step in self._members(flight.work).items():
                self._live[job_id].ticket.progress(first_step + steps_done)

    def _previewed(self, work_id: int, steps_done: int, image: Image) -> None:
        if flight := self._flights.get(work_id):
            for job_id, first_step in self._members(flight.work).items():
                self._live[job_id].ticket.show(TicketPreview(first_step + steps_done, image))
                self._observer.on_previewed(job_id)

    def _ended(self, gpu: int, ended: Ended) -> None:
        if ended.memory_bytes is not None:
            self._memory_bytes[gpu] = ended.memory_bytes
        flight = self._flights.get(ended.work_id)
        if flight is None:  # Written off, or a follower's report after its leader's.
            self._cargo.discard({ended.parcel})
            return
        if is_cut_off(ended) and flight.group is not None:  # Nobody is to wait for this member.
            self._executor.break_off(flight.group)
        if landing := self._flights.report(gpu, ended):
            self._land(landing)

    def _land(self, landing: Landing) -> None:
        """Take over what a work has brought about, tell who waits for it, then the controller."""
        work, ended = landing.work, landing.ended
        members = self._members(work)
        for job_id, first_step in members.items():
            self._record(self._live[job_id].ticket, first_step, work, ended)
            self._live[job_id].image = ended.image
            if ended.parcel is not None:
                self._keep(job_id, work, ended.parcel, first_step + ended.steps_done)
        self._cargo.discard(landing.spare if members else landing.spare | {ended.parcel})
        self._cargo.arrive(work, usable=members if landing.ending is Ending.DONE else ())
        self._handle(landing.event)
        self._tell_end(landing.flight, landing.ending, ended.steps_done, ended.start_ns, ended.end_ns)
        self._pause(members)

    def _keep(self, job_id: int, work: Work, parcel: Parcel, steps_done: int) -> None:
        """Take over what a work has put down; what it replaces goes only when the keeper knows the new one."""
        uid = self._live[job_id].ticket.request.uid
        if self._keeper is not None and work.stage.name == ENCODE:
            self._keeper.keep_conditioning(uid, parcel)
        elif self._keeper is not None:
            self._keeper.keep_state(uid, parcel, steps_done)
        self._cargo.adopt(job_id, work.stage.name, parcel)

    def _tell_end(self, flight: Flight, ending: Ending, steps_done: int, start_ns: int, end_ns: int) -> None:
        """`start_ns` and `end_ns` are on the machine's clock."""
        work, requests = flight.work, flight.requests
        told = EndedWork(
            work=work,
            requests=requests,
            ending=ending,
            steps_done=steps_done,
            predicted_ns=flight.predicted_ns,
            start_ns=start_ns - self._origin_ns,
            end_ns=end_ns - self._origin_ns,
            correction=self._controller.costs.correction(work.stage, requests, len(work.gpus)),
        )
        self._observer.on_work_ended(told)

    def _pause(self, job_ids: Iterable[int]) -> None:
        """Those of these jobs that have nothing in flight now do not run any more."""
        tracker = self._controller.tracker
        for job_id in job_ids:
            job = tracker.jobs.get(job_id)
            if job is not None and not job.works:
                self._live[job_id].ticket.pause()
                if any(tracker.devices[gpu].works for gpu in job.last_gpus):
                    self._observer.on_preempted(job_id)

    def _failed(self, work_id: int, reason: str, state_lost: bool) -> None:
        flight = self._flights.end(work_id)
        if flight is None:
            return
        if flight.group is not None:
            self._executor.break_off(flight.group)
        self._write_off(flight, Ending.FAILED)
        if state_lost:
            for job_id in self._members(flight.work):
                self._cargo.lose(job_id)
        self._handle(WorkFailed(work_id, reason, state_lost))
        self._pause(flight.work.job_ids)

    def _write_off(self, flight: Flight, ending: Ending) -> None:
        """Nothing of a work is of use."""
        now_ns = time.monotonic_ns()
        self._tell_end(flight, ending, 0, now_ns, now_ns)
        self._cargo.discard(flight.parcels)
        self._cargo.arrive(flight.work, usable=())

    def _members(self, work: Work) -> dict[int, int]:
        """The jobs that a work still belongs to, each with the number of steps that it had before the work."""
        wanted = {job.job_id for job in self._controller.tracker.members(work)}
        first_steps = zip(work.job_ids, work.first_steps, strict=True)
        return {job_id: first_step for job_id, first_step in first_steps if job_id in wanted}

    def _record(self, ticket: Ticket, first_step: int, work: Work, ended: Ended) -> None:
        """Add a finished work to the story of a request."""
        segment = Segment(
            stage=work.stage.name,
            gpus=work.gpus,
            num_steps=ended.steps_done,
            start_ns=ended.start_ns - self._origin_ns,
            end_ns=ended.end_ns - self._origin_ns,
            sliced=work.sliced,
        )
        ticket.add(segment, first_step)

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
            if live := self._live.get(job_id):
                live.ticket.note(now_ns, action)

    def _perform(self, action: Action) -> None:
        match action:
            case Accept(job_id, uid, eta_ns):
                self._accept(job_id, uid, eta_ns)
            case Reject(uid, code=code):
                self._observer.on_refused(self._incoming.pop(uid).request, code)
            case RunStage(work) | RunSteps(work):
                if not self._settling:
                    self._send_work(work)
            case Stop(work_id):
                self._stop_work(work_id)
            case MoveState(job_id, targets, conditioning):
                self._move(job_id, targets, conditioning)
            case SetAside():
                pass
            case DropState(job_id, gpus):
                for gpu in gpus:
                    self._executor.send(gpu, Forget(job_id))
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
        self._live[job_id] = _Live(spec=incoming.spec, ticket=self._ticket(incoming.request, eta_ns))
        self._cargo.begin(job_id, incoming.spec, incoming.checkpoint)
        self._job_ids[uid] = job_id

    def _ticket(self, request: Request, eta_ns: int) -> Ticket:
        return Ticket(request=request, eta_ns=eta_ns, outcome=self._loop.create_future())

    def _send_work(self, work: Work) -> None:
        (job_id,), (first_step,) = work.job_ids, work.first_steps
        live, group = self._live[job_id], None
        live.last_work = work
        match work.stage.name:
            case "encode":
                command: Command = Encode(work.work_id, job_id, live.spec)
            case "diffuse":
                group = self._executor.group(work.gpus) if len(work.gpus) > 1 else None
                command = Denoise(work.work_id, job_id, first_step, work.num_steps, group)
            case _:
                command = Decode(work.work_id, job_id, work.sliced)
        requests = (live.ticket.request,)
        predicted_ns = self._controller.costs.work_ns(work.stage, requests, len(work.gpus), work.num_steps)
        self._flights.begin(Flight(work=work, group=group, requests=requests, predicted_ns=predicted_ns))
        for gpu in work.gpus:
            self._executor.send(gpu, command)

    def _stop_work(self, work_id: int) -> None:
        """The leader's word counts; if it is lost, the work breaks off anyway."""
        flight = self._flights.get(work_id)
        if flight is not None and flight.work.gpus[0] in self._up:
            self._executor.send(flight.work.gpus[0], StopWork(work_id))
            self._observer.on_work_stopped(work_id)

    def _move(self, job_id: int, targets: tuple[int, ...], conditioning: bool) -> None:
        behind = self._live[job_id].last_work
        is_awaited = behind is not None and behind.work_id in self._flights and job_id in self._members(behind)
        self._cargo.move(job_id, targets, conditioning, behind if is_awaited else None)
        self._observer.on_moved(job_id)

    def _finish(self, job_id: int, uid: str, status: Status, reason: str) -> None:
        live = self._live.pop(job_id)
        del self._job_ids[uid]
        if self._keeper is not None and status is Status.DONE:
            self._cargo.hold(job_id, uid)
        else:
            self._cargo.end(job_id)
        self._resolve(live.ticket, status, reason, live.image if status is Status.DONE else None)

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
