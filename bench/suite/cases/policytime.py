"""How long a policy thinks when it decides, with many requests in the system."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from suite.case import Check, Finding, Note, Table
from suite.stats import Interval, median, over_repeats, p99
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Action, RunStage, RunSteps
from tilework.core.events import Event
from tilework.core.interfaces import ClusterView, CostModel, Policy
from tilework.core.request import Request, Shape, Status
from tilework.core.time import ns_from_s
from tilework.core.work import DIFFUSE, Plan
from tilework.cost.table import CostTable, read_table
from tilework.sim.simulation import SimConfig, Simulation

GOAL_MS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTime:
    """`jobs` requests are always in the system: as one ends, the next arrives, until `requests` have ended.

    `slo_s`: each is due at a time after its arrival that is drawn evenly from this range. Waiting takes about as long,
    so that some are early, some urgent and some past help.
    """

    policies: tuple[str, ...] = ("tetriserve",)
    table: str = "flux1dev_h100_eager"
    devices: int = 8
    jobs: int = 50
    requests: int = 1000
    steps: int = 20
    slo_s: tuple[float, float] = (5.0, 120.0)
    jitter: float = 0.05
    seeds: tuple[int, ...] = (1, 2, 3)

    @classmethod
    def make(cls, quick: bool) -> PolicyTime:
        return cls(requests=150, seeds=(1, 2)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        checks, rows, long = [], [], {}
        for policy in self.policies:
            repeats = []
            for seed in self.seeds:
                note(f"{policy}, seed {seed}")
                repeats.append(self._run(policy, seed))
            decisions = [[one for one in thoughts if one.num_starts] for thoughts in repeats]
            for what, of in (("handle", "handle_ms"), ("plan alone", "plan_ms")):
                times = [[getattr(one, of) for one in thoughts] for thoughts in decisions]
                checks.append(
                    Check(
                        what=f"{policy}: p99 of a decision, {what}",
                        measured=over_repeats(times, p99),
                        high=GOAL_MS,
                        unit="ms",
                    )
                )
                rows.append(_row(f"{policy}: decisions, {what}", times))
            rows.append(_row(f"{policy}: all events, handle", [[one.handle_ms for one in some] for some in repeats]))
            slow = [one.handle_ms for some in decisions for one in some if one.handle_ms > GOAL_MS]
            long[f"{policy}: decisions above {GOAL_MS:g} ms"] = f"{len(slow)}, {sum(slow):.0f} ms in all"
        columns = ("what", "count", "median", "p99", "largest")
        return Finding(
            checks=tuple(checks),
            method=self._method(),
            tables=(Table(title="In ms", columns=columns, rows=tuple(rows)),),
            facts=long,
        )

    def _run(self, policy: str, seed: int) -> list[Thought]:
        """What the controller thought of each event while all `jobs` were there."""
        table = read_table(self.table)
        requests = self._requests(table, Random(seed))
        config = SimConfig(num_gpus=self.devices, seed=seed, jitter=self.jitter)
        simulation = _Steady(ControllerConfig(policy=policy), table, config, requests, self.requests)
        timed = simulation.controller = _Timed(ControllerConfig(policy=policy), table)
        simulation.run([next(requests) for _ in range(self.jobs)])
        return [thought for thought in timed.thoughts if thought.num_jobs >= self.jobs - 1]

    def _requests(self, table: CostTable, rng: Random) -> Iterator[Request]:
        """Without end, all at time 0; their deadlines count from there."""
        shapes = sorted({Shape(row.height, row.width) for row in table.rows if row.stage == DIFFUSE})
        index = 0
        while True:
            index += 1
            yield Request(
                uid=str(index),
                pipeline=table.rows[0].pipeline,
                shape=rng.choice(shapes),
                steps=self.steps,
                arrival_ns=0,
                seed=index,
                deadline_ns=ns_from_s(rng.uniform(*self.slo_s)),
            )

    def _method(self) -> tuple[str, ...]:
        return (
            f"Measured around `Controller.handle` and `Policy.plan` in a simulation of {self.devices} devices by the "
            f"table {self.table}, with {self.jobs} requests in the system at all times; garbage collection is on.",
            "A decision is an event upon which works were started: a round policy plans only at the end of a round, "
            "and most events are over at once. If the policy is asked several times in one event, the sum counts.",
            "Intervals: extremes over the seeds.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """One event: the time that it took, that of the policy in it, works started, and jobs afterwards."""

    handle_ms: float
    plan_ms: float
    num_starts: int
    num_jobs: int


class _Steady(Simulation):
    """As a request ends, the next arrives, until `num_requests` have ended."""

    def __init__(
        self,
        controller: ControllerConfig,
        table: CostTable,
        config: SimConfig,
        supply: Iterator[Request],
        num_requests: int,
    ) -> None:
        super().__init__(controller, table, config)
        self._supply, self._num_requests = supply, num_requests

    def _end(self, uid: str, status: Status, reason: str) -> None:
        super()._end(uid, status, reason)
        if len(self._endings) < self._num_requests:
            now_ns = self._clock.now_ns
            following = _shifted(next(self._supply), now_ns)
            self._requests[following.uid] = following
            self._clock.at(now_ns, partial(self._submit, following.uid))


def _shifted(request: Request, by_ns: int) -> Request:
    assert request.deadline_ns is not None
    return replace(request, arrival_ns=request.arrival_ns + by_ns, deadline_ns=request.deadline_ns + by_ns)


class _Timed(Controller):
    def __init__(self, config: ControllerConfig, table: CostTable) -> None:
        super().__init__(config, table)
        self._policy = self._watched = _Watched(self._policy)
        self.thoughts: list[Thought] = []

    def handle(self, event: Event, now_ns: int) -> tuple[Action, ...]:
        self._watched.plan_ns = 0
        start_ns = time.perf_counter_ns()
        actions = super().handle(event, now_ns)
        self.thoughts.append(
            Thought(
                handle_ms=(time.perf_counter_ns() - start_ns) / 1e6,
                plan_ms=self._watched.plan_ns / 1e6,
                num_starts=sum(isinstance(action, RunSteps | RunStage) for action in actions),
                num_jobs=self.tracker.num_jobs(),
            )
        )
        return actions


class _Watched:
    """A policy whose plans are timed; `plan_ns` adds up until it is set to 0."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.plan_ns = 0
        self.urgency_ns, self.degrees, self.demand = policy.urgency_ns, policy.degrees, policy.demand

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        start_ns = time.perf_counter_ns()
        plan = self._policy.plan(view, costs, now_ns)
        self.plan_ns += time.perf_counter_ns() - start_ns
        return plan


def _row(what: str, repeats: Sequence[Sequence[float]]) -> tuple[str, ...]:
    together = [value for values in repeats for value in values]
    figures = (_shown(over_repeats(repeats, median)), _shown(over_repeats(repeats, p99)), f"{max(together):.3f}")
    return what, str(len(together)), *figures


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"
