"""The driver core: takes the controller's actions and the devices' reports, returns messages and effects.

Theory of operation. A work is in flight from its action until its devices have reported or are all lost:

1. The reports of a group's members are merged into one end (`in_flight`), which the controller handles once. A repeated
   report, a report from a lost device, or a report after the work's end changes nothing; its blobs are discarded.
2. The blobs of the merged report are adopted for the jobs that the work still belongs to. A move that waited for the
   work is resolved before the controller handles the end: with the state if the work is done, else with nothing.
3. After the controller has handled the end, superseded states are discarded. It handles reports in the order of a job's
   works, in whatever order they arrive, so a state stays until the earlier ends are known.

The controller's answer to an event calls `perform` before the driver goes on. What that may change is no part of the
same answer here: it is a `FollowUp`, a call of its own.

Nothing here waits, reads a clock or touches bytes. `runtime` drives it with processes, `sim` with a virtual clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from tilework.control.controller import Controller
from tilework.control.driver.effects import (
    BreakOff,
    Discard,
    Effect,
    Effects,
    FollowUp,
    HandleEvent,
    Kill,
    Messages,
    ReportStuck,
    Resolve,
)
from tilework.control.driver.in_flight import InFlightWork
from tilework.control.driver.result import WorkResult, end_event
from tilework.control.driver.state_registry import StateMove, StateRegistry
from tilework.control.watchdog import Watchdog, WatchdogConfig
from tilework.core.actions import Action, DropComponents, DropState, LoadComponents, MoveState, RunWork, Stop
from tilework.core.checkpoint import Checkpoint
from tilework.core.events import DeviceLost, LeftOut, NodeLost, WorkFailed
from tilework.core.request import Request
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Forget, StopWork
from tilework.core.wire.reports import Absent, Ended, Ending, Failed
from tilework.core.work import Group, Work


class DriverCore:
    """See the theory of operation above. The driver calls `begin_job` and `states.end` when jobs begin and end."""

    def __init__(self, controller: Controller, watchdog: WatchdogConfig) -> None:
        self.states = StateRegistry()
        self._config = watchdog
        self._in_flight: dict[int, InFlightWork] = {}  # By work id.
        self._latest: dict[int, Work] = {}  # The latest work of each job that has not ended, by job id.
        self._moves: dict[int, list[StateMove]] = {}  # Moves that wait for a work to end, by its id.
        self.attach(controller)

    def attach(self, controller: Controller) -> None:
        """Use this controller from now on; it may have been rebuilt from its log."""
        self._tracker = controller.tracker
        self._costs = controller.costs
        self._watchdog = Watchdog(controller.tracker, controller.costs, self._config)

    # Queries of the driver.

    @property
    def work_ids(self) -> Sequence[int]:
        """Ids of the works in flight."""
        return tuple(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """True if it has no work, no move and no job."""
        return not (self._in_flight or self._moves or self._latest) and self.states.is_empty

    def has_works(self, device_ids: Group) -> bool:
        """Return whether a work is in flight on one of these devices."""
        return any(not set(device_ids).isdisjoint(one.work.devices) for one in self._in_flight.values())

    def work(self, work_id: int) -> Work | None:
        """Return the work with this id, if it is in flight."""
        in_flight = self._in_flight.get(work_id)
        return None if in_flight is None else in_flight.work

    def members(self, work_id: int) -> Mapping[int, int]:
        """Return the jobs that a work still belongs to, each with its position before it; empty if not in flight."""
        in_flight = self._in_flight.get(work_id)
        return {} if in_flight is None else self._members(in_flight.work)

    def is_paused(self, job_id: int) -> bool:
        """Return whether a job has not ended and has no work."""
        job = self._tracker.jobs.get(job_id)
        return job is not None and not job.works

    def is_preempted(self, job_id: int) -> bool:
        """Return whether a job is paused while a device of its latest work runs another job."""
        return self.is_paused(job_id) and any(map(self._tracker.is_busy, self._tracker.jobs[job_id].last_devices))

    # Actions of the controller.

    def perform(self, action: Action) -> Messages:
        """Return the messages for devices that an action causes, if any."""
        match action:
            case RunWork(work):
                return self._run(work)
            case Stop(work_id):
                return self._stop(work_id)
            case MoveState(job_id, targets, stages):
                return ((targets, self._move(job_id, targets, stages)),)
            case DropState(job_id, devices):
                return ((devices, Forget(job_id)),)
            case LoadComponents(device_id=device_id) | DropComponents(device_id):
                return (((device_id,), action),)
            case _:
                return ()

    def _run(self, work: Work) -> Messages:
        self._in_flight[work.work_id] = InFlightWork(work)
        for job_id in work.job_ids:
            self._latest[job_id] = work
        return ((work.devices, work),)

    def _stop(self, work_id: int) -> Messages:
        """Tell only the leader: it decides where a work stops. If it is lost, the work breaks off anyway."""
        in_flight = self._in_flight.get(work_id)
        return () if in_flight is None else ((in_flight.work.devices[:1], StopWork(work_id)),)

    def _move(self, job_id: int, targets: Group, stages: tuple[int, ...]) -> StateMove:
        """Return the move of a job's state after its latest work; resolved when that has ended, or now if it has."""
        latest = self._latest.get(job_id)
        source = () if latest is None else latest.devices
        move = StateMove(job_id=job_id, targets=targets, source=source, stages=stages)
        if latest is not None and latest.work_id in self._in_flight and job_id in self._members(latest):
            self._moves.setdefault(latest.work_id, []).append(move)
            return move
        return self.states.resolve(move, self._next_position(job_id, latest))

    def _next_position(self, job_id: int, latest: Work | None) -> int:
        """Return the position at which a job's next work begins; its latest work, if any, has ended.

        The controller may not count the latest work yet, because an earlier work of the job is still in flight.
        """
        if latest is not None and latest.work_id in self._tracker.works:
            position = self._members(latest).get(job_id)
            if position is not None:
                return position + latest.num_steps
        return self._position(job_id)

    def begin_job(self, job_id: int, request: Request, checkpoint: Checkpoint) -> None:
        """Record that a job has begun, from a checkpoint, which may be empty."""
        self.states.begin(job_id, self._costs.start(request).itinerary, checkpoint)

    def is_result(self, job_id: int, result: WorkResult) -> bool:
        """Return whether a work that has ended, and not been handled yet, wrote the result of a job."""
        position = result.members[job_id] + result.steps_done
        return position == self._tracker.jobs[job_id].done.itinerary.length

    def end_job(self, job_id: int) -> None:
        """Record that a job has ended. The driver ends or holds its blobs with `states`."""
        self._latest.pop(job_id, None)

    # Reports of devices.

    def on_progress(self, work_id: int) -> None:
        """Record that a step of a work has ended."""
        self._watchdog.on_progress(work_id)

    def on_report(self, device_id: int, report: Ended | Failed) -> Effects:
        """Handle the report that a device has ended a work, or failed in it."""
        in_flight = self._in_flight.get(report.work_id)
        if in_flight is None:
            return self._discard_unknown(report)
        if device_id in in_flight.reports:  # A repeated report.
            return ()
        if device_id in in_flight.lost:
            return self._discard_unknown(report)
        if isinstance(report, Failed):
            return self._fail_work(in_flight, report)
        if report.absent:
            left_out = [FollowUp(partial(self._leave_out, in_flight.work, one)) for one in report.absent]
            return [*left_out, FollowUp(partial(self._take, in_flight, device_id, report))]
        return self._take(in_flight, device_id, report)

    def _discard_unknown(self, report: Ended | Failed) -> Effects:
        """Discard the blobs of a report that changes nothing, unless an earlier copy of the report was taken."""
        blobs = report.blobs.values() if isinstance(report, Ended) else ()
        return _discard(self.states.unknown(blobs) if blobs else ())

    def _leave_out(self, work: Work, absent: Absent) -> Effects:
        """Record that a work ran without a member. It stays in flight: moves of the other members wait for it."""
        is_reset = absent.state_lost and absent.job_id in self._members(work)
        event = LeftOut(work.work_id, absent.job_id, absent.reason, absent.state_lost)
        return [*_discard(self.states.reset(absent.job_id) if is_reset else ()), HandleEvent(event)]

    def _take(self, in_flight: InFlightWork, device_id: int, report: Ended) -> Effects:
        """Take the report of a work in flight, which ends it if no other is awaited."""
        merged = in_flight.take(device_id, report)
        if not report.ending.is_cut_off:
            return self._end_work(in_flight, merged)
        return [*self._break_off(in_flight), *self._end_work(in_flight, merged)]  # No other may wait for this device.

    def _break_off(self, in_flight: InFlightWork) -> Effects:
        if len(in_flight.work.devices) == 1 or in_flight.is_broken_off:
            return ()
        in_flight.is_broken_off = True
        return (BreakOff(in_flight.work),)

    def _end_work(self, in_flight: InFlightWork, report: Ended | None) -> Effects:
        """Adopt the blobs of a work, resolve the moves that waited for it, then let the controller handle its end.

        There is no merged report, and no end, while other devices are awaited.
        """
        if report is None:
            return ()
        work = in_flight.work
        del self._in_flight[work.work_id]
        members = self._members(work)
        ending = self._ending(work, members, report)
        places = {job_id: position + report.steps_done for job_id, position in members.items()}
        superseded = in_flight.blobs_except(report) if in_flight.reports else []
        for job_id, blob in report.blobs.items():
            superseded += self.states.adopt(job_id, blob, places[job_id]) if job_id in places else (blob,)
        moves = self._resolve(work, places if ending is Ending.DONE else {})
        result = WorkResult(work, ending, end_event(work, ending, report), members, report)
        return [*moves, result, FollowUp(partial(self._advance, members, superseded))]

    def _advance(self, members: Mapping[int, int], superseded: Sequence[StateBlob]) -> Effects:
        """Discard what the end of a work has superseded, now that the controller has handled it."""
        blobs = [*superseded]
        for job_id in members:
            if job_id in self._tracker.jobs:
                blobs += self.states.advance(job_id, self._position(job_id))
        return _discard(blobs)

    def _ending(self, work: Work, members: Mapping[int, int], report: Ended) -> Ending:
        """Return how a work ended. One that was told to stop in its last step, and has written a result, is done."""
        if report.ending is Ending.STOPPED and report.steps_done == work.num_steps:
            ends = [(job_id, position + work.num_steps) for job_id, position in members.items()]
            if any(end == self._tracker.jobs[job_id].done.itinerary.length for job_id, end in ends):
                return Ending.DONE
        return report.ending

    def _fail_work(self, in_flight: InFlightWork, failed: Failed) -> Effects:
        work = in_flight.work
        effects = [*self._break_off(in_flight)]
        del self._in_flight[work.work_id]
        if failed.state_lost:
            for job_id in self._members(work):
                effects += _discard(self.states.reset(job_id))
        event = WorkFailed(work.work_id, failed.reason, failed.state_lost, failed.by_model)
        return [*effects, *self._write_off(in_flight, Ending.FAILED, event)]

    def _write_off(self, in_flight: InFlightWork, ending: Ending, event: WorkFailed | None = None) -> Effects:
        """End a work without results: its moves deliver nothing, and its blobs are discarded."""
        work = in_flight.work
        result = WorkResult(work, ending, event, self._members(work))
        return [*self._resolve(work, {}), result, *_discard(in_flight.blobs)]

    def _resolve(self, work: Work, places: Mapping[int, int]) -> Effects:
        """Resolve the moves that waited for a work, with the states of jobs at `places`, with nothing for its others.

        The next works of those other jobs are revoked, or need only what their devices have.
        """
        moves = self._moves.pop(work.work_id, ())
        return [Resolve(self.states.resolve(move, places.get(move.job_id))) for move in moves]

    # Lost devices and stuck works.

    def on_device_lost(self, device_id: int, reason: str) -> Effects:
        """Handle the loss of a device. Works without another device are lost; works of larger groups break off."""
        return self._lose((device_id,), DeviceLost(device_id, reason))

    def on_node_lost(self, node: int, device_ids: Group, blobs: Collection[StateBlob], reason: str) -> Effects:
        """Handle the loss of a node with all its devices, and of these blobs, which no other node has."""
        believed = {job_id: self._position(job_id) for job_id in self.states.job_ids}
        positions, outdated = self.states.lose(blobs, believed)
        event = NodeLost(node, device_ids, reason, tuple(sorted(positions.items())))
        return [*self._lose(device_ids, event), *_discard(outdated)]

    def _lose(self, device_ids: Group, event: DeviceLost | NodeLost) -> Effects:
        gone = set(device_ids)
        affected = [one for one in self._in_flight.values() if not gone.isdisjoint(one.work.devices)]
        for in_flight in affected:
            in_flight.lost |= gone.intersection(in_flight.work.devices)
            if in_flight.is_lost:
                del self._in_flight[in_flight.work.work_id]
        return [HandleEvent(event), *(FollowUp(partial(self._cut_off, one)) for one in affected)]

    def _cut_off(self, in_flight: InFlightWork) -> Effects:
        """End or break off a work that has lost devices, now that the controller knows of the loss."""
        if in_flight.is_lost:
            return self._write_off(in_flight, Ending.LOST)
        return [*self._break_off(in_flight), *self._end_work(in_flight, in_flight.merged())]

    def check_stuck(self) -> Effects:
        """Free the devices of works and loads that make no progress. To be called once per tick of the watchdog.

        A group is broken off first: its members report how far they came, which frees those that only waited for
        another. Devices that have not reported by the next alarm are killed; a device that runs a stuck work alone is
        killed at once.
        """
        effects: list[Effect] = []
        for work in self._watchdog.check():
            in_flight = self._in_flight.get(work.work_id)
            limit_ns = self._watchdog.limit_ns(work)
            if in_flight is None:
                continue
            effects.append(ReportStuck(work, limit_ns))
            broken_off = self._break_off(in_flight)
            effects += broken_off or [Kill(device_id, limit_ns) for device_id in sorted(in_flight.awaited)]
        return [*effects, *(Kill(device_id, limit_ns) for device_id, limit_ns in self._watchdog.check_loads())]

    # Queries of the tracker.

    def _members(self, work: Work) -> dict[int, int]:
        """Return the jobs that a work still belongs to, each with its position before the work."""
        jobs = self._tracker.jobs
        found: dict[int, int] = {}
        for one in work.members:
            job = jobs.get(one.job_id)
            if job is not None and job.attempt == one.attempt:
                found[one.job_id] = one.position
        return found

    def _position(self, job_id: int) -> int:
        """Return the position at which the controller believes a job to be."""
        return self._tracker.jobs[job_id].done.position


def _discard(blobs: Collection[StateBlob]) -> Effects:
    return (Discard(tuple(blobs)),) if blobs else ()
