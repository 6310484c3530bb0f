"""How long a policy takes to decide, with many requests in the system."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from random import Random

from suite.case import Check, Finding, Note, Table
from suite.stages import DIFFUSE
from suite.stats import Interval, median, over_repeats, p99
from tilework.admission.admission import Admission
from tilework.admission.admission_limits import AdmissionLimits
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Action, RunWork
from tilework.core.events import Event, Submitted
from tilework.core.graph.progress import Cursor
from tilework.core.interfaces import Admitted, Backlog, ClusterView, CostModel, EtaPrediction, JobView, Policy
from tilework.core.request import Request, Shape, Status
from tilework.core.time import ns_from_s
from tilework.core.work import Plan
from tilework.cost.table import CostTable
from tilework.cost.table_file import read_table
from tilework.policy.registry import make_policy
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`jobs` requests are always in the system: as one ends, the next arrives, until `requests` have ended.

    `slo_s`: each request is due at a time after its arrival that is drawn evenly from this range. By default waiting
    takes about as long, so that some are early, some urgent and some late. `is_overloaded`: it takes longer, so that
    every node is full and defers requests all the time. The first `jobs` requests come together, which is to take
    `at_once_ms` at most; inf: no goal.
    """

    policy: str
    devices: int
    jobs: int
    requests: int
    seeds: tuple[int, ...] = (1, 2)
    slo_s: tuple[float, float] = (5.0, 120.0)
    is_overloaded: bool = False
    median_ms: float
    p99_ms: float
    at_once_ms: float = inf

    def __str__(self) -> str:
        load = ", overloaded" if self.is_overloaded else ""
        return f"{self.policy}, {self.devices} devices, {self.jobs} requests{load}"

    def overloaded(self, slo_s: tuple[float, float], p99_ms: float) -> Size:
        return replace(self, slo_s=slo_s, is_overloaded=True, p99_ms=p99_ms)


