"""The driver core: takes the controller's actions, devices' reports and losses, returns what is to be sent and told.

Theory of operation. A work is in flight from its action until its devices have reported or are all lost:

1. Reports of the members of a group are merged into one end (`in_flight`), of which the controller is told once. A
   report that comes twice, or after its device was lost, or after the work's end, changes nothing; what it put down is
   discarded.
2. What the work has put down is adopted for the jobs that it still belongs to; a move that waited for the work is
   resolved, before the controller is told: with the state if the work was done, else with nothing.
3. When the controller has been told, states that it has gone beyond are discarded. It takes reports in the order of a
   job's works, whatever order they come in, so a state stays until the earlier ends are known.

Nothing here waits, reads a clock or touches bytes. `runtime` drives it with processes, `sim` with a virtual clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from tilework.control.controller import Controller
from tilework.control.driver.effects import (
    BreakOff,
    Discard,
    Effect,
    Kill,
    Messages,
    ReportStuck,
    Resolve,
    Tell,
)
from tilework.control.driver.in_flight import InFlightWork, is_cut_off
from tilework.control.driver.result import Ending, WorkResult, end_event, ending_of
from tilework.control.driver.state_registry import StateMove, StateRegistry
from tilework.control.watchdog import Watchdog, WatchdogConfig
from tilework.core.actions import Action, DropState, MoveState, RunStage, RunSteps, Stop
from tilework.core.events import DeviceLost, LeftOut, WorkFailed
from tilework.core.wire import Absent, Ended, Failed, Forget, StateBlob, StopWork
from tilework.core.work import DIFFUSE, Group, Work


class DriverCore:
    """See the theory of operation above. `states` is asked by the driver when jobs begin and end."""

    def __init__(self, controller: Controller, watchdog: WatchdogConfig) -> None:
        self.states = StateRegistry()
        self._config = watchdog
        self._in_flight: dict[int, InFlightWork] = {}
        self._latest: dict[int, Work] = {}  # Of each job, until it ends.
        self._moves: dict[int, list[StateMove]] = {}  # That wait for the end of the work of this number.
        self.serve(controller)

    def serve(self, controller: Controller) -> None:
        """Work for this controller from now on: the first one, or one that was built again from its log."""
        self._tracker = controller.tracker
        self._watchdog = Watchdog(controller.tracker, controller.costs, self._config)

    # What the driver may ask.

    @property
    def work_ids(self) -> Sequence[int]:
        """The works in flight."""
        return tuple(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is kept: of no work, no move and no job."""
        return not (self._in_flight or self._moves or self._latest) and self.states.is_empty

    def work(self, work_id: int) -> Work | None:
        """The work of this number, if it is in flight."""
        in_flight = self._in_flight.get(work_id)
        return None if in_flight is None else in_flight.work

    def members(self, work_id: int) -> Mapping[int, int]:
        """The jobs that a work in flight still belongs to, each with the steps that it had before; else none."""
        in_flight = self._in_flight.get(work_id)
        return {} if in_flight is None else self._members(in_flight.work)

    def is_paused(self, job_id: int) -> bool:
        """Whether a job has not ended, and has no work."""
        job = self._tracker.jobs.get(job_id)
        return job is not None and not job.works

    def is_preempted(self, job_id: int) -> bool:
        """Whether a job is paused while a device of its latest work has another's."""
        return self.is_paused(job_id) and any(map(self._tracker.is_busy, self._tracker.jobs[job_id].last_devices))

    # What the controller wants.

    def perform(self, action: Action) -> Messages:
        """Returns what devices are to be sent for an action; nothing if it does not concern them."""
        match action:
            case RunStage(work) | RunSteps(work):
                return self._run(work)
            case Stop(work_id):
                return self._stop(work_id)
            case MoveState(job_id, targets, conditioning):
                return ((targets, self._move(job_id, targets, conditioning)),)
            case DropState(job_id, devices):
                return ((devices, Forget(job_id)),)
            case _:
                return ()

    def _run(self, work: Work) -> Messages:
        self._in_flight[work.work_id] = InFlightWork(work)
        for job_id in work.job_ids:
            self._latest[job_id] = work
        return ((work.devices, work),)

    def _stop(self, work_id: int) -> Messages:
        """The leader decides where a work stops; if it is lost, the work breaks off anyway."""
        in_flight = self._in_flight.get(work_id)
        return () if in_flight is None else ((in_flight.work.devices[:1], StopWork(work_id)),)

    def _move(self, job_id: int, targets: Group, conditioning: bool) -> StateMove:
        """Bring a job's state to targets as its latest work leaves it: now, or when that work has ended."""
        behind = self._latest.get(job_id)
        source = () if behind is None else behind.devices
        move = StateMove(job_id=job_id, targets=targets, source=source, wants_conditioning=conditioning)
        if behind is not None and behind.work_id in self._in_flight and job_id in self._members(behind):
            self._moves.setdefault(behind.work_id, []).append(move)
            return move
        return self.states.resolve(move, self._steps_behind(job_id, behind))

    def _steps_behind(self, job_id: int, behind: Work | None) -> int:
        """After how many steps a job's next work begins; its latest work has ended, if it has one.

        The controller may not count that work yet, because an earlier one of the job is still in flight.
        """
        if behind is not None and behind.work_id in self._tracker.works:
            first_step = self._members(behind).get(job_id)
            if first_step is not None:
                return first_step + (behind.num_steps if behind.stage.name == DIFFUSE else 0)
        return self._steps_done(job_id)

    def end(self, job_id: int) -> None:
        """A job has come to its end. What is kept of it is ended or held by `states`."""
        self._latest.pop(job_id, None)

    # What devices report.

    def progressed(self, work_id: int) -> None:
        """A step of a work has ended."""
        self._watchdog.progressed(work_id)

    def report(self, device_id: int, report: Ended | Failed) -> Iterable[Effect]:
        """A device has ended a work, or failed in it."""
        in_flight = self._in_flight.get(report.work_id)
        if in_flight is None:
            return self._strays(report)
        if device_id in in_flight.reports:  # It comes twice.
            return ()
        if device_id in in_flight.lost:
            return self._strays(report)
        if isinstance(report, Failed):
            return self._fail(in_flight, report)
        if report.absent or is_cut_off(report):
            return self._take_partial(in_flight, device_id, report)
        merged = in_flight.take(device_id, report)
        return () if merged is None else self._end(in_flight, merged)

    def _strays(self, report: Ended | Failed) -> tuple[Discard, ...]:
        """Of a report that changes nothing, discard what it put down, unless an earlier copy of it was taken."""
        blobs = self.states.strays(report.blobs.values()) if isinstance(report, Ended) and report.blobs else ()
        return (Discard(blobs),) if blobs else ()

    def _take_partial(self, in_flight: InFlightWork, device_id: int, report: Ended) -> Iterator[Effect]:
        """Take the report of a work that ran without some members, or was cut off."""
        if report.absent:
            yield from self._leave_out(in_flight.work, report.absent)
        if is_cut_off(report):  # The others must not wait for this device.
            yield from self._break_off(in_flight)
        merged = in_flight.take(device_id, report)
        if merged is not None:
            yield from self._end(in_flight, merged)

    def _leave_out(self, work: Work, absent: Iterable[Absent]) -> Iterator[Effect]:
        """A work ran without some members. It is still in flight meanwhile: moves of the others wait for it."""
        for one in absent:
            if one.state_lost and one.job_id in self._members(work):
                yield from _discard(self.states.lose(one.job_id))
            yield Tell(LeftOut(work.work_id, one.job_id, one.reason, one.state_lost))

    def _break_off(self, in_flight: InFlightWork) -> Iterator[Effect]:
        if len(in_flight.work.devices) > 1 and not in_flight.is_broken_off:
            in_flight.is_broken_off = True
            yield BreakOff(in_flight.work)

    def _end(self, in_flight: InFlightWork, report: Ended) -> Iterator[Effect]:
        """Take over what a work has brought about, then tell the controller."""
        work, ending = in_flight.work, ending_of(report)
        del self._in_flight[work.work_id]
        members = self._members(work)
        needless = in_flight.blobs_beside(report) if in_flight.reports else []
        for job_id, blob in report.blobs.items():
            if (first_step := members.get(job_id)) is None:
                needless.append(blob)
            else:
                needless += self.states.adopt(job_id, work.stage.name, blob, first_step + report.steps_done)
        if work.work_id in self._moves:
            yield from self._resolve(work, members if ending is Ending.DONE else {}, report.steps_done)
        yield WorkResult(work, ending, end_event(work, ending, report), members, report)
        for job_id in members:
            if job_id in self._tracker.jobs:
                needless += self.states.advance(job_id, self._steps_done(job_id))
        if needless:
            yield Discard(tuple(needless))

    def _fail(self, in_flight: InFlightWork, failed: Failed) -> Iterator[Effect]:
        yield from self._break_off(in_flight)
        del self._in_flight[in_flight.work.work_id]
        if failed.state_lost:
            for job_id in self._members(in_flight.work):
                yield from _discard(self.states.lose(job_id))
        work = in_flight.work
        event = WorkFailed(work.work_id, failed.reason, failed.state_lost)
        yield from self._write_off(in_flight, WorkResult(work, Ending.FAILED, event, self._members(work)))

    def _write_off(self, in_flight: InFlightWork, result: WorkResult) -> Iterator[Effect]:
        """Nothing of a work is of use."""
        yield from self._resolve(in_flight.work, {}, 0)
        yield result
        yield from _discard(in_flight.blobs)

    def _resolve(self, work: Work, members: Mapping[int, int], steps_done: int) -> Iterator[Effect]:
        """A work has ended; `members` of it are as they were meant to be. For its other jobs nothing comes.

        What was to follow for those has been revoked, or does without them; what a device has of one may be of use.
        """
        for move in self._moves.pop(work.work_id, ()):
            first_step = members.get(move.job_id)
            steps = steps_done if work.stage.name == DIFFUSE else 0
            yield Resolve(self.states.resolve(move, None if first_step is None else first_step + steps))

    # Devices are lost, or make no progress.

    def lose(self, device_id: int, reason: str) -> Iterator[Effect]:
        """A device is lost: so are works that it ran alone; others break off."""
        affected = [one for one in self._in_flight.values() if device_id in one.work.devices]
        for in_flight in affected:
            in_flight.lost.add(device_id)
            if in_flight.is_lost:
                del self._in_flight[in_flight.work.work_id]
        yield Tell(DeviceLost(device_id, reason))
        for in_flight in affected:
            if in_flight.is_lost:
                result = WorkResult(in_flight.work, Ending.LOST, None, self._members(in_flight.work))
                yield from self._write_off(in_flight, result)
                continue
            yield from self._break_off(in_flight)
            merged = in_flight.merged()
            if merged is not None:
                yield from self._end(in_flight, merged)

    def look(self) -> Iterator[Effect]:
        """To be called once per tick of the watchdog: free the devices of works that make no progress.

        A group is broken off first: its members say how far they came, which frees those that only waited for another.
        Devices that have said nothing by the next alarm are killed, as is at once one that runs a work alone.
        """
        for work in self._watchdog.look():
            in_flight, limit_ns = self._in_flight.get(work.work_id), self._watchdog.limit_ns(work)
            if in_flight is None:
                continue
            yield ReportStuck(work, limit_ns)
            if len(work.devices) > 1 and not in_flight.is_broken_off:
                yield from self._break_off(in_flight)
            else:
                for device_id in sorted(in_flight.awaited):
                    yield Kill(device_id, limit_ns)

    # What the tracker says.

    def _members(self, work: Work) -> dict[int, int]:
        """The jobs that a work still belongs to, each with the steps that it had before."""
        jobs, found = self._tracker.jobs, dict[int, int]()
        for job_id, attempt, first_step in zip(work.job_ids, work.attempts, work.first_steps, strict=True):
            job = jobs.get(job_id)
            if job is not None and job.attempt == attempt:
                found[job_id] = first_step
        return found

    def _steps_done(self, job_id: int) -> int:
        """After how many steps the controller believes a job to stand."""
        job = self._tracker.jobs[job_id]
        return job.request.steps - job.done.num_steps_left


def _discard(blobs: Collection[StateBlob]) -> Iterator[Effect]:
    if blobs:
        yield Discard(tuple(blobs))
