"""Works on the devices: sent as commands, and told of as events when they have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from tilework.control.controller import Controller
from tilework.control.watchdog import Watchdog, WatchdogConfig
from tilework.core.checkpoint import CheckpointKeeper
from tilework.core.events import DeviceLost, Event, LeftOut, WorkFailed
from tilework.core.wire import (
    Absent,
    Command,
    Decode,
    Denoise,
    Encode,
    Ended,
    Failed,
    Forget,
    Preview,
    Progress,
    Report,
    StateBlob,
    StopWork,
)
from tilework.core.work import ENCODE, Group, Work
from tilework.runtime.executor import Executor
from tilework.runtime.in_flight import InFlightWork, InFlightWorks, WorkResult, is_cut_off
from tilework.runtime.observer import EndedWork, Ending, Observer
from tilework.runtime.request_table import RequestTable
from tilework.runtime.state_registry import StateRegistry
from tilework.runtime.stuck_works import StuckWorkMonitor
from tilework.runtime.ticket import Preview as TicketPreview
from tilework.runtime.ticket import Segment, Ticket

_SETTLE_S = 2.0  # Longer than most steps take.
_SETTLE_POLL_S = 0.005


class WorkDispatcher:
    """What runs on which device. The controller is told by `handle`; tickets and states follow before it is.

    `origin_ns` is the engine's zero on the machine's clock.
    """

    def __init__(
        self,
        executor: Executor,
        controller: Controller,
        watchdog: WatchdogConfig,
        request_table: RequestTable,
        states: StateRegistry,
        keeper: CheckpointKeeper | None,
        observer: Observer,
        origin_ns: int,
        handle: Callable[[Event], object],
    ) -> None:
        self.observer = observer
        self.up: set[int] = set()
        self.memory_bytes: dict[int, int] = {}
        self._executor = executor
        self._controller = controller
        self._watchdog = Watchdog(controller.tracker, controller.costs, watchdog)
        self._requests = request_table
        self._states = states
        self._keeper = keeper
        self._origin_ns = origin_ns
        self._handle = handle
        self._in_flight = InFlightWorks()
        self._is_settling = False
        self._stuck_works = StuckWorkMonitor(self._watchdog, watchdog.tick_ns, self._in_flight, executor, self._stuck)

    def close(self) -> None:
        """Look out no more for works that have stopped."""
        self._stuck_works.stop()

    async def settle(self) -> None:
        """Begin nothing any more, and let what runs put down how far it has come."""
        self._is_settling = True
        for work_id in self._in_flight.work_ids:
            self.stop(work_id)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _SETTLE_S
        while self._in_flight.work_ids and loop.time() < end_s:
            await asyncio.sleep(_SETTLE_POLL_S)

    def _stuck(self, work: Work) -> None:
        self.observer.on_stuck(work)

    # What the controller wants done.

    def run(self, work: Work) -> None:
        if self._is_settling:
            return
        entries = [self._requests[job_id] for job_id in work.job_ids]
        for entry in entries:
            entry.last_work = work
        group = self._executor.group(work.devices) if len(work.devices) > 1 else None
        match work.stage.name:
            case "encode":
                command: Command = Encode(work.work_id, work.job_ids[0], entries[0].spec)
            case "diffuse":
                command = Denoise(work.work_id, work.members, work.num_steps, group)
            case _:
                command = Decode(work.work_id, work.job_ids[0], work.sliced)
        requests = tuple(entry.ticket.request for entry in entries)
        predicted_ns = self._controller.costs.work_ns(work.stage, requests, len(work.devices), work.num_steps)
        self._in_flight.begin(InFlightWork(work=work, group=group, requests=requests, predicted_ns=predicted_ns))
        for device_id in work.devices:
            self._executor.send(device_id, command)

    def stop(self, work_id: int) -> None:
        """The leader's word counts; if it is lost, the work breaks off anyway."""
        in_flight_work = self._in_flight.get(work_id)
        if in_flight_work is not None and in_flight_work.work.devices[0] in self.up:
            self._executor.send(in_flight_work.work.devices[0], StopWork(work_id))
            self.observer.on_work_stopped(work_id)

    def move(self, job_id: int, targets: Group, conditioning: bool) -> None:
        behind = self._requests[job_id].last_work
        is_awaited = behind is not None and behind.work_id in self._in_flight and job_id in self._members(behind)
        self._states.move(job_id, targets, conditioning, behind if is_awaited else None)
        self.observer.on_moved(job_id)

    def forget(self, job_id: int, devices: Group) -> None:
        for device_id in devices:
            self._executor.send(device_id, Forget(job_id))

    # What the devices tell.

    def lose(self, device_id: int, reason: str) -> None:
        self.up.remove(device_id)
        self.memory_bytes.pop(device_id, None)
        orphans, results = self._in_flight.lose(device_id)
        for in_flight_work in orphans:
            self._write_off(in_flight_work, Ending.LOST)
        self.observer.on_lost(device_id)
        self._handle(DeviceLost(device_id, reason))
        self._pause(job_id for in_flight_work in orphans for job_id in in_flight_work.work.job_ids)
        for result in results:
            self._land(result)

    def report(self, device_id: int, report: Report) -> None:
        match report:
            case Progress(work_id, steps_done):
                self._watchdog.progressed(work_id)
                self._progress(work_id, steps_done)
            case Preview():
                self._previewed(report)
            case Ended():
                self._ended(device_id, report)
            case Failed(work_id, reason, state_lost):
                self._failed(work_id, reason, state_lost)
            case _:
                raise AssertionError(f"unexpected report {report!r}")

    def _progress(self, work_id: int, steps_done: int) -> None:
        if in_flight_work := self._in_flight.get(work_id):
            for job_id, first_step in self._members(in_flight_work.work).items():
                self._requests[job_id].ticket.progress(first_step + steps_done)

    def _previewed(self, preview: Preview) -> None:
        in_flight_work, job_id = self._in_flight.get(preview.work_id), preview.job_id
        if in_flight_work is not None and (first_step := self._members(in_flight_work.work).get(job_id)) is not None:
            self._requests[job_id].ticket.show(TicketPreview(first_step + preview.steps_done, preview.image))
            self.observer.on_previewed(job_id)

    def _ended(self, device_id: int, ended: Ended) -> None:
        if ended.memory_bytes is not None:
            self.memory_bytes[device_id] = ended.memory_bytes
        in_flight_work = self._in_flight.get(ended.work_id)
        if in_flight_work is None:  # Written off, or a follower's report after its leader's.
            self._states.discard(ended.blobs.values())
            return
        self._leave_out(in_flight_work.work, ended.absent)
        if is_cut_off(ended) and in_flight_work.group is not None:  # Nobody is to wait for this member.
            self._executor.break_off(in_flight_work.group)
        if result := self._in_flight.report(device_id, ended):
            self._land(result)

    def _leave_out(self, work: Work, absent: Iterable[Absent]) -> None:
        """A work had no part in it of some members. While it is in in_flight_work, those that did are awaited."""
        for one in absent:
            if one.state_lost and one.job_id in self._members(work):
                self._states.lose(one.job_id)
            self._handle(LeftOut(work.work_id, one.job_id, one.reason, one.state_lost))

    def _land(self, result: WorkResult) -> None:
        """Take over what a work has brought about, tell who waits for it, then the controller."""
        work, ended = result.work, result.ended
        members = self._members(work)
        for job_id, first_step in members.items():
            self._record(self._requests[job_id].ticket, first_step, work, ended)
            self._requests[job_id].image = ended.image
            if job_id in ended.blobs:
                self._keep(job_id, work, ended.blobs[job_id], first_step + ended.steps_done)
        self._states.discard(result.spare)
        self._states.discard(blob for job_id, blob in ended.blobs.items() if job_id not in members)
        self._states.arrive(work, usable=members if result.ending is Ending.DONE else ())
        self._handle(result.event)
        self._tell_end(result.in_flight_work, result.ending, ended.steps_done, ended.start_ns, ended.end_ns)
        self._pause(members)

    def _keep(self, job_id: int, work: Work, blob: StateBlob, steps_done: int) -> None:
        """Take over what a work has put down; what it replaces goes only when the keeper knows the new one."""
        uid = self._requests[job_id].ticket.request.uid
        if self._keeper is not None and work.stage.name == ENCODE:
            self._keeper.keep_conditioning(uid, blob)
        elif self._keeper is not None:
            self._keeper.keep_state(uid, blob, steps_done)
        self._states.adopt(job_id, work.stage.name, blob)

    def _tell_end(
        self, in_flight_work: InFlightWork, ending: Ending, steps_done: int, start_ns: int, end_ns: int
    ) -> None:
        """`start_ns` and `end_ns` are on the machine's clock."""
        work, requests = in_flight_work.work, in_flight_work.requests
        told = EndedWork(
            work=work,
            requests=requests,
            ending=ending,
            steps_done=steps_done,
            predicted_ns=in_flight_work.predicted_ns,
            start_ns=start_ns - self._origin_ns,
            end_ns=end_ns - self._origin_ns,
            correction=self._controller.costs.correction(work.stage, requests, len(work.devices)),
        )
        self.observer.on_work_ended(told)

    def _pause(self, job_ids: Iterable[int]) -> None:
        """Those of these jobs that have nothing in in_flight_work now do not run any more."""
        tracker = self._controller.tracker
        for job_id in job_ids:
            job = tracker.jobs.get(job_id)
            if job is not None and not job.works:
                self._requests[job_id].ticket.pause()
                if any(tracker.is_busy(device_id) for device_id in job.last_devices):
                    self.observer.on_preempted(job_id)

    def _failed(self, work_id: int, reason: str, state_lost: bool) -> None:
        in_flight_work = self._in_flight.end(work_id)
        if in_flight_work is None:
            return
        if in_flight_work.group is not None:
            self._executor.break_off(in_flight_work.group)
        self._write_off(in_flight_work, Ending.FAILED)
        if state_lost:
            for job_id in self._members(in_flight_work.work):
                self._states.lose(job_id)
        self._handle(WorkFailed(work_id, reason, state_lost))
        self._pause(in_flight_work.work.job_ids)

    def _write_off(self, in_flight_work: InFlightWork, ending: Ending) -> None:
        """Nothing of a work is of use."""
        now_ns = time.monotonic_ns()
        self._tell_end(in_flight_work, ending, 0, now_ns, now_ns)
        self._states.discard(in_flight_work.blobs)
        self._states.arrive(in_flight_work.work, usable=())

    def _members(self, work: Work) -> dict[int, int]:
        """The jobs that a work still belongs to, each with the number of steps that it had before the work."""
        wanted = {job.job_id for job in self._controller.tracker.members(work)}
        return {job_id: first_step for job_id, first_step in work.members if job_id in wanted}

    def _record(self, ticket: Ticket, first_step: int, work: Work, ended: Ended) -> None:
        """Add a finished work to the story of a request."""
        segment = Segment(
            stage=work.stage.name,
            devices=work.devices,
            num_steps=ended.steps_done,
            start_ns=ended.start_ns - self._origin_ns,
            end_ns=ended.end_ns - self._origin_ns,
            sliced=work.sliced,
            batch=len(work.job_ids) - len(ended.absent),
        )
        ticket.add(segment, first_step)
