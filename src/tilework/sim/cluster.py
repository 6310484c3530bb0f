"""What lies between the controller and the modelled devices: messages, works in flight, states put down, restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from tilework.control.tracker import Tracker
from tilework.control.watchdog import Watchdog, WatchdogConfig
from tilework.core.actions import Action, DropState, MoveState, RunStage, RunSteps, Stop
from tilework.core.events import (
    Broken,
    DeviceJoined,
    DeviceLost,
    Event,
    LeftOut,
    OutOfMemory,
    StageFinished,
    StepsFinished,
    Stopped,
    WorkFailed,
)
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.core.work import DECODE, DIFFUSE, StageId, Work
from tilework.cost.table_costs import TableCosts
from tilework.sim.clock import Clock
from tilework.sim.device import FRUITLESS, NEVER_NS, Fleet, Nature, Run, RunEnd, State, StateBlob, steps_by
from tilework.sim.faults import Dice
from tilework.sim.mail import Mail

MOST_STARTS = 4  # How often in a row a worker fails to start before it is given up.
_NOTICED_NS = 10 * NS_PER_MS

_States = Mapping[int, State]  # Of the members of a work, by job.


@dataclass(slots=True, kw_only=True, eq=False)
class _Flight:
    """A work that devices have been told to run, and what its members have said of its breaking off."""

    work: Work
    lost: set[int] = field(default_factory=set)
    reports: dict[int, tuple[Run, _States]] = field(default_factory=dict)
    is_broken_off: bool = False

    @property
    def is_settled(self) -> bool:
        return self.reports.keys() | self.lost == set(self.work.devices)


class Cluster:
    """Performs the controller's actions on a fleet, and `tell`s what comes of them.

    It keeps the states that works put down, of each job those at which the controller may still believe it to stand.
    `delivered` is called with the state of which a finished picture was made.
    """

    def __init__(
        self,
        clock: Clock,
        nature: Nature,
        costs: TableCosts,
        dice: Dice,
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
        self._num_devices = num_devices
        self._devices_per_node = devices_per_node
        self._stages = stages
        self._tell, self._delivered, self._given_up = tell, delivered, given_up
        self.fleet = Fleet(nature)
        self.runs: list[Run] = []
        self.num_refused = 0  # Works for which a device lacked the state, though all was well before.
        self._mail = Mail(clock, dice)
        self._lives = dict.fromkeys(range(num_devices), 0)
        self._starting = set(range(num_devices))
        self._in_flight: dict[int, _Flight] = {}
        self._latest: dict[int, Work] = {}
        self._kept: dict[int, dict[int, State]] = {}
        self._coming: dict[int, list[tuple[int, StateBlob]]] = {}
        self._seen_steps: dict[int, int] = {}
        self._is_ticking = False
        self._era = 0

    def attach(self, tracker: Tracker, costs: TableCosts) -> None:
        """Work for this controller from now on."""
        self._tracker = tracker
        self._watchdog = Watchdog(tracker, costs, WatchdogConfig())

    # What the controller wants.

    def perform(self, action: Action) -> None:
        match action:
            case RunStage(work) | RunSteps(work):
                self._run(work)
            case Stop(work_id):
                self._stop(work_id)
            case MoveState(job_id, targets, _):
                self._move(job_id, targets)
            case DropState(job_id, devices):
                self._send(devices, partial(self.fleet.forget, job_id))

    def _run(self, work: Work) -> None:
        self._in_flight[work.work_id] = _Flight(work=work)
        for job_id in work.job_ids:
            self._latest[job_id] = work
        if self._mail.is_instant:  # Nothing else can begin by it, and it only when it has come to the last one.
            self._send(work.devices, partial(self.fleet.enqueue, work))
            self._begin_next(work.devices[-1:])
        else:
            self._send(work.devices, partial(self._enqueue, work))
        if self._dice.faults and not self._is_ticking:
            self._is_ticking = True
            self._after(NS_PER_S, self._tick)

    def _enqueue(self, work: Work, device_id: int) -> None:
        self.fleet.enqueue(work, device_id)
        self._begin_next((device_id,))

    def _stop(self, work_id: int) -> None:
        """The leader's word counts; if it is lost, the work breaks off anyway."""
        flight = self._in_flight.get(work_id)
        if flight is not None:
            self._send(flight.work.devices[:1], partial(self._stop_at, flight.work))

    def _stop_at(self, work: Work, device_id: int) -> None:
        self._schedule(self.fleet.stop(device_id, work, self._clock.now_ns))
        self._begin_next(work.devices)  # A revoked work need not wait for its job's state.

    def _move(self, job_id: int, targets: Iterable[int]) -> None:
        behind = self._latest.get(job_id)
        is_awaited = behind is not None and behind.work_id in self._in_flight and self._is_member(job_id, behind)
        source = () if behind is None else behind.devices
        for target in targets:
            blob = StateBlob(job_id=job_id, move_ns=self._costs.move_ns(source, (target,)))
            if is_awaited and behind is not None:
                self._coming.setdefault(behind.work_id, []).append((target, blob))
            else:
                state = self._state(job_id, behind)
                blob.leave(state, self._clock.now_ns, lost=state is None)
            self._send((target,), partial(self.fleet.expect, blob))

    def _is_member(self, job_id: int, work: Work) -> bool:
        return any(job.job_id == job_id for job in self._tracker.members(work))

    def _state(self, job_id: int, behind: Work | None) -> State | None:
        """What a job's latest work has put down, or what there is if that was heard of; None if it is lost."""
        job = self._tracker.jobs[job_id]
        steps = job.request.steps - job.done.num_steps_left
        if behind is not None and behind.work_id in self._tracker.works and self._is_member(job_id, behind):
            steps = dict(behind.members)[job_id] + (behind.num_steps if behind.stage.name == DIFFUSE else 0)
        return self._kept.get(job_id, {}).get(steps)

    def forget(self, job_id: int) -> None:
        """A job has come to its end."""
        self._kept.pop(job_id, None)
        self._latest.pop(job_id, None)

    # Messages.

    def _send(self, devices: Iterable[int], deliver: Callable[[int], None]) -> None:
        """Let each of these workers hear of it, and `deliver` for it then."""
        is_instant = self._mail.is_instant
        for device_id in devices:
            if not is_instant:
                self._mail.send(("to", device_id), partial(self._arrive, device_id, self._lives[device_id], deliver))
            elif self.fleet.is_up(device_id):
                deliver(device_id)

    def _arrive(self, device_id: int, life: int, deliver: Callable[[int], None]) -> None:
        """What was meant for a worker that has died since is lost with it."""
        if self.fleet.is_up(device_id) and self._lives[device_id] == life:
            deliver(device_id)

    # Works begin and end.

    def _begin_next(self, devices: Iterable[int]) -> None:
        for run in self.fleet.begin_next(devices, self._clock.now_ns):
            self._schedule(run)
            if self._dice.faults:
                self._endanger(run)

    def _schedule(self, run: Run | None) -> None:
        if run is not None and run.end_ns < NEVER_NS:
            self._clock.at(run.end_ns, partial(self._end, run), is_nature=True)

    def _endanger(self, run: Run) -> None:
        """Let faults strike at some time of a run."""
        dice, length_ns = self._dice, min(run.end_ns, run.start_ns + NS_PER_S) - run.start_ns
        for device_id in run.devices:
            for kind in ("crash", "hang"):
                if dice.strikes(kind):
                    at_ns = run.start_ns + int(dice.share(kind) * length_ns)
                    self._clock.at(
                        at_ns, partial(self._strike, kind, device_id, self._lives[device_id]), is_nature=True
                    )
        if dice.strikes("node"):
            node = run.devices[0] // self._devices_per_node
            at_ns, down_s = run.start_ns + int(dice.share("node") * length_ns), dice.extent("node")
            for device_id in range(
                node * self._devices_per_node, min(self._num_devices, (node + 1) * self._devices_per_node)
            ):
                life = self._lives[device_id]
                self._clock.at(at_ns, partial(self._die, device_id, life, "its node was lost", down_s), is_nature=True)

    def _strike(self, kind: str, device_id: int, life: int) -> None:
        if kind == "crash":
            self._die(device_id, life, "it was killed", self._dice.extent("crash"))
        elif self.fleet.is_up(device_id) and self._lives[device_id] == life:
            self.fleet.hang(device_id)

    def _end(self, run: Run) -> None:
        if not self.fleet.end(run):
            return
        if run.steps:
            self.runs.append(run)
        # Of a whole group only the first is heard, unless a message may be lost or overtaken by another.
        speakers = run.devices[:1] if self._mail.is_safe and run.end is not RunEnd.BROKEN else run.devices
        put_down = {device_id: self._put_down(device_id, run) for device_id in speakers}
        self.fleet.settle(run)
        self._begin_next(run.devices)
        for device_id, states in put_down.items():
            self._mail.send(("from", device_id), self._of_era(partial(self._hear, device_id, run, states)))

    def _put_down(self, device_id: int, run: Run) -> _States:
        """What a device puts down at the end of a run, with which there is something to be done."""
        if run.end in FRUITLESS:
            return {}
        states: dict[int, State] = {}
        for job_id in run.work.job_ids:
            state = self.fleet.state(device_id, job_id)
            if state is not None and job_id not in run.left_out:
                states[job_id] = state
        return states

    def _hear(self, device_id: int, run: Run, states: _States) -> None:
        """The first of a group speaks for it. When a group breaks, all its survivors are heard."""
        flight = self._in_flight.get(run.work.work_id)
        is_leader = device_id == run.work.devices[0]
        if flight is None:
            if is_leader:
                self._tell_left_out(run)
                self._tell(_event(run))  # A late or repeated report, which must change nothing.
        elif is_leader and run.end is not RunEnd.BROKEN:
            self._land(flight, run, states)
        else:
            flight.reports[device_id] = run, states if run.end is RunEnd.BROKEN else {}
            self._land_if_settled(flight)

    def _land_if_settled(self, flight: _Flight) -> None:
        """A broken work ends where the survivor who came farthest has put its state down."""
        if not flight.is_settled or flight.work.work_id not in self._in_flight:
            return
        reports = [flight.reports[device_id] for device_id in flight.work.devices if device_id in flight.reports]
        run, states = max(reports, key=lambda report: report[0].steps if report[1] else 0)
        self._land(flight, run, states, is_broken=True)

    def _land(self, flight: _Flight, run: Run, states: _States, *, is_broken: bool = False) -> None:
        """Take over what a work has brought about, then tell the controller."""
        work = flight.work
        if run.left_out:
            self._leave_out(run)  # As long as those that go on are awaited.
        del self._in_flight[work.work_id]
        members = [job.job_id for job in self._tracker.members(work)]
        mine = {job_id: states[job_id] for job_id in members if job_id in states}
        is_done = run.end is RunEnd.DONE and not is_broken
        if work.stage.name != DECODE:
            for job_id, state in mine.items():
                self._keep(job_id, state)
        elif is_done:
            for job_id, state in mine.items():
                self._delivered(job_id, state)
        self._leave(work, mine if is_done else {})
        if not is_done and run.end in (*FRUITLESS, RunEnd.STARVED):
            self._break_off(flight)
        self._tell(Broken(work.work_id, run.steps if states else 0) if is_broken else _event(run))

    def _leave_out(self, run: Run) -> None:
        """The members whose states were lacking have not taken part."""
        for job_id, is_lost in run.left_out.items():
            if self._is_member(job_id, run.work):
                self.num_refused += self._tracker.awaited(run.work) is None
                if is_lost:
                    self._kept.pop(job_id, None)
        self._tell_left_out(run)

    def _tell_left_out(self, run: Run) -> None:
        """A work that has but one member fails without it."""
        for job_id, is_lost in run.left_out.items() if len(run.work.job_ids) > 1 else ():
            self._tell(LeftOut(run.work.work_id, job_id, "its device does not have its state", is_lost))

    def _keep(self, job_id: int, state: State) -> None:
        if not self._dice.strikes("checkpoint"):
            job, kept = self._tracker.jobs[job_id], self._kept.setdefault(job_id, {})
            done = job.request.steps - job.done.num_steps_left
            for steps in [steps for steps in kept if steps < done]:
                del kept[steps]
            kept[state.steps_done] = state

    def _leave(self, work: Work, states: _States) -> None:
        """What was to follow a work goes where it was to go; or a word that nothing comes."""
        coming = self._coming.pop(work.work_id, ())
        for _, blob in coming:
            blob.leave(states.get(blob.job_id), self._clock.now_ns)
        self._begin_next([target for target, _ in coming])

    def _break_off(self, flight: _Flight) -> None:
        flight.is_broken_off = True
        self._schedule(self.fleet.break_off(flight.work, self._clock.now_ns))
        self._begin_next(flight.work.devices)

    # Workers die and are started again.

    def _die(self, device_id: int, life: int, why: str, down_s: float) -> None:
        if not self.fleet.is_up(device_id) or self._lives[device_id] != life:
            return
        self._lives[device_id] += 1
        self._schedule(self.fleet.lose(device_id, self._clock.now_ns))
        self._starting.add(device_id)
        self._after(_NOTICED_NS, partial(self._notice, device_id, why))
        self._after(_NOTICED_NS + round(down_s * NS_PER_S), partial(self.start, device_id))

    def _notice(self, device_id: int, why: str) -> None:
        affected = [flight for flight in self._in_flight.values() if device_id in flight.work.devices]
        orphans = []
        for flight in affected:
            flight.lost.add(device_id)
            if flight.lost == set(flight.work.devices):
                del self._in_flight[flight.work.work_id]
                orphans.append(flight)
        self._tell(DeviceLost(device_id, why))
        for flight in affected:
            if flight in orphans:
                self._leave(flight.work, {})
            else:
                self._break_off(flight)
                self._land_if_settled(flight)

    def start_all(self) -> None:
        for device_id in range(self._num_devices):
            self.start(device_id)

    def start(self, device_id: int, attempt: int = 1) -> None:
        """Start a worker; when it has loaded its model it joins."""
        if self._dice.strikes("load"):
            if attempt < MOST_STARTS:
                wait_ns = round(self._dice.extent("load") * NS_PER_S)
                self._after(wait_ns, partial(self.start, device_id, attempt + 1))
                return
            self._starting.discard(device_id)
            if not self._starting and not any(map(self.fleet.is_up, range(self._num_devices))):
                self._given_up()
            return
        self._starting.discard(device_id)
        self.fleet.join(device_id)
        self._tell(DeviceJoined(device_id, device_id // self._devices_per_node, self._stages))

    def lose_all(self) -> dict[int, State]:
        """The whole server is gone, and the works and messages under way; returns what was put down last, by job."""
        self._era += 1
        for device_id in range(self._num_devices):
            self._lives[device_id] += 1
            if self.fleet.is_up(device_id):
                self.fleet.lose(device_id, self._clock.now_ns)
        self._starting = set(range(self._num_devices))
        last = {job_id: kept[max(kept)] for job_id, kept in self._kept.items() if kept}
        for table in (self._in_flight, self._latest, self._kept, self._coming, self._seen_steps):
            table.clear()
        self._is_ticking = False
        return last

    def _after(self, delay_ns: int, call: Callable[[], None]) -> None:
        self._clock.at(self._clock.now_ns + delay_ns, self._of_era(call))

    def _of_era(self, call: Callable[[], None]) -> Callable[[], None]:
        """The server that wanted this may be gone when its time comes."""
        era = self._era
        return lambda: call() if era == self._era else None

    def restore(self, job_id: int, state: State) -> None:
        """What was kept of a request, which is this job now."""
        self._kept[job_id] = {state.steps_done: state}

    def _tick(self) -> None:
        """Look after works that make no progress."""
        for run in self.fleet.runs():
            steps = steps_by(run, self._clock.now_ns)
            if steps > self._seen_steps.get(run.work.work_id, 0):
                self._seen_steps[run.work.work_id] = steps
                self._watchdog.progressed(run.work.work_id)
        for work in self._watchdog.look():
            self._shake(work)
        self._is_ticking = bool(self._tracker.works)
        if self._is_ticking:
            self._after(NS_PER_S, self._tick)

    def _shake(self, work: Work) -> None:
        """Break the group of a stuck work off; kill those that have not answered by the next time."""
        flight = self._in_flight.get(work.work_id)
        if flight is None:
            return
        if len(work.devices) > 1 and not flight.is_broken_off:
            self._break_off(flight)
            return
        for device_id in work.devices:
            if device_id not in flight.reports:
                self._die(device_id, self._lives[device_id], "it made no progress", 1.0)


def _event(run: Run) -> Event:
    """What the controller is told of a run's end."""
    work, run_ns = run.work, run.end_ns - run.start_ns
    match run.end:
        case RunEnd.DONE:
            kind = StepsFinished if work.stage.name == DIFFUSE else StageFinished
            return kind(work.work_id, run_ns)
        case RunEnd.STOPPED:
            return Stopped(work.work_id, run.steps)
        case RunEnd.BROKEN:
            return Broken(work.work_id, run.steps)
        case RunEnd.STARVED:
            return OutOfMemory(work.work_id, run.steps)
        case RunEnd.FAILED | RunEnd.REFUSED:
            return WorkFailed(work.work_id, "it went wrong", any(run.left_out.values()))
