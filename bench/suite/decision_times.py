"""A simulation that stays full, and how long its controller takes for each event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from suite.stats import Interval, median, over_repeats, p99
from tilework.admission.admission import Admission
from tilework.admission.admission_limits import AdmissionLimits
from tilework.admission.contract import Admitted, Backlog, EtaPrediction
from tilework.admission.reservations import SearchBudget
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Action, DropComponents, LoadComponents, Place, RunWork
from tilework.core.events import Event, Submitted
from tilework.core.graph.progress import Cursor
from tilework.core.policy import CostModel, JobView, Policy
from tilework.core.request import Request, Status
from tilework.cost.table import CostTable
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(slots=True)
class Stopwatch:
    """The CPU time of the thread in what it is put `around`; `ns` adds up until it is set to 0."""

    ns: int = 0

    def around(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            start_ns = time.thread_time_ns()
            result = function(*args, **kwargs)
            self.ns += time.thread_time_ns() - start_ns
            return result

        return timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """One event: the time that it took, that of the policy in it, and that of the policy's solver, if it has one.

    Works that were started, requests of which these are the first works (`num_begun`), loads and drops of components
    (`num_changes`), and whether a new placement was `placed`. `num_jobs` requests are there afterwards, `num_waiting`
    of them wait, and `num_ended` have ended before.
    """

    handle_ms: float
    plan_ms: float
    solve_ms: float
    num_starts: int
    num_begun: int
    num_changes: int
    placed: bool
    num_jobs: int
    num_waiting: int
    num_ended: int


class TimedController(Controller):
    """A controller that keeps its `thoughts`. Without a `rule` it accepts every request, without a predicted finish.

    Put the stopwatch `solving` around what is to count as the policy's solver.
    """

    def __init__(
        self, config: ControllerConfig, table: CostTable, policy: Policy, rule: Admission | None = None
    ) -> None:
        limits = AdmissionLimits(max_jobs=config.max_jobs, max_backlog_ns=config.max_backlog_ns)
        self._planning, self.solving = Stopwatch(), Stopwatch()
        super().__init__(config, table, policy=_timed(policy, self._planning), rule=rule or _Open(limits=limits))
        self.thoughts: list[Thought] = []
        self.num_ended = 0

    def handle(self, event: Event, now_ns: int) -> tuple[Action, ...]:
        self._planning.ns = self.solving.ns = 0
        start_ns = time.thread_time_ns()
        actions = super().handle(event, now_ns)
        handle_ns = time.thread_time_ns() - start_ns
        works = [action.work for action in actions if isinstance(action, RunWork)]
        self.thoughts.append(
            Thought(
                handle_ms=handle_ns / 1e6,
                plan_ms=self._planning.ns / 1e6,
                solve_ms=self.solving.ns / 1e6,
                num_starts=len(works),
                num_begun=sum(any(not one.position for one in work.members) for work in works),
                num_changes=sum(isinstance(action, LoadComponents | DropComponents) for action in actions),
                placed=any(isinstance(action, Place) for action in actions),
                num_jobs=self.num_jobs,
                num_waiting=self.num_waiting,
                num_ended=self.num_ended,
            )
        )
        return actions


def _timed(policy: Policy, stopwatch: Stopwatch) -> Policy:
    """The same policy, whose plans are timed from now on; what else it can do is still found."""
    plan = stopwatch.around(policy.plan)
    timed = type("Timed", (type(policy),), {"__slots__": (), "plan": lambda _self, *given: plan(*given)})
    object.__setattr__(policy, "__class__", timed)
    return policy


class _Open(Admission):
    """Accepts every request."""

    def admit(
        self,
        request: Request,
        left: Cursor,
        policy: Policy,
        costs: CostModel,
        backlog: Backlog,
        now_ns: int,
        budget: SearchBudget,
    ) -> Admitted:
        demand = policy.demand(request, costs.start(request), costs)
        return Admitted("", EtaPrediction.alone(now_ns, demand), demand)

    def foreseen(self, job: JobView, policy: Policy, backlog: Backlog, now_ns: int) -> None:
        return None

    def learn(self, request: Request, told: EtaPrediction, now_ns: int, num_came: int) -> None:
        pass


class _Enough(Exception):
    """All is measured that was to be."""


class FullSimulation(Simulation):
    """Requests arrive as soon as fewer than so many are there, or wait: those that are missing come together."""

    def __init__(
        self,
        controller: TimedController,
        table: CostTable,
        config: SimConfig,
        supply: Iterator[Request],
        num_missing: Callable[[], int],
        is_over: Callable[[], bool],
    ) -> None:
        """`supply` has no end; arrivals and deadlines of its requests count from when they arrive."""
        super().__init__(controller.config, table, config, make_controller=lambda *_: controller)
        self._timed, self._supply, self._num_missing, self._is_over = controller, supply, num_missing, is_over
        self._is_due = False

    def run_until_over(self) -> None:
        with suppress(_Enough):
            self.run(())

    def _handle(self, event: Event) -> None:
        super()._handle(event)
        if self._is_over():
            raise _Enough
        if not self._is_due and self._num_missing() > 0:
            self._is_due = True
            self._clock.at(self._clock.now_ns, self._fill)

    def _fill(self) -> None:
        self._is_due = False
        now_ns = self._clock.now_ns
        new = [_shifted(next(self._supply), now_ns) for _ in range(self._num_missing())]
        for one in new:
            self._requests[one.uid] = one
            self._timing.note_request(one)
        if new:
            self._handle(Submitted(new[0], tuple(new[1:])))

    def _end(self, uid: str, status: Status, reason: str) -> None:
        super()._end(uid, status, reason)
        self._timed.num_ended += 1


def _shifted(request: Request, by_ns: int) -> Request:
    assert request.deadline_ns is not None
    return replace(request, arrival_ns=by_ns, deadline_ns=request.deadline_ns - request.arrival_ns + by_ns)


def row(what: str, repeats: Sequence[Sequence[float]]) -> tuple[str, ...]:
    """A row of a table: how many values, median, 99th percentile, largest."""
    together = [value for values in repeats for value in values]
    figures = (shown(over_repeats(repeats, median)), shown(over_repeats(repeats, p99)), f"{max(together):.3f}")
    return what, str(len(together)), *figures


def shown(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"
