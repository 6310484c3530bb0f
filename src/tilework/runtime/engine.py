"""The live driver: turns requests and reports into events, and the controller's actions into commands.

Runs on one event loop; everything public is called on its thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
    SetAside,
    Stop,
    WakeAt,
    jobs_of,
)
from tilework.core.classes import DEFAULT_CLASS
from tilework.core.events import (
    Cancelled,
    Event,
    GpuJoined,
    GpuLost,
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
    Preview,
    Progress,
    Report,
    Spec,
    StopWork,
)
from tilework.core.work import STAGES, StageId, Work
from tilework.cost.table import CostTable
from tilework.runtime.cargo import Cargo
from tilework.runtime.costs import CostCache, calibration_shapes, start_costs
from tilework.runtime.executor import Executor, WorkerStartFailed
from tilework.runtime.flights import Flight, Flights, Landing
from tilework.runtime.observer import EndedWork, Ending, Observer, Usage
from tilework.runtime.ticket import Outcome, Refusal, Segment, Ticket
from tilework.runtime.ticket import Preview as TicketPreview


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`table` is used as it is; without one the devices are measured, as far as `cache` does not know them."""

    controller: ControllerConfig = field(default_factory=ControllerConfig)
    table: CostTable | None = None
    cache: CostCache | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How the engine is doing, right now. `num_jobs` are those that have not ended."""

    num_devices: int
    num_devices_up: int
    num_jobs: int
    draining: bool


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
    measurements are done.
    """

    info: ModelInfo

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        log: TextIO | None = None,
        on_measured: Callable[[int, int], None] | None = None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._log = log
        self._on_measured = on_measured
        self._origin_ns = time.monotonic_ns()
        self._incoming: dict[str, tuple[Request, Spec]] = {}
        self._live: dict[int, _Live] = {}
        self._job_ids: dict[str, int] = {}
        self._flights = Flights()
        self._cargo = Cargo(executor)
        self._up: set[int] = set()
        self._memory_bytes: dict[int, int] = {}
        self._draining = False
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
        self._write(header_line(tilework.__version__, self._config.controller, table))
        for gpu in range(self._executor.num_gpus):
            self.on_joined(gpu)

    def _degrees(self) -> tuple[int, ...]:
        """Powers of two, as policies use them."""
        most = min(self.info.max_degree, self._executor.num_gpus)
        return tuple(1 << power for power in range(most.bit_length()))

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
        return Health(
            num_devices=self._executor.num_gpus,
            num_devices_up=len(self._up),
            num_jobs=self._controller.tracker.num_jobs(),
            draining=self._draining,
        )

    def usage(self) -> Usage:
        """What the engine holds, right now; takes time in proportion to the open requests."""
        jobs, gpus, now_ns = self._controller.tracker.jobs.values(), self._controller.tracker.gpus, self.now_ns()
        pids = {gpu: self._executor.pid(gpu) for gpu in range(self._executor.num_gpus)}
        backlog_ns = sum(job.demand.width * job.demand.run_ns for job in jobs)
        return Usage(
            waiting=Counter(job.request.priority for job in jobs if not job.works),
            running=Counter(job.request.priority for job in jobs if job.works),
            backlog_ns=backlog_ns + sum(max(0, gpu.free_ns - now_ns) for gpu in gpus),
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
    ) -> tuple[Ticket, ...] | Refusal:
        """Bring requests in, all of them or none. Their uids must be new; `deadline_ns` is on the engine's clock."""
        arrival_ns = self.now_ns()
        for uid, spec in specs.items():
            assert uid not in self._job_ids, f"two requests have the uid {uid}"
            request = Request(
                uid=uid,
                pipeline=self.info.name,
                shape=spec.shape,
                steps=spec.steps,
                arrival_ns=arrival_ns,
                seed=spec.seed,
                deadline_ns=deadline_ns,
                on_miss=on_miss,
                tenant=tenant,
                priority=priority,
                weight=weight,
                preview_every=spec.preview_every,
                guided=spec.guidance_scale > 1 or not self.info.two_passes,
            )
            self._incoming[uid] = request, spec
        first, *others = (self._incoming[uid][0] for uid in specs)
        answer = self._handle(Submitted(first, tuple(others)), arrival_ns)[0]
        if isinstance(answer, Reject):
            return Refusal(uid=answer.uid, reason=answer.reason, earliest_ns=answer.earliest_ns, code=answer.code)
        return tuple(self._live[self._job_ids[uid]].ticket for uid in specs)

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
        match report:
            case Progress(work_id, steps_done):
                self._progress(work_id, steps_done)
            case Preview(work_id, steps_done, image):
                self._previewed(work_id, steps_done, image)
            case Ended():
                self._ended(gpu, report)
            case Failed(work_id, reason):
                self._failed(work_id, reason)
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
        if ended.work_id not in self._flights:  # Written off, or a follower's report after its leader's.
            self._cargo.discard({ended.parcel})
        elif landing := self._flights.report(gpu, ended):
            self._land(landing)

    def _land(self, landing: Landing) -> None:
        """Take over what a work has brought about, tell who waits for it, then the controller."""
        work, ended = landing.work, landing.ended
        members = self._members(work)
        for job_id, first_step in members.items():
            self._record(self._live[job_id].ticket, first_step, work, ended)
            self._live[job_id].image = ended.image
            if ended.parcel is not None:
                self._cargo.adopt(job_id, work.stage.name, ended.parcel)
        self._cargo.discard(landing.spare if members else landing.spare | {ended.parcel})
        self._cargo.arrive(work, usable=() if ended.stopped or ended.broken else members)
        self._handle(landing.event)
        self._tell_end(landing.flight, landing.ending, ended.steps_done, ended.start_ns, ended.end_ns)
        self._pause(members)

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

    def _failed(self, work_id: int, reason: str) -> None:
        flight = self._flights.end(work_id)
        if flight is None:
            return
        if flight.group is not None:
            self._executor.break_off(flight.group)
        self._write_off(flight, Ending.FAILED)
        self._handle(WorkFailed(work_id, reason))
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
        )
        ticket.add(segment, first_step)

    # The controller and its actions.

    def _handle(self, event: Event, now_ns: int | None = None) -> tuple[Action, ...]:
        now_ns = self.now_ns() if now_ns is None else now_ns
        began_ns = time.perf_counter_ns()
        actions = self._controller.handle(event, now_ns)
        took_ns = time.perf_counter_ns() - began_ns
        self._observer.on_decided(now_ns, took_ns, self._controller.tracker.num_waiting())
        self._write(entry_line(event, actions, now_ns))
        for action in actions:
            self._perform(action)
            self._note(action, now_ns)
        return actions

    def _note(self, action: Action, now_ns: int) -> None:
        """Keep an action for whoever asks why; the last one, `Finish`, is in the outcome."""
        for job_id in jobs_of(action):
            if live := self._live.get(job_id):
                live.ticket.note(now_ns, action)

    def _write(self, line: str) -> None:
        if self._log is not None:
            self._log.write(line + "\n")
            self._log.flush()

    def _perform(self, action: Action) -> None:
        match action:
            case Accept(job_id, uid, eta_ns):
                self._accept(job_id, uid, eta_ns)
            case Reject(uid, code=code):
                request, _ = self._incoming.pop(uid)
                self._observer.on_refused(request, code)
            case RunStage(work) | RunSteps(work):
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
                self._loop.call_later(delay_s, self._handle, Woke())

    def _accept(self, job_id: int, uid: str, eta_ns: int) -> None:
        request, spec = self._incoming.pop(uid)
        ticket = Ticket(request=request, eta_ns=eta_ns, outcome=self._loop.create_future())
        self._live[job_id] = _Live(spec=spec, ticket=ticket)
        self._cargo.begin(job_id, spec)
        self._job_ids[uid] = job_id

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
                command = Decode(work.work_id, job_id)
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
        self._cargo.end(job_id)
        outcome = Outcome(
            uid=uid,
            status=status,
            reason=reason,
            finished_ns=self.now_ns(),
            image=live.image if status is Status.DONE else None,
            segments=tuple(live.ticket.segments),
        )
        self._observer.on_ended(live.ticket, outcome)
        live.ticket.end(outcome)