_NODE = Size(policy="tilework", devices=8, jobs=100, requests=600, median_ms=0.5, p99_ms=1.5)
_NODES = Size(policy="tilework", devices=64, jobs=500, requests=800, median_ms=2.0, p99_ms=5.0)
_MANY_NODES = Size(policy="tilework", devices=128, jobs=500, requests=800, median_ms=2.0, p99_ms=5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTime:
    """Each of `sizes`, with requests of all sizes of the table and `steps` steps."""

    sizes: tuple[Size, ...] = (
        _NODE,
        _NODE.overloaded((50.0, 100.0), 1.5),
        _NODES,
        _NODES.overloaded((30.0, 60.0), 8.0),
        _MANY_NODES,
        _MANY_NODES.overloaded((15.0, 30.0), 8.0),
        Size(
            policy="tilework",
            devices=4096,
            jobs=16_000,
            requests=30,
            seeds=(1,),
            median_ms=40.0,
            p99_ms=80.0,
            at_once_ms=1000.0,
        ),
        Size(policy="tetriserve", devices=8, jobs=50, requests=600, median_ms=3.0, p99_ms=3.0),
    )
    table: str = "flux1dev_h100_eager"
    steps: int = 20
    jitter: float = 0.05

    @classmethod
    def make(cls, quick: bool) -> PolicyTime:
        whole = cls()
        return replace(whole, sizes=(replace(whole.sizes[0], requests=60, seeds=(1,)),)) if quick else whole

    def measure(self, note: Note) -> Finding:
        checks, rows = [], []
        for size in self.sizes:
            repeats = []
            for seed in size.seeds:
                note(f"{size}, seed {seed}")
                repeats.append(self._run(size, seed))
            decisions = [[one for one in thoughts if one.num_starts] for thoughts in repeats]
            plans = [[one.plan_ms for one in thoughts] for thoughts in decisions]
            for name, of, goal_ms in (("median", median, size.median_ms), ("p99", p99, size.p99_ms)):
                check = Check(what=f"{size}: {name}", measured=over_repeats(plans, of), high=goal_ms, unit="ms")
                checks.append(check)
            if size.at_once_ms < inf:
                first = over_repeats([[thoughts[0].handle_ms] for thoughts in repeats], median)
                what = f"{size}: all at once, accepted and started"
                checks.append(Check(what=what, measured=first, high=size.at_once_ms, unit="ms"))
            rows.append(_row(f"{size}: plan", plans))
            rows.append(_row(f"{size}: handle", [[one.handle_ms for one in some] for some in decisions]))
            rows.append(_row(f"{size}: handle, all events", [[one.handle_ms for one in some] for some in repeats]))
        columns = ("what", "count", "median", "p99", "largest")
        return Finding(
            checks=tuple(checks),
            method=self._method(),
            tables=(Table(title="In ms", columns=columns, rows=tuple(rows)),),
        )

    def _run(self, size: Size, seed: int) -> list[Thought]:
        """What the controller thought of each event while all `jobs` were there."""
        table = read_table(self.table)
        requests = self._requests(table, size, Random(seed))
        config = SimConfig(num_devices=size.devices, seed=seed, jitter=self.jitter)
        timed = _Timed(ControllerConfig(policy=size.policy), table)
        simulation = _Steady(timed, table, config, requests, size.requests)
        with suppress(_Enough):
            simulation.run([next(requests) for _ in range(size.jobs)])
        return [thought for thought in timed.thoughts if thought.num_jobs >= size.jobs - 1]

    def _requests(self, table: CostTable, size: Size, rng: Random) -> Iterator[Request]:
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
                deadline_ns=ns_from_s(rng.uniform(*size.slo_s)),
            )

    def _method(self) -> tuple[str, ...]:
        return (
            "Measured around `Controller.handle` and `Policy.plan` in a simulation by the table "
            f"{self.table}, with so many requests in the system at all times. CPU time of the thread; garbage "
            "collection is on.",
            "Judged are plans upon which works were started: a round policy plans only at the end of a round, "
            "and most events are over at once. If the policy is asked several times in one event, the sum counts.",
            "Every request is accepted without a predicted finish (see `queue` and `frontdoor`).",
            "Intervals: extremes over the seeds.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """One event: the time that it took, that of the policy in it, works started, and jobs afterwards."""

    handle_ms: float
    plan_ms: float
    num_starts: int
    num_jobs: int


class _Enough(Exception):
    """So many requests have ended as were to."""


class _Steady(Simulation):
    """As a request ends, the next arrives, until `num_requests` have ended: then it raises _Enough."""

    def __init__(
        self,
        controller: Controller,
        table: CostTable,
        config: SimConfig,
        supply: Iterator[Request],
        num_requests: int,
    ) -> None:
        super().__init__(controller.config, table, config, make_controller=lambda *_: controller)
        self._supply, self._num_requests = supply, num_requests
        self._begun: set[str] = set()

    def _submit(self, uid: str) -> None:
        """The first ones come all together: one after another, 16,000 took longer than all that is measured."""
        first = [one for one in self._requests.values() if one.uid not in self._begun]
        self._begun |= {one.uid for one in first}
        for one in first:
            self._timing.note_request(one)
        if first:
            self._handle(Submitted(first[0], tuple(first[1:])))

    def _end(self, uid: str, status: Status, reason: str) -> None:
        super()._end(uid, status, reason)
        if len(self._endings) >= self._num_requests:
            raise _Enough
        now_ns = self._clock.now_ns
        following = _shifted(next(self._supply), now_ns)
        self._requests[following.uid] = following
        self._clock.at(now_ns, partial(self._submit, following.uid))


def _shifted(request: Request, by_ns: int) -> Request:
    assert request.deadline_ns is not None
    return replace(request, arrival_ns=request.arrival_ns + by_ns, deadline_ns=request.deadline_ns + by_ns)


class _Timed(Controller):
    def __init__(self, config: ControllerConfig, table: CostTable) -> None:
        self._watched = _Watched(make_policy(config.policy))
        limits = AdmissionLimits(max_jobs=config.max_jobs, max_backlog_ns=config.max_backlog_ns)
        super().__init__(config, table, policy=self._watched, rule=_Open(limits=limits))
        self.thoughts: list[Thought] = []

    def handle(self, event: Event, now_ns: int) -> tuple[Action, ...]:
        self._watched.plan_ns = 0
        start_ns = time.thread_time_ns()
        actions = super().handle(event, now_ns)
        self.thoughts.append(
            Thought(
                handle_ms=(time.thread_time_ns() - start_ns) / 1e6,
                plan_ms=self._watched.plan_ns / 1e6,
                num_starts=sum(isinstance(action, RunWork) for action in actions),
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
        start_ns = time.thread_time_ns()
        plan = self._policy.plan(view, costs, now_ns)
        self.plan_ns += time.thread_time_ns() - start_ns
        return plan


class _Open(Admission):
    """Accepts every request."""

    def admit(
        self, request: Request, left: Cursor, policy: Policy, costs: CostModel, backlog: Backlog, now_ns: int
    ) -> Admitted:
        policy.demand(request, costs.start(request), costs)
        return Admitted(now_ns, "", EtaPrediction(0, 0, 1.0))

    def eta_ns(self, job: JobView, costs: CostModel, backlog: Backlog, now_ns: int) -> int:
        return now_ns

    def learn(self, request: Request, eta_prediction: EtaPrediction, latency_ns: int) -> None:
        pass


def _row(what: str, repeats: Sequence[Sequence[float]]) -> tuple[str, ...]:
    together = [value for values in repeats for value in values]
    figures = (_shown(over_repeats(repeats, median)), _shown(over_repeats(repeats, p99)), f"{max(together):.3f}")
    return what, str(len(together)), *figures


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"
