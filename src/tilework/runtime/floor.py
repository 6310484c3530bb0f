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
    Parcel,
    Preview,
    Progress,
    Report,
    StopWork,
)
from tilework.core.work import ENCODE, Group, Work
from tilework.runtime.cargo import Cargo
from tilework.runtime.executor import Executor
from tilework.runtime.flights import Flight, Flights, Landing, is_cut_off
from tilework.runtime.lookout import Lookout
from tilework.runtime.observer import EndedWork, Ending, Observer
from tilework.runtime.roster import Roster
from tilework.runtime.ticket import Preview as TicketPreview
from tilework.runtime.ticket import Segment, Ticket

_SETTLE_S = 2.0  # Longer than most steps take.
_SETTLE_POLL_S = 0.005


class Floor:
    """What runs on which device. The controller is told by `handle`; tickets and cargo follow before it is.

    `origin_ns` is the engine's zero on the machine's clock.
    """

    def __init__(
        self,
        executor: Executor,
        controller: Controller,
        watchdog: WatchdogConfig,
        roster: Roster,
        cargo: Cargo,
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
        self._roster = roster
        self._cargo = cargo
        self._keeper = keeper
        self._origin_ns = origin_ns
        self._handle = handle
        self._flights = Flights()
        self._is_settling = False
        self._lookout = Lookout(self._watchdog, watchdog.tick_ns, self._flights, executor, self._stuck)

    def close(self) -> None:
        """Look out no more for works that have stopped."""
        self._lookout.stop()

    async def settle(self) -> None:
        """Begin nothing any more, and let what runs put down how far it has come."""
        self._is_settling = True
        for work_id in self._flights.work_ids:
            self.stop(work_id)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _SETTLE_S
        while self._flights.work_ids and loop.time() < end_s:
            await asyncio.sleep(_SETTLE_POLL_S)

    def _stuck(self, work: Work) -> None:
        self.observer.on_stuck(work)

    # What the controller wants done.

    def run(self, work: Work) -> None:
        if self._is_settling:
            return
        entries = [self._roster[job_id] for job_id in work.job_ids]
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
        self._flights.begin(Flight(work=work, group=group, requests=requests, predicted_ns=predicted_ns))
        for device_id in work.devices:
            self._executor.send(device_id, command)

    def stop(self, work_id: int) -> None:
        """The leader's word counts; if it is lost, the work breaks off anyway."""
        flight = self._flights.get(work_id)
        if flight is not None and flight.work.devices[0] in self.up:
            self._executor.send(flight.work.devices[0], StopWork(work_id))
            self.observer.on_work_stopped(work_id)

    def move(self, job_id: int, targets: Group, conditioning: bool) -> None:
        behind = self._roster[job_id].last_work
        is_awaited = behind is not None and behind.work_id in self._flights and job_id in self._members(behind)
        self._cargo.move(job_id, targets, conditioning, behind if is_awaited else None)
        self.observer.on_moved(job_id)

    def forget(self, job_id: int, devices: Group) -> None:
        for device_id in devices:
            self._executor.send(device_id, Forget(job_id))

    # What the devices tell.

    def lose(self, device_id: int, reason: str) -> None:
        self.up.remove(device_id)
        self.memory_bytes.pop(device_id, None)
        orphans, landings = self._flights.lose(device_id)
        for flight in orphans:
            self._write_off(flight, Ending.LOST)
        self.observer.on_lost(device_id)
        self._handle(DeviceLost(device_id, reason))
        self._pause(job_id for flight in orphans for job_id in flight.work.job_ids)
        for landing in landings:
            self._land(landing)

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
        if flight := self._flights.get(work_id):
            for job_id, first_step in self._members(flight.work).items():
                self._roster[job_id].ticket.progress(first_step + steps_done)

    def _previewed(self, preview: Preview) -> None:
        flight, job_id = self._flights.get(preview.work_id), preview.job_id
        if flight is not None and (first_step := self._members(flight.work).get(job_id)) is not None:
            self._roster[job_id].ticket.show(TicketPreview(first_step + preview.steps_done, preview.image))
            self.observer.on_previewed(job_id)

    def _ended(self, device_id: int, ended: Ended) -> None:
        if ended.memory_bytes is not None:
            self.memory_bytes[device_id] = ended.memory_bytes
        flight = self._flights.get(ended.work_id)
        if flight is None:  # Written off, or a follower's report after its leader's.
            self._cargo.discard(ended.parcels.values())
            return
        self._leave_out(flight.work, ended.absent)
        if is_cut_off(ended) and flight.group is not None:  # Nobody is to wait for this member.
            self._executor.break_off(flight.group)
        if landing := self._flights.report(device_id, ended):
            self._land(landing)

    def _leave_out(self, work: Work, absent: Iterable[Absent]) -> None:
        """A work had no part in it of some members. While it is in flight, those that did are awaited."""
        for one in absent:
            if one.state_lost and one.job_id in self._members(work):
                self._cargo.lose(one.job_id)
            self._handle(LeftOut(work.work_id, one.job_id, one.reason, one.state_lost))

    def _land(self, landing: Landing) -> None:
        """Take over what a work has brought about, tell who waits for it, then the controller."""
        work, ended = landing.work, landing.ended
        members = self._members(work)
        for job_id, first_step in members.items():
            self._record(self._roster[job_id].ticket, first_step, work, ended)
            self._roster[job_id].image = ended.image
            if job_id in ended.parcels:
                self._keep(job_id, work, ended.parcels[job_id], first_step + ended.steps_done)
        self._cargo.discard(landing.spare)
        self._cargo.discard(parcel for job_id, parcel in ended.parcels.items() if job_id not in members)
        self._cargo.arrive(work, usable=members if landing.ending is Ending.DONE else ())
        self._handle(landing.event)
        self._tell_end(landing.flight, landing.ending, ended.steps_done, ended.start_ns, ended.end_ns)
        self._pause(members)

    def _keep(self, job_id: int, work: Work, parcel: Parcel, steps_done: int) -> None:
        """Take over what a work has put down; what it replaces goes only when the keeper knows the new one."""
        uid = self._roster[job_id].ticket.request.uid
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
            correction=self._controller.costs.correction(work.stage, requests, len(work.devices)),
        )
        self.observer.on_work_ended(told)

    def _pause(self, job_ids: Iterable[int]) -> None:
        """Those of these jobs that have nothing in flight now do not run any more."""
        tracker = self._controller.tracker
        for job_id in job_ids:
            job = tracker.jobs.get(job_id)
            if job is not None and not job.works:
                self._roster[job_id].ticket.pause()
                if any(tracker.is_busy(device_id) for device_id in job.last_devices):
                    self.observer.on_preempted(job_id)

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
