"""The controller: takes an event and the time, returns actions.

Theory of operation. `handle` does three things in this order:

1. it records what the event says happened (and ends jobs that came to their end by it);
2. it asks the policy what to do now, until the policy sets no more jobs aside (unless a request was refused, which
   changes nothing);
3. it turns the plan into actions, moving a job's state first where the plan changes its devices.

Every job ends exactly once, by one `Finish` (or, before it came in, one `Reject`). A work that is reported on twice,
or after its device was declared lost, is ignored. Nothing here reads a clock or draws a random number, so a log of
events gives the same actions again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilework.control.job import Job
from tilework.control.tracker import Tracker
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
)
from tilework.core.events import (
    Broken,
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
from tilework.core.interfaces import Admission, Admitted, Block, Demand, Policy, Refused
from tilework.core.progress import Cursor
from tilework.core.request import RefusalCode, Request, Status
from tilework.core.work import DIFFUSE, ENCODE, Plan, Start, Work
from tilework.cost.table import CostTable, TableCosts, UnknownCost
from tilework.policy.admission import EtaAdmission
from tilework.policy.guard import Guard
from tilework.policy.registry import make_policy

_MOST_PLANS = 3  # In answer to one event.
_MORE_TRIALS = 16  # Than there are requests, to find a deadline with which all of them would be let in.


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """`max_attempts`: how often in a row a request may lose a work without progress, until that fails it.

    `max_jobs`: how many requests may be waiting or running at a time.
    """

    policy: str = "edf"
    max_attempts: int = 3
    max_jobs: int = 25_000


class Controller:
    """See the theory of operation above. Not thread-safe, and need not be: one driver calls it."""

    def __init__(self, config: ControllerConfig, table: CostTable) -> None:
        """Raises UnknownPolicy."""
        self.config = config
        self.costs = TableCosts(table)
        self._policy: Policy = make_policy(config.policy)
        self.tracker = Tracker(self._policy, self.costs)
        self._admission: Admission = EtaAdmission(max_jobs=config.max_jobs)
        self._guard = Guard()
        self._next_job_id = 0
        self._wakes_ns: list[int] = []  # Asked for and not come yet, ascending.

    def handle(self, event: Event, now_ns: int) -> tuple[Action, ...]:
        self.tracker.at(now_ns)
        actions = self._record(event, now_ns)
        if not any(isinstance(action, Reject) for action in actions):  # Then nothing has changed.
            actions += self._plan(now_ns)
        return tuple(actions)

    def eta_ns(self, job_id: int, now_ns: int) -> int:
        """When a job that has not ended is expected to be done; the same rule as at its admission."""
        self.tracker.at(now_ns)
        job = self.tracker.jobs[job_id]
        return self._admission.eta_ns(job, self.tracker, now_ns)

    # 1. Record.

    def _record(self, event: Event, now_ns: int) -> list[Action]:
        match event:
            case Submitted() as submitted:
                return self._admit(submitted.requests, now_ns)
            case StepsFinished(work_id, run_ns) | StageFinished(work_id, run_ns):
                return self._complete(work_id, run_ns, now_ns)
            case Stopped(work_id, steps_done):
                return self._stopped(work_id, steps_done)
            case WorkFailed(work_id, reason):
                return self._interrupted(work_id, 0, reason)
            case Broken(work_id, steps_done):
                return self._interrupted(work_id, steps_done, event.why)
            case Cancelled(uid, reason):
                job_id = self.tracker.job_ids.get(uid)
                return [] if job_id is None else self._end(self.tracker.jobs[job_id], Status.CANCELLED, reason)
            case GpuJoined(gpu, node, stages):
                self.tracker.add_device(gpu, node, stages)
                return []
            case GpuLost(gpu):
                return self._lose(gpu, event.why)
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

    def _enter(self, request: Request, answer: Admitted, index: int) -> Job:
        job = Job(
            job_id=self._next_job_id + index,
            request=request,
            urgency_ns=self._policy.urgency_ns(request, False),
            promised=_reserved(request, answer.promised),
            forecast=answer.forecast,
            done=Cursor.start(request),
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
            earliest_ns = None if earliest_ns is None else self._earliest_ns(requests, earliest_ns, now_ns)
        return [Reject(request.uid, reason, earliest_ns, answer.code) for request in requests]

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

    def _complete(self, work_id: int, run_ns: int, now_ns: int) -> list[Action]:
        work = self.tracker.works.get(work_id)
        if work is None:  # From a device already declared lost.
            return []
        jobs = self.tracker.end_work(work, work.num_steps)
        self._learn(work, jobs, run_ns)
        finished = [job for job in jobs if job.done.stage is None]
        for job in finished:
            self._admission.learn(job.request, job.forecast, now_ns - job.request.arrival_ns)
        return [action for job in finished for action in self._end(job, Status.DONE, "")]

    def _learn(self, work: Work, jobs: list[Job], run_ns: int) -> None:
        """Correct the costs, unless a job has ended meanwhile: what it was is gone."""
        if len(jobs) != len(work.job_ids):
            return
        requests = [job.request for job in jobs]
        self.costs.observe(work.stage, requests, len(work.gpus), work.num_steps, run_ns)

    def _stopped(self, work_id: int, steps_done: int) -> list[Action]:
        work = self.tracker.works.get(work_id)
        if work is not None:
            self.tracker.end_work(work, steps_done)
        return []

    def _interrupted(self, work_id: int, steps_done: int, reason: str) -> list[Action]:
        work = self.tracker.works.get(work_id)
        if work is None:
            return []
        jobs = self.tracker.end_work(work, steps_done)
        return [action for job in jobs for action in self._retry(job, reason)]

    def _lose(self, gpu: int, why: str) -> list[Action]:
        """Works that only this device had are lost; those with survivors end by `Broken`, when these have reported."""
        if gpu not in self.tracker.devices:
            return []
        lost = self.tracker.remove_device(gpu)
        for job in self.tracker.jobs.values():
            job.holders.discard(gpu)
            job.last_gpus = tuple(member for member in job.last_gpus if member != gpu)
        victims = {job.job_id: job for work in lost for job in self.tracker.members(work)}
        return [action for job in victims.values() for action in self._retry(job, why)]

    def _retry(self, job: Job, reason: str) -> list[Action]:
        """Go on from where completed works brought a job, or fail it when it makes no progress."""
        job.failures += 1
        if job.failures >= self.config.max_attempts:
            return self._end(job, Status.FAILED, f"{reason} (attempt {job.failures} of {self.config.max_attempts})")
        actions = self._abandon(job)
        self.tracker.restart(job)
        return actions

    def _end(self, job: Job, status: Status, reason: str) -> list[Action]:
        actions = self._abandon(job)
        self.tracker.remove_job(job)
        return [*actions, Finish(job.job_id, job.request.uid, status, reason)]

    def _abandon(self, job: Job) -> list[Action]:
        """Stop what is in flight of a job, and free what devices hold of it."""
        actions: list[Action] = [Stop(work.work_id) for work in job.works if work.work_id in self.tracker.works]
        if job.holders:
            actions.append(DropState(job.job_id, tuple(sorted(job.holders))))
        return actions

    # 2. Plan.

    def _plan(self, now_ns: int) -> list[Action]:
        """Ask the policy; after what promises force to be started, ask again whether something may run beside it."""
        actions: list[Action] = []
        for _ in range(_MOST_PLANS):
            plan = self._policy.plan(self.tracker, self.costs, now_ns)
            while plan.set_aside:
                actions += self._set_aside(plan)
                plan = self._policy.plan(self.tracker, self.costs, now_ns)
            starts = self._guard.review(plan.starts, self.tracker, self.costs, now_ns)
            actions += [action for start in starts for action in self._start(start)]
            forced = self._forced(now_ns)
            actions += [action for start in forced for action in self._start(start)]
            if not forced:
                break
        return actions + self._wake(plan.wake_ns, self._guard.wake_ns(self.tracker, now_ns))

    def _forced(self, now_ns: int) -> tuple[Start, ...]:
        wider = self._guard.widened(self.tracker, self.costs, self._policy.degrees, now_ns)
        for job_id, width in wider.items():
            self.tracker.reserve(self.tracker.jobs[job_id], width)
        return self._guard.forced(self.tracker, self.costs, now_ns)

    def _set_aside(self, plan: Plan) -> list[Action]:
        for job_id, _ in plan.set_aside:
            job = self.tracker.jobs[job_id]
            assert not job.set_aside, f"job {job_id} is set aside twice"
            self.tracker.set_aside(job, self._policy.urgency_ns(job.request, True))
        return [SetAside(job_id, why) for job_id, why in plan.set_aside]

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
        return [*moves, run]

    def _moves(self, job: Job, start: Start) -> list[Action]:
        """Bring a job's state to those devices of the start that will lack it; the encode stage needs none."""
        targets = [gpu for gpu in start.gpus if gpu not in job.last_gpus and start.stage.name != ENCODE]
        new = tuple(gpu for gpu in targets if gpu not in job.holders)
        known = tuple(gpu for gpu in targets if gpu in job.holders)
        job.holders.update(start.gpus)
        moves = ((new, True), (known, False))
        return [MoveState(job.job_id, gpus, conditioning) for gpus, conditioning in moves if gpus]


def _reserved(request: Request, promised: Demand | None) -> Block | None:
    if promised is None or request.deadline_ns is None:
        return None
    return Block(request.deadline_ns, 0, promised)
