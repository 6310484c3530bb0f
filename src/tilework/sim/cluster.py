"""Simulated devices behind the driver core: messages to and from them, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from tilework.control.controller import Controller
from tilework.control.driver.core import DriverCore
from tilework.control.driver.effects import BreakOff, Discard, Effect, HandleEvent, Kill, Resolve
from tilework.control.driver.result import Ending, WorkResult, end_event, ending_of
from tilework.control.driver.state_registry import StateMove
from tilework.control.watchdog import WatchdogConfig
from tilework.core.actions import Action
from tilework.core.checkpoint import Checkpoint
from tilework.core.events import DeviceJoined, Event, LeftOut, WorkFailed
from tilework.core.time import NS_PER_S
from tilework.core.wire import Ended, Failed, Forget, StateBlob, StopWork
from tilework.core.work import DECODE, StageId, Work
from tilework.cost.table_costs import TableCosts
from tilework.sim.clock import Clock
from tilework.sim.device import StateTransfer
from tilework.sim.faults import Dice
from tilework.sim.fleet import Fleet, Nature
from tilework.sim.mail import Mail
from tilework.sim.reports import CUT_OFF, BlobStore, report_of
from tilework.sim.runs import FRUITLESS, Run, State
from tilework.sim.workers import Workers

_DOWN_S = 1.0  # For how long a worker is down that was killed since it made no progress.


class Cluster:
    """Sends what the driver core wants sent to a fleet, and `tell`s the controller what comes of it.

    `delivered` is called with the state of which a finished picture was made.

    Where no message can go astray, the leader of a group speaks for all of it unless the group was cut off, and
    messages are delivered at once. Both save time and decide nothing.
    """

    def __init__(
        self,
        clock: Clock,
        nature: Nature,
        costs: TableCosts,
        dice: Dice,
        controller: Controller,
        *,
        num_devices: int,
        devices_per_node: int,
        stages: frozenset[StageId],
        tell: Callable[[Event], None],
        delivered: Callable[[int, State], None],
        given_up: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._costs = costs
        self._dice = dice
        self._has_faults = bool(dice.faults)
        self._devices_per_node = devices_per_node
        self._stages = stages
        self._tell, self._delivered = tell, delivered
        self._controller = controller
        self._core = DriverCore(controller, WatchdogConfig())
        self.fleet = Fleet(nature)
        self.runs: list[Run] = []
        self.num_refused = 0  # Works for which a device lacked the state, though all was well before.
        self._workers = Workers(
            clock,
            dice,
            self.fleet,
            num_devices=num_devices,
            devices_per_node=devices_per_node,
            on_joined=self._join,
            on_lost=self._lose,
            on_given_up=given_up,
            on_cut=self._schedule,
        )
        self._mail = Mail(clock, dice)
        self._blobs = BlobStore()
        self._transfers: dict[StateMove, list[StateTransfer]] = {}  # Of moves that wait for the end of a work.
        self._seen_steps: dict[int, int] = {}
        self._is_ticking = False

    # The server and its jobs.

    def start(self) -> None:
        """Start all workers."""
        self._workers.start_all()

    def serve(self, controller: Controller) -> None:
        """The controller was built again from its log; all else goes on."""
        self._controller = controller
        self._core.attach(controller)

    def restart(self, controller: Controller) -> None:
        """The next server: it has the blobs that the former one's jobs could go on from, and no device."""
        self._controller = controller
        self._core = DriverCore(controller, WatchdogConfig())

    def lose_all(self) -> dict[int, Checkpoint]:
        """The whole server is gone, and the works and messages under way; returns what is left, by job."""
        self._workers.lose_all()
        self.fleet.forget_works()
        left = {job_id: self._left_of(job_id) for job_id in self._core.states.job_ids}
        self._blobs.keep_only([blob for checkpoint in left.values() for blob in checkpoint.blobs])
        self._transfers.clear()
        self._seen_steps.clear()
        self._is_ticking = False
        return {job_id: checkpoint for job_id, checkpoint in left.items() if checkpoint.blobs}

    def _left_of(self, job_id: int) -> Checkpoint:
        """What was put down last of a job, as far as it is still there. A simulated state holds its conditioning."""
        last = self._core.states.checkpoint(job_id)
        if last.state in self._blobs:
            return last
        return Checkpoint(conditioning=last.conditioning) if last.conditioning in self._blobs else Checkpoint()

    def begin(self, job_id: int, kept: Checkpoint) -> None:
        """A job has come in, of which so much is there already."""
        self._core.states.begin(job_id, kept)

    def end(self, job_id: int) -> None:
        """A job has come to its end."""
        self._core.end_job(job_id)
        self._blobs.discard(self._core.states.end(job_id))

    @property
    def leftovers(self) -> str:
        """What is kept though every job has ended, in words; empty if nothing is."""
        if self._core.is_idle and not len(self._blobs):
            return ""
        return f"works {self._core.work_ids}, jobs {self._core.states.job_ids}, {len(self._blobs)} blobs"

    # What the controller wants.

    def perform(self, action: Action) -> None:
        for devices, message in self._core.perform(action):
            match message:
                case Work():
                    self._run(message)
                case StateMove():
                    self._move(message)
                case StopWork(work_id):
                    work = self._core.work(work_id)
                    assert work is not None, f"work {work_id} is to stop, and is not in flight"
                    self._send(devices, partial(self._stop, work))
                case Forget(job_id):
                    self._send(devices, partial(self.fleet.forget, job_id))

    def _run(self, work: Work) -> None:
        if self._mail.is_instant:  # Nothing else can begin by it, and it only when it has come to the last one.
            self.fleet.enqueue(work, work.devices)
            self._begin_next(work.devices[-1:])
        else:
            self._send(work.devices, partial(self._enqueue, work))
        if self._has_faults and not self._is_ticking:
            self._is_ticking = True
            self._workers.after(NS_PER_S, self._tick)

    def _enqueue(self, work: Work, device_id: int) -> None:
        self.fleet.enqueue(work, (device_id,))
        self._begin_next((device_id,))

    def _stop(self, work: Work, device_id: int) -> None:
        self._schedule(self.fleet.stop(device_id, work, self._clock.now_ns))
        self._begin_next(work.devices)  # A revoked work need not wait for its job's state.

    def _move(self, move: StateMove) -> None:
        transfers = [
            StateTransfer(job_id=move.job_id, move_ns=self._costs.move_ns(move.source, (target,)))
            for target in move.targets
        ]
        if move.is_resolved:
            self._leave(move, transfers)
        else:
            self._transfers[move] = transfers
        for target, transfer in zip(move.targets, transfers, strict=True):
            self._send((target,), partial(self.fleet.expect, transfer))

    def _leave(self, move: StateMove, transfers: Iterable[StateTransfer]) -> None:
        state, is_lost = self._blobs.brought_by(move)
        for transfer in transfers:
            transfer.leave(state, self._clock.now_ns, is_lost)

    def _send(self, devices: Iterable[int], deliver: Callable[[int], None]) -> None:
        """Let each of these workers hear of it, and `deliver` for it then. What is meant for a dead one is lost."""
        is_instant = self._mail.is_instant
        for device_id in devices:
            if not is_instant:
                arrive = self._workers.guard(device_id, partial(deliver, device_id))
                self._mail.send(("to", device_id), arrive)
            elif self.fleet.is_up(device_id):
                deliver(device_id)

    # What devices report.

    def _begin_next(self, devices: Iterable[int]) -> None:
        for run in self.fleet.begin_next(devices, self._clock.now_ns):
            self._schedule(run)
            if self._has_faults:
                self._workers.endanger(run)

    def _schedule(self, run: Run | None) -> None:
        if run is not None and not run.hangs:
            self._clock.at(run.end_ns, partial(self._end, run), is_nature=True)

    def _end(self, run: Run) -> None:
        if not self.fleet.end(run):
            return
        if run.steps:
            self.runs.append(run)
        speakers = run.devices[:1] if self._mail.is_safe and run.end not in CUT_OFF else run.devices
        reports = [(device_id, report_of(run, self._serialize(device_id, run))) for device_id in speakers]
        self.fleet.forget_after(run)
        self._begin_next(run.devices)
        for device_id, report in reports:
            if self._mail.is_instant:
                self._hear(device_id, run, report)
            else:
                hear = self._workers.of_era(partial(self._hear, device_id, run, report))
                self._mail.send(("from", device_id), hear)

    def _serialize(self, device_id: int, run: Run) -> dict[int, StateBlob]:
        """The blobs that a device writes at the end of a run, by job. The leader does, and all of a group cut off.

        None without a step: the device may have another state of a job than that at which the work was to begin.
        """
        blobs: dict[int, StateBlob] = {}
        if not run.steps or run.end in FRUITLESS or (device_id != run.work.devices[0] and run.end not in CUT_OFF):
            return blobs
        for job_id in run.work.job_ids:
            state = self.fleet.state(device_id, job_id)
            if state is not None and job_id not in run.left_out:
                blobs[job_id] = self._blobs.put(state)
        return blobs

    def _hear(self, device_id: int, run: Run, report: Ended | Failed) -> None:
        work = run.work
        if device_id == work.devices[0]:
            if self._core.work(work.work_id) is None:
                self._tell_late(work, report)
            elif run.left_out:
                self.num_refused += self._num_refused(run)
        self._apply(self._core.on_report(device_id, report))

    def _tell_late(self, work: Work, report: Ended | Failed) -> None:
        """The core drops a report that is late or comes twice. The controller must bear it all the same."""
        if isinstance(report, Failed):
            self._tell(WorkFailed(work.work_id, report.reason, report.state_lost))
            return
        for one in report.absent:
            self._tell(LeftOut(work.work_id, one.job_id, one.reason, one.state_lost))
        self._tell(end_event(work, ending_of(report), report))

    def _num_refused(self, run: Run) -> int:
        """How many members were left out of a run that no earlier work has failed to bring there."""
        if self._controller.tracker.awaited(run.work) is not None:
            return 0
        return len(run.left_out.keys() & self._core.members(run.work.work_id).keys())

    def _apply(self, effects: Iterable[Effect]) -> None:
        """Do what the core wants, each before it goes on."""
        for effect in effects:
            match effect:
                case WorkResult():
                    self._end_work(effect)
                case Discard(blobs):
                    self._blobs.discard(blobs)
                case HandleEvent(event):
                    self._tell(event)
                case Resolve(move):
                    self._leave(move, self._transfers.pop(move))
                    self._begin_next(move.targets)
                case BreakOff(work):
                    self._break_off(work)
                case Kill(device_id):
                    self._workers.die(device_id, "it made no progress", _DOWN_S)

    def _break_off(self, work: Work) -> None:
        self._schedule(self.fleet.break_off(work, self._clock.now_ns))
        self._begin_next(work.devices)

    def _end_work(self, result: WorkResult) -> None:
        """See what a work has brought about, then tell the controller."""
        report = result.report
        if result.ending in (Ending.FAILED, Ending.OUT_OF_MEMORY):  # A second copy of its command must not begin.
            self._break_off(result.work)
        if report is not None:
            for job_id in result.members:
                if (blob := report.blobs.get(job_id)) is None:
                    continue
                if result.work.stage.name != DECODE:
                    if self._dice.strikes("checkpoint"):
                        self._blobs.discard((blob,))
                elif result.ending is Ending.DONE:
                    self._delivered(job_id, self._blobs[blob])
        if result.event is not None:
            self._tell(result.event)

    # Workers come and go.

    def _join(self, device_id: int) -> None:
        self._tell(DeviceJoined(device_id, device_id // self._devices_per_node, self._stages))

    def _lose(self, device_id: int, why: str) -> None:
        self._apply(self._core.on_device_lost(device_id, why))

    def _tick(self) -> None:
        """Look after works that make no progress."""
        for run in self.fleet.runs():
            steps = run.steps_by(self._clock.now_ns)
            if steps > self._seen_steps.get(run.work.work_id, 0):
                self._seen_steps[run.work.work_id] = steps
                self._core.on_progress(run.work.work_id)
        self._apply(self._core.check_stuck())
        self._is_ticking = bool(self._controller.num_in_flight)
        if self._is_ticking:
            self._workers.after(NS_PER_S, self._tick)
