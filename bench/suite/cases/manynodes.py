"""How many requests per second one controller decides for, with admission, on up to 64 nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from suite.case import Check, Finding, Note, Table
from suite.decision_times import Thought, TimedController, shown
from suite.stats import extremes, median, over_repeats, p99
from tilework.admission.admission import Admission
from tilework.admission.admission_limits import AdmissionLimits
from tilework.control.controller import ControllerConfig
from tilework.core.request import Request, Shape
from tilework.core.time import ns_from_s
from tilework.cost.table import CostTable
from tilework.cost.table_file import read_table
from tilework.policy.registry import make_policy
from tilework.server.garbage import rare_collections
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyNodes:
    """Each of `policies` on each number of `devices`, eight per node, with `rate` requests per second and device.

    Each of the `requests` is `side` pixels square, has `steps` steps, and is due `slo_s` after its arrival.
    """

    policies: tuple[str, ...] = ("tilework", "edf")
    devices: tuple[int, ...] = (8, 64, 512)
    rate: float = 5.0
    side: int = 256
    steps: int = 4
    slo_s: float = 1.0
    requests: int = 1000
    seeds: tuple[int, ...] = (1, 2)
    table: str = "flux1dev_h100_eager"
    jitter: float = 0.05
    median_ms: float = 2.0
    p99_ms: float = 5.0

    @classmethod
    def make(cls, quick: bool) -> ManyNodes:
        whole = cls()
        return replace(whole, devices=(8,), requests=50, seeds=(1,)) if quick else whole

    def measure(self, note: Note) -> Finding:
        checks, rows = [], []
        for policy in self.policies:
            for num_devices in self.devices:
                what, runs = f"{policy}, {num_devices} devices", []
                for seed in self.seeds:
                    note(f"{what}, seed {seed}")
                    with rare_collections():
                        runs.append(self._run(policy, num_devices, seed))
                decisions = [run.decisions_ms for run in runs]
                for name, of, high in (("median", median, self.median_ms), ("p99", p99, self.p99_ms)):
                    measured = over_repeats(decisions, of)
                    checks.append(Check(what=f"{what}: a decision, {name}", measured=measured, high=high, unit="ms"))
                able = extremes([1000 / run.each_ms for run in runs])
                low = self.rate * num_devices
                checks.append(Check(what=f"{what}: requests that it decides for", measured=able, low=low, unit="per s"))
                rows.append(_row(what, runs))
        return Finding(
            checks=tuple(checks),
            method=self._method(),
            tables=(
                Table(title="CPU time of the controller for a request, in ms", columns=_COLUMNS, rows=tuple(rows)),
            ),
        )

    def _run(self, policy: str, num_devices: int, seed: int) -> _Run:
        table, config = read_table(self.table), ControllerConfig(policy=policy)
        limits = AdmissionLimits(max_jobs=config.max_jobs, max_backlog_ns=config.max_backlog_ns)
        timed = TimedController(config, table, make_policy(policy), Admission(limits=limits))
        requests = self._requests(table, num_devices, Random(seed))
        sim_config = SimConfig(num_devices=num_devices, seed=seed, jitter=self.jitter)
        Simulation(config, table, sim_config, make_controller=lambda *_: timed).run(requests)
        return _Run(num_requests=len(requests), thoughts=timed.thoughts)

    def _requests(self, table: CostTable, num_devices: int, rng: Random) -> list[Request]:
        requests, at_s = list[Request](), 0.0
        for index in range(self.requests):
            at_s += rng.expovariate(self.rate * num_devices)
            requests.append(
                Request(
                    uid=str(index),
                    pipeline=table.rows[0].pipeline,
                    shape=Shape(self.side, self.side),
                    steps=self.steps,
                    arrival_ns=ns_from_s(at_s),
                    deadline_ns=ns_from_s(at_s + self.slo_s),
                )
            )
        return requests

    def _method(self) -> tuple[str, ...]:
        return (
            f"Simulated by the table {self.table}: {self.requests} requests of {self.side} px and {self.steps} steps, "
            f"{self.rate:g} per second and device. That is about 80% of what the devices can do. "
            "Times are CPU time of the thread around `Controller.handle`, admission included, with garbage collection "
            "as in the server. What HTTP and the engine take is not in them.",
            "A decision is an event upon which works were started. `requests that it decides for`: as many as one core "
            "has the time for, all events of a request counted; the goal is as many as come.",
            "Intervals: extremes over the seeds.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What the controller thought of each event of one simulation."""

    num_requests: int
    thoughts: Sequence[Thought]

    @property
    def decisions_ms(self) -> list[float]:
        return [one.handle_ms for one in self.thoughts if one.num_starts]

    @property
    def each_ms(self) -> float:
        """CPU time for a request, all its events together."""
        return sum(one.handle_ms for one in self.thoughts) / self.num_requests

    @property
    def plan_ms(self) -> float:
        """How much of that the policy's plans take."""
        return sum(one.plan_ms for one in self.thoughts) / self.num_requests


def _row(what: str, runs: Sequence[_Run]) -> tuple[str, ...]:
    requests, events = sum(run.num_requests for run in runs), sum(len(run.thoughts) for run in runs)
    parts = (extremes([run.each_ms for run in runs]), extremes([run.plan_ms for run in runs]))
    waiting = max(one.num_waiting for run in runs for one in run.thoughts)
    return what, str(requests), f"{events / requests:.1f}", *map(shown, parts), str(waiting)


_COLUMNS = ("policy, devices", "requests", "events of each", "all of it", "plans", "most that waited")
