"""The simulated driver: a virtual clock, modelled devices and the real controller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from tilework.control.controller import Controller, ControllerConfig
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
    Cancelled,
    Event,
    GpuJoined,
    StageFinished,
    StepsFinished,
    Stopped,
    Submitted,
    Woke,
)
from tilework.core.request import Request, Status
from tilework.core.work import DIFFUSE, Group, StageId, Work
from tilework.cost.table import CostTable, TableCosts
from tilework.sim.device import Fleet, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """What the modelled devices are like.

    `jitter` is the relative standard deviation of each work's duration (0: exactly its table time). `dispatch_ns` lies
    before every work and is not part of its run: what live devices lose between two works, one number or by degree
    (a degree that is not listed loses what the nearest narrower one does, or the narrowest). `result_ns` lies between
    the end of a request's last work and the client's answer.
    """

    num_gpus: int
    seed: int = 0
    jitter: float = 0.0
    dispatch_ns: int | Mapping[int, int] = 0
    result_ns: int = 0

    def dispatch_ns_at(self, degree: int) -> int:
        """What a work on so many devices loses before it runs."""
        if isinstance(self.dispatch_ns, int):
            return self.dispatch_ns
        known = self.dispatch_ns.keys()
        nearest = max((one for one in known if one <= degree), default=min(known, default=None))
        return 0 if nearest is None else self.dispatch_ns[nearest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one request ended; `job_id` and `eta_ns`, what admission predicted, are None if it was rejected."""

    request: Request
    status: Status
    finish_ns: int
    job_id: int | None
    eta_ns: int | None
    reason: str

    @property
    def on_time(self) -> bool:
        """Whether it was done by its deadline; without one, whether it was done."""
        deadline_ns = self.request.deadline_ns
        return self.status is Status.DONE and (deadline_ns is None or self.finish_ns <= deadline_ns)

    @property
    def latency_ns(self) -> int:
        return self.finish_ns - self.request.arrival_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a simulation did: executed works in order of their ends, endings in order of the requests given."""

    runs: tuple[Run, ...]
    endings: tuple[Ending, ...]
    num_events: int


class Simulation:
    """One run of the controller on modelled devices. Same arguments, same trace. `run` may be called once."""

    def __init__(
        self, controller: ControllerConfig, table: CostTable, config: SimConfig, devices: CostTable | None = None
    ) -> None:
        """Raises UnknownPolicy.

        Args:
            table: what the controller believes at first; its costs drift with what it observes.
            devices: what work truly costs on the modelled devices; the same by default.
        """
        self.controller = Controller(controller, table)
        self._devices = devices or table
        self._costs = TableCosts(self._devices)
        self._config = config
        self._random = Random(config.seed)
        self._fleet = Fleet()
        self._works: dict[int, Work] = {}
        self._heap: list[tuple[int, int, Event | Run]] = []
        self._sequence = 0
        self._requests: dict[str, Request] = {}
        self._jobs: dict[int, Request] = {}
        self._accepted: dict[str, Accept] = {}
        self._endings: dict[str, Ending] = {}
        self._runs: list[Run] = []

    @property
    def num_ended(self) -> int:
        """Requests that have ended so far."""
        return len(self._endings)

    def run(
        self,
        requests: Iterable[Request],
        cancels: Iterable[tuple[int, str]] = (),
        observe: Callable[[Event, tuple[Action, ...], int], None] | None = None,
    ) -> Trace:
        """Run until nothing is left to happen.

        Args:
            requests: each enters at its `arrival_ns`; ties enter in the order given.
            cancels: (time, uid) of clients that go away.
            observe: called after each event with what the controller answered, for checks and progress.
        """
        requests = list(requests)
        self._schedule_start(requests, cancels)
        num_events = 0
        while self._heap:
            now_ns, _, due = heappop(self._heap)
            event = self._end_run(due, now_ns) if isinstance(due, Run) else due
            if event is None:
                continue
            num_events += 1
            actions = self.controller.handle(event, now_ns)
            for action in actions:
                self._perform(action, now_ns)
            if observe is not None:
                observe(event, actions, now_ns)
        endings = tuple(self._endings[request.uid] for request in requests)
        return Trace(runs=tuple(self._runs), endings=endings, num_events=num_events)

    def _schedule_start(self, requests: list[Request], cancels: Iterable[tuple[int, str]]) -> None:
        stages = frozenset(StageId(row.pipeline, row.stage) for row in self._devices.rows)
        for gpu in range(self._config.num_gpus):
            self._schedule(0, GpuJoined(gpu, gpu // self._devices.gpus_per_node, stages))
        for request in requests:
            assert request.uid not in self._requests, f"two requests have the uid {request.uid}"
            self._requests[request.uid] = request
            self._schedule(request.arrival_ns, Submitted(request))
        for at_ns, uid in cancels:
            self._schedule(at_ns, Cancelled(uid, "the client went away"))

    def _schedule(self, at_ns: int, due: Event | Run) -> None:
        self._sequence += 1
        heappush(self._heap, (at_ns, self._sequence, due))

    # Actions.

    def _perform(self, action: Action, now_ns: int) -> None:
        match action:
            case Accept(job_id, uid):
                self._accepted[uid] = action
                self._jobs[job_id] = self._requests[uid]
            case Reject(uid, reason):
                self._end(uid, Status.REJECTED, now_ns, reason)
            case Finish(job_id, uid, status, reason):
                self._end(uid, status, now_ns + self._config.result_ns, reason)
            case RunStage(work) | RunSteps(work):
                self._works[work.work_id] = work
                self._fleet.enqueue(work, self._duration_ns(work), self._config.dispatch_ns_at(len(work.gpus)))
                self._begin_next(work.gpus, now_ns)
            case Stop(work_id):
                self._stop(self._works[work_id], now_ns)
            case MoveState(job_id, targets, _):
                self._move(job_id, targets, now_ns)
            case WakeAt(at_ns):
                self._schedule(at_ns, Woke())
            case DropState() | SetAside():
                pass

    def _end(self, uid: str, status: Status, finish_ns: int, reason: str) -> None:
        assert uid not in self._endings, f"request {uid} ended twice"
        accepted = self._accepted.get(uid)
        self._endings[uid] = Ending(
            request=self._requests[uid],
            status=status,
            finish_ns=finish_ns,
            job_id=None if accepted is None else accepted.job_id,
            eta_ns=None if accepted is None else accepted.eta_ns,
            reason=reason,
        )

    # Devices.

    def _duration_ns(self, work: Work) -> int:
        requests = [self._jobs[job_id] for job_id in work.job_ids]
        nominal_ns = self._costs.work_ns(work.stage, requests, len(work.gpus), work.num_steps)
        if self._config.jitter:
            nominal_ns = round(nominal_ns * max(0.2, self._random.gauss(1.0, self._config.jitter)))
        return nominal_ns

    def _move(self, job_id: int, targets: Group, now_ns: int) -> None:
        latest = self._fleet.latest(job_id)
        source = () if latest is None else latest.gpus
        for target in targets:
            self._fleet.move(job_id, target, self._costs.move_ns(source, (target,)), now_ns)

    def _begin_next(self, gpus: Iterable[int], now_ns: int) -> None:
        for run in self._fleet.begin_next(gpus, now_ns):
            self._schedule(run.end_ns, run)

    def _stop(self, work: Work, now_ns: int) -> None:
        run = self._fleet.stop(work, now_ns)
        if run is not None:
            self._schedule(run.end_ns, run)
        self._begin_next(work.gpus, now_ns)  # A revoked work need not wait for its job's state.

    def _end_run(self, run: Run, now_ns: int) -> Event | None:
        """The event of a run's end; None if a stop has shortened the run meanwhile."""
        touched = self._fleet.end(run)
        if not touched:
            return None
        del self._works[run.work.work_id]
        self._begin_next(touched, now_ns)
        if run.steps:
            self._runs.append(run)
        work_id, run_ns = run.work.work_id, run.end_ns - run.start_ns
        if run.stopped:
            return Stopped(work_id, run.steps)
        return StepsFinished(work_id, run_ns) if run.work.stage.name == DIFFUSE else StageFinished(work_id, run_ns)
