"""The controller: takes an event and the time, returns actions.

Theory of operation. `handle` does three things in this order:

1. it records what the event says happened (and ends jobs that came to their end by it);
2. it asks the policy what to do now, until the policy sets no more jobs aside (unless a request was refused, which
   changes nothing);
3. it turns the plan into actions, moving a job's state first where the plan changes its devices.

Every job ends exactly once, by one `Finish` (or, before it came in, one `Reject`). A work that is reported on twice,
or after its device was declared lost, is ignored; a report that overtakes that of an earlier work of its job waits for
it. Nothing here reads a clock or draws a random number, so a log of events gives the same actions again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilework.admission.admission import Admission
from tilework.admission.admission_limits import AdmissionLimits
from tilework.admission.reservation_guard import ReservationGuard
from tilework.control.job import Job
from tilework.control.occupancy import Occupancy, occupancy
from tilework.control.tracker import Tracker
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
)
from tilework.core.events import (
    Broken,
    Cancelled,
    DeviceJoined,
    DeviceLost,
    Event,
    LeftOut,
    OutOfMemory,
    Restored,
    StageFinished,
    StepsFinished,
    Stopped,
    Submitted,
    Woke,
    WorkFailed,
)
from tilework.core.interfaces import Admitted, Block, EtaPrediction, Policy, Refused
from tilework.core.progress import Cursor
from tilework.core.request import RefusalCode, Request, Status
from tilework.core.time import NS_PER_S
from tilework.core.work import DIFFUSE, ENCODE, Group, Plan, StageId, Start, Work
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.tabled import UnknownCost
from tilework.policy.registry import DEFAULT_POLICY, make_policy
from tilework.policy.toolkit.demand import usable_degree

_End = StepsFinished | StageFinished | Stopped | WorkFailed | OutOfMemory | Broken
_Report = LeftOut | _End

_MOST_PLANS = 3  # In answer to one event.
_MORE_TRIALS = 16  # Than there are requests, to find a deadline with which all of them would be let in.


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """`max_attempts`: how often in a row a request may lose a work without progress, until that fails it.

    `max_jobs`: how many requests may be waiting or running at a time; `max_backlog_ns`: how long the devices that are
    up may need for all of them when another comes in (see `admission.admission_limits`); `max_batch`: how many share a
    forward pass at most; 1 lets every request run as the stock pipeline does, bit for bit; `max_residents`: of how many
    a device keeps something, unless more run on it.
    """

    policy: str = DEFAULT_POLICY
    max_attempts: int = 3
    max_jobs: int = 32_768
    max_backlog_ns: int = 3600 * NS_PER_S
    max_batch: int = 12
    max_residents: int = 64


class Controller:
    """See the theory of operation above. Not thread-safe, and need not be: one driver calls it."""

    def __init__(self, config: ControllerConfig, table: CostTable) -> None:
        """Raises UnknownPolicy."""
        self.config = config
        self.costs = TableCosts(table, max_batch=config.max_batch)
        self._policy: Policy = make_policy(config.policy)
        self.tracker = Tracker(self._policy, self.costs)
        self._admission = Admission(
            limits=AdmissionLimits(max_jobs=config.max_jobs, max_backlog_ns=config.max_backlog_ns)
        )
        self._guard = ReservationGuard()
        self._next_job_id = 0
        self._wakes_ns: list[int] = []  # Asked for and not come yet, ascending.
        self._early: dict[int, list[_Report]] = {}  # Reports that wait for that on the work of this number.

    def handle(self, event: Event, now_ns: int) -> tuple[Action, ...]:
        self.tracker.at(now_ns)
        if self.costs.forget_memory(now_ns):
            self.tracker.unpark()
        actions = self._record(event, now_ns)
        if not any(isinstance(action, Reject) for action in actions):  # Then nothing has changed.
            actions += self._plan(now_ns)
        return tuple(actions)

    def eta_ns(self, job_id: int, now_ns: int) -> int:
        """When a job that has not ended is expected to be done; the same rule as at its admission."""
        self.tracker.at(now_ns)
        job = self.tracker.jobs[job_id]
        return self._admission.eta_ns(job, self.tracker, now_ns)

    @property
    def num_jobs(self) -> int:
        """Jobs that have not ended."""
        return self.tracker.num_jobs()

    @property
    def num_waiting(self) -> int:
        return self.tracker.num_waiting()

    @property
    def num_in_flight(self) -> int:
        """Works that have not ended."""
        return len(self.tracker.works)

    def occupancy(self, now_ns: int) -> Occupancy:
        """What waits and runs now; takes time in proportion to the open jobs."""
        return occupancy(self.tracker, now_ns)

    # 1. Record.

    def _record(self, event: Event, now_ns: int) -> list[Action]:
        match event:
            case Submitted() as submitted:
                return self._admit(submitted.requests, now_ns)
            case Restored(request, steps_done):
                return self._restore(request, steps_done, now_ns)
            case LeftOut() | StepsFinished() | StageFinished() | Stopped() | WorkFailed() | OutOfMemory() | Broken():
                return self._report(event, now_ns)
            case Cancelled(uid, reason):
                job_id = self.tracker.job_ids.get(uid)
                return [] if job_id is None else self._end(self.tracker.jobs[job_id], Status.CANCELLED, reason)
            case DeviceJoined(device_id, node, stages):
                self.tracker.add_device(device_id, node, stages)
                self.tracker.unpark()
                return []
            case DeviceLost(device_id):
                return self._lose(device_id, event.why, now_ns)
            case Woke():
                self._wakes_ns = [at_ns for at_ns in self._wakes_ns if at_ns > now_ns]
                return []

    def _admit(self, requests: Sequence[Request], now_ns: int) -> list[Action]:
        """Let all of them in, or none."""
        jobs: list[Job] = []
        accepts: list[Action] = []
        for request in requests:
            answer = self._ask(request, now_ns)
            if isinstance(answer, Refused):
                self._take_back(jobs)
                return self._reject(requests, len(jobs), answer, now_ns)
            jobs.append(self._enter(request, answer, len(jobs)))
            accepts.append(Accept(jobs[-1].job_id, request.uid, answer.eta_ns, answer.why))
        self._next_job_id += len(jobs)
        if any(job.promised is not None for job in jobs):
            self._guard.recheck()
        return accepts

    def _ask(self, request: Request, now_ns: int) -> Admitted | Refused:
        try:
            return self._admission.admit(request, self._policy, self.costs, self.tracker, now_ns)
        except UnknownCost as error:
            return Refused(str(error), None, RefusalCode.UNKNOWN_COST)

    def _enter(self, request: Request, answer: Admitted, index: int, done: Cursor | None = None) -> Job:
        delay_ns = self.tracker.delay_ns(request)
        job = Job(
            job_id=self._next_job_id + index,
            request=request,
            urgency_ns=self._policy.urgency_ns(request, False, delay_ns),
            delay_ns=delay_ns,
            promised=answer.promised,
            eta_prediction=answer.eta_prediction,
            done=done or Cursor.start(request),
        )
        self.tracker.add_job(job)
        return job

    def _take_back(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.tracker.remove_job(job)

    def _reject(self, requests: Sequence[Request], index: int, answer: Refused, now_ns: int) -> list[Action]:
        """Refuse all, since there is no place for the one with this index."""
        reason, earliest_ns = answer.reason, answer.earliest_ns
        if len(requests) > 1:
            reason = f"{reason} (request {index + 1} of {len(requests)} that come together)"
            if earliest_ns is not None and answer.code is RefusalCode.DEADLINE:
                earliest_ns = self._earliest_ns(requests, earliest_ns, now_ns)
        return [Reject(request.uid, reason, earliest_ns, answer.code, answer.retry_ns) for request in requests]

    def _earliest_ns(self, requests: Sequence[Request], due_ns: int, now_ns: int) -> int:
        """A deadline, from `due_ns` on, with which all would be let in together: the earliest, or nearly so.

        Each time the first that finds no place says what it needs. That may be earlier than what it has just been
        refused: a later deadline can break a promise that an earlier one does not. For several it has to be later, by
        steps that double.
        """
        step_ns = (due_ns - now_ns) // 32
        for _ in range(len(requests) + _MORE_TRIALS):
            jobs, answer = list[Job](), None
            for request in requests:
                later = replace(request, deadline_ns=due_ns)
                answer = self._ask(later, now_ns)
                if isinstance(answer, Refused):
                    break
                jobs.append(self._enter(later, answer, len(jobs)))
            self._take_back(jobs)
            if not isinstance(answer, Refused) or answer.earliest_ns is None:
                break
            if answer.earliest_ns > due_ns:
                due_ns = answer.earliest_ns
            else:
                due_ns, step_ns = due_ns + step_ns, 2 * step_ns
        return due_ns

    def _restore(self, request: Request, steps_done: int | None, now_ns: int) -> list[Action]:
        """Take in what had been accepted before, also where admission would refuse it now, then without a promise.

        What it costs must be known, though.
        """
        answer = self._ask(request, now_ns)
        if isinstance(answer, Refused) and answer.code is RefusalCode.UNKNOWN_COST:
            return [Reject(request.uid, answer.reason, None, answer.code)]
        if isinstance(answer, Refused):
            run_ns = self._policy.demand(request, Cursor.start(request), self.costs).run_ns
            answer = Admitted(now_ns + run_ns, answer.reason, EtaPrediction(run_ns, self.tracker.num_jobs(), 1.0))
        job = self._enter(request, answer, 0, _reached(request, steps_done))
        self._next_job_id += 1
        self._guard.recheck()
        return [Accept(job.job_id, request.uid, answer.eta_ns, f"it had been accepted before; {answer.why}")]

    def _report(self, report: _Report, now_ns: int) -> list[Action]:
        """Take a device's report, and those that waited for it."""
        work = self.tracker.works.get(report.work_id)
        if work is None:  # From a device already declared lost, or said twice.
            return []
        before = self.tracker.awaited(work)
        if before is not None:
            self._early.setdefault(before.work_id, []).append(report)
            return []
        if isinstance(report, LeftOut):
            members = [job for job in self.tracker.members(work) if job.job_id == report.job_id]
            return [action for job in members for action in self._retry(job, report.reason, report.state_lost)]
        return self._ended(work, report, now_ns) + self._bereaved(work) + self._catch_up(work, now_ns)

    def _bereaved(self, work: Work) -> list[Action]:
        """Begin those again whose next work is lost: they were left alone as long as this one, which had lost a member,
        could bring them further.
        """
        works = self.tracker.works
        jobs = [job for job in self.tracker.members(work) if job.works and job.works[0].work_id not in works]
        return [action for job in jobs for action in self._retry(job, "the device of its next work was lost")]

    def _catch_up(self, work: Work, now_ns: int) -> list[Action]:
        """A work has ended, or is lost: take the reports that came too early."""
        return [action for report in self._early.pop(work.work_id, ()) for action in self._report(report, now_ns)]

    def _ended(self, work: Work, report: _End, now_ns: int) -> list[Action]:
        match report:
            case StepsFinished(_, run_ns) | StageFinished(_, run_ns):
                return self._complete(work, run_ns, now_ns)
            case Stopped(_, steps_done):
                jobs = self.tracker.end_work(work, steps_done)
                return [] if steps_done else self._clear(jobs, work)
            case WorkFailed(_, reason, state_lost):
                return self._interrupted(work, 0, reason, state_lost)
            case Broken(_, steps_done):
                return self._interrupted(work, steps_done, report.why)
            case OutOfMemory(_, steps_done):
                return self._starved(work, steps_done, report.why, now_ns)

    def _clear(self, jobs: Sequence[Job], work: Work) -> list[Action]:
        """A work was revoked: let devices forget jobs of which nothing has run there, and which may not have come."""
        drops: list[Action] = []
        for job in jobs:
            strays = tuple(
                device_id
                for device_id in work.devices
                if device_id in job.holders and device_id not in job.done_devices
            )
            for device_id in strays:
                self.tracker.let_go(job, device_id)
            if strays:
                drops.append(DropState(job.job_id, strays))
        return drops

    def _complete(self, work: Work, run_ns: int, now_ns: int) -> list[Action]:
        jobs = self.tracker.end_work(work, work.num_steps)
        self._learn(work, jobs, run_ns, now_ns)
        finished = [job for job in jobs if job.done.stage is None]
        for job in finished:
            self._admission.learn(job.request, job.eta_prediction, now_ns - job.request.arrival_ns)
        return [action for job in finished for action in self._end(job, Status.DONE, "")]

    def _learn(self, work: Work, jobs: list[Job], run_ns: int, now_ns: int) -> None:
        """Correct the costs, unless a member has ended or begun again meanwhile: it may not have been part of it."""
        if len(jobs) != len(work.job_ids):
            return
        requests = [job.request for job in jobs]
        self.costs.observe(work.stage, requests, len(work.devices), work.num_steps, run_ns)
        shapes = [request.shape for request in requests]
        if self.costs.observe_memory(work, shapes, fitted=True, now_ns=now_ns):
            self.tracker.unpark()  # What is known of memory now may not keep them from running any more.

    def _interrupted(self, work: Work, steps_done: int, reason: str, state_lost: bool = False) -> list[Action]:
        jobs = self.tracker.end_work(work, steps_done)
        return [action for job in jobs for action in self._retry(job, reason, state_lost)]

    def _starved(self, work: Work, steps_done: int, reason: str, now_ns: int) -> list[Action]:
        """Run it otherwise from now on: on more devices, in slices, or with fewer members. That it did not fit is no
        failure of its jobs, unless it was known before. Without a member that has ended meanwhile nobody knows what it
        was that did not fit.

        Where it would fit on more devices than are up, it waits for them, or until it is forgotten that it did not fit.
        """
        actions: list[Action] = []
        jobs = self.tracker.end_work(work, steps_done)
        shapes = [job.request.shape for job in jobs]
        is_whole = len(jobs) == len(work.job_ids)
        is_excused = not is_whole or self.costs.observe_memory(work, shapes, fitted=False, now_ns=now_ns)
        for job in jobs:
            lacks_devices = self._lacks_devices(job)
            job.failures -= is_excused and not lacks_devices
            actions += self._retry(job, reason)
            if job.job_id in self.tracker.jobs and lacks_devices:
                self.tracker.park(job)
            elif job.promised is not None:
                self._fit_promise(job)
        return actions

    def _lacks_devices(self, job: Job) -> bool:
        """Whether the steps of a job would fit on more devices of a node than are up now, as they have been before.

        Not if nothing is known against those that are up: it may have been another stage that did not fit, of which
        nothing will be forgotten that could bring the job back.
        """
        stage, shape = StageId(job.request.pipeline, DIFFUSE), job.request.shape
        if self.costs.fits(stage, shape, usable_degree(stage, self.tracker.widest_now, self.costs)):
            return False
        degrees = [one for one in self._policy.degrees(job.request, self.costs) if one <= self.tracker.widest]
        fitting = [degree for degree in degrees if self.costs.fits(stage, shape, degree)]
        return bool(fitting) and min(fitting) > self.tracker.widest_now

    def _fit_promise(self, job: Job) -> None:
        """Keep a block that is wide enough for a promised job's memory."""
        assert job.promised is not None
        stage, width = StageId(job.request.pipeline, DIFFUSE), job.promised.demand.width
        if not self.costs.fits(stage, job.request.shape, width):
            self.tracker.reserve(job, min(self._policy.degrees(job.request, self.costs)), group=())
            self._guard.recheck()

    def _lose(self, device_id: int, why: str, now_ns: int) -> list[Action]:
        """Works that only this device had are lost; those with survivors end by `Broken`, when these have reported."""
        if self.tracker.device(device_id) is None:
            return []
        reported = {report.work_id for early in self._early.values() for report in early}
        lost = self.tracker.remove_device(device_id, reported)
        victims = {job.job_id: job for work in lost for job in self.tracker.members(work)}
        # A job whose first work has lost this member only goes on from what the others have: they will be heard.
        ended = [job for job in victims.values() if not self._will_break(job.works[0], device_id)]
        actions = [action for job in ended for action in self._retry(job, why)]
        return actions + [action for work in lost for action in self._catch_up(work, now_ns)]

    def _will_break(self, work: Work, device_id: int) -> bool:
        """Whether `Broken` follows the loss of a member."""
        return device_id in work.devices and work.work_id in self.tracker.works

    def _retry(self, job: Job, reason: str, state_lost: bool = False) -> list[Action]:
        """Go on from where completed works brought a job, or from its beginning; fail it when it makes no progress."""
        job.failures += 1
        if job.failures >= self.config.max_attempts:
            return self._end(job, Status.FAILED, f"{reason} (attempt {job.failures} of {self.config.max_attempts})")
        actions = self._abandon(job)
        self.tracker.restart(job, from_start=state_lost)
        self._guard.recheck()
        return actions

    def _end(self, job: Job, status: Status, reason: str) -> list[Action]:
        actions = self._abandon(job)
        self.tracker.remove_job(job)
        return [*actions, Finish(job.job_id, job.request.uid, status, reason)]

    def _abandon(self, job: Job) -> list[Action]:
        """Stop what is in flight of a job alone, and free what devices hold of it. Works with other members run on."""
        mine = [
            work for work in job.works if work.work_id in self.tracker.works and self.tracker.members(work) == [job]
        ]
        actions: list[Action] = [Stop(work.work_id) for work in mine]
        if job.holders:
            actions.append(DropState(job.job_id, tuple(sorted(job.holders))))
        return actions

    # 2. Plan.

    def _plan(self, now_ns: int) -> list[Action]:
        """Ask the policy; after what promises force to be started, ask again whether something may run beside it."""
        actions: list[Action] = []
        for _ in range(_MOST_PLANS):
            plan = self._policy.plan(self.tracker, self.costs, now_ns)
            while plan.dropped_to_best_effort:
                actions += self._dropped_to_best_effort(plan)
                plan = self._policy.plan(self.tracker, self.costs, now_ns)
            actions += self._stop(plan.stops)
            self._settle(now_ns)
            review = self._guard.review(plan.starts, self.tracker, self.costs, now_ns)
            actions += [action for start in review.starts for action in self._start(start)]
            self._reserve(review.blocks)
            self._settle(now_ns)
            forced = self._guard.forced(self.tracker, self.costs, now_ns)
            actions += [action for start in forced for action in self._start(start)]
            if not forced:
                break
        recall_ns = self.costs.forgets_ns if self.tracker.num_parked else None
        return actions + self._wake(plan.wake_ns, self._guard.wake_ns(self.tracker, now_ns), recall_ns)

    def _stop(self, job_ids: Sequence[int]) -> list[Action]:
        actions: list[Action] = []
        for job in map(self.tracker.jobs.__getitem__, job_ids):
            jobs = self.tracker.sharing(job)
            if all(one.may_stop for one in jobs):
                actions += [Stop(work.work_id) for work in self.tracker.stop(jobs)]
        return actions

    def _settle(self, now_ns: int) -> None:
        """Let the guard bring its proof up to date."""
        self._reserve(self._guard.update(self.tracker, self.costs, self._policy.degrees, now_ns))

    def _reserve(self, blocks: Mapping[int, Block]) -> None:
        for job_id, block in blocks.items():
            self.tracker.reserve(self.tracker.jobs[job_id], block.demand.width, block.devices)

    def _dropped_to_best_effort(self, plan: Plan) -> list[Action]:
        for job_id, _ in plan.dropped_to_best_effort:
            job = self.tracker.jobs[job_id]
            assert not job.dropped_to_best_effort, f"job {job_id} is set aside twice"
            delay_ns = self.tracker.delay_ns(job.request, dropped_to_best_effort=True)
            self.tracker.dropped_to_best_effort(job, self._policy.urgency_ns(job.request, True, delay_ns), delay_ns)
        return [DropToBestEffort(job_id, why) for job_id, why in plan.dropped_to_best_effort]

    # 3. Perform.

    def _wake(self, *wanted_ns: int | None) -> list[Action]:
        """Ask for the earliest of these times, unless the driver will wake the controller by then anyway."""
        at_ns = min((wanted for wanted in wanted_ns if wanted is not None), default=None)
        if at_ns is None or (self._wakes_ns and self._wakes_ns[0] <= at_ns):
            return []
        self._wakes_ns.insert(0, at_ns)
        return [WakeAt(at_ns)]

    def _start(self, start: Start) -> list[Action]:
        moves = [move for job_id in start.job_ids for move in self._moves(self.tracker.jobs[job_id], start)]
        work = self.tracker.commit(start)
        run = RunSteps(work) if work.stage.name == DIFFUSE else RunStage(work)
        return [*moves, run, *self._make_room(start.devices)]

    def _make_room(self, devices: Group) -> list[Action]:
        """Let devices forget the jobs that have been idle there longest; these come back from what was put down."""
        drops: list[Action] = []
        for device_id in devices:
            for job in self.tracker.residents_beyond(device_id, self.config.max_residents):
                self.tracker.let_go(job, device_id)
                drops.append(DropState(job.job_id, (device_id,)))
        return drops

    def _moves(self, job: Job, start: Start) -> list[Action]:
        """Bring a job's state to those devices of the start that will lack it; the encode stage needs none."""
        moves: list[Action] = []
        if start.stage.name != ENCODE and start.devices != job.last_devices:
            targets = [device_id for device_id in start.devices if device_id not in job.last_devices]
            new = tuple([device_id for device_id in targets if device_id not in job.holders])
            known = tuple([device_id for device_id in targets if device_id in job.holders])
            moves = [MoveState(job.job_id, devices, devices is new) for devices in (new, known) if devices]
        self.tracker.hold(job, start.devices)
        return moves


def _reached(request: Request, steps_done: int | None) -> Cursor:
    """Where a request stands whose state after so many steps is kept; None: nothing is."""
    start = Cursor.start(request)
    return start if steps_done is None else start.advanced(1).advanced(steps_done)
