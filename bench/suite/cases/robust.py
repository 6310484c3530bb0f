"""What is lost by a policy when the world is not as its cost table says (simulated)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from suite.case import Check, Finding, Note, Table
from suite.stats import Interval, extremes
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Action, DropToBestEffort
from tilework.core.events import Cancelled
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.cost.table import CostTable
from tilework.cost.table_file import read_table
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.workloads.registry import make_workload
from tilework.sim.workloads.requests import to_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """How the world differs from the table, and how many points of on-time share that may cost at most.

    `bias`: each row of the table that the controller starts from is off by a factor drawn evenly from 1 - bias to
    1 + bias. `is_dropping`: a request that cannot be on time any more is dropped, not served late.
    """

    name: str
    goal_points: float
    switch_ms: float = 0.0
    jitter: float = 0.0
    bias: float = 0.0
    is_dropping: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A workload of TetriServe."""

    mix: str
    scale: float
    rpm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Robust:
    """Each policy on each load with each seed, under each condition and under none."""

    policies: tuple[str, ...] = ("tilework", "gf-dit-edf-best-fit-drop", "tetriserve")
    judged: str = "tilework"
    table: str = "flux1dev_h100_eager"
    devices: int = 8
    requests: int = 300
    loads: tuple[Load, ...] = (
        Load(mix="uniform", scale=1.0, rpm=12),
        Load(mix="uniform", scale=1.0, rpm=18),
        Load(mix="uniform", scale=1.2, rpm=18),
        Load(mix="skewed", scale=1.0, rpm=12),
        Load(mix="skewed", scale=1.2, rpm=12),
        Load(mix="skewed", scale=1.5, rpm=18),
    )
    conditions: tuple[Condition, ...] = (
        Condition(name="5 ms lost per change of devices", goal_points=1.5, switch_ms=5),
        Condition(name="20 ms", goal_points=1.5, switch_ms=20),
        Condition(name="50 ms", goal_points=1.5, switch_ms=50),
        Condition(name="5% noise of durations", goal_points=0.5, jitter=0.05),
        Condition(name="table off by up to 10%", goal_points=2.0, bias=0.1),
        Condition(name="late requests dropped, not served", goal_points=0.3, is_dropping=True),
    )
    seeds: tuple[int, ...] = (1, 2)

    @classmethod
    def make(cls, quick: bool) -> Robust:
        whole = cls()
        if not quick:
            return whole
        return replace(whole, policies=("tilework",), requests=60, loads=whole.loads[:1], seeds=(1,))

    def measure(self, note: Note) -> Finding:
        table = read_table(self.table)
        checks: list[Check] = []
        rows: list[list[str]] = [["as the table says"], *([one.name] for one in self.conditions)]
        for policy in self.policies:
            note(f"{policy}, as the table says")
            plain = self._shares(policy, table, None)
            rows[0].append(f"{100 * fmean(plain):.1f}")
            for row, condition in zip(rows[1:], self.conditions, strict=True):
                note(f"{policy}, {condition.name}")
                shares = self._shares(policy, table, condition)
                # Of dropping it is the gain that is judged: what serving late requests costs.
                lost = _lost(shares, plain) if condition.is_dropping else _lost(plain, shares)
                row.append(f"{100 * fmean(shares):.1f}")
                if policy == self.judged:
                    what = "serving late requests instead of dropping them" if condition.is_dropping else condition.name
                    checks.append(
                        Check(what=f"{policy}: {what}", measured=lost, high=condition.goal_points, unit="points")
                    )
        return Finding(
            checks=tuple(checks),
            method=self._method(),
            tables=(
                Table(
                    title="On time, %, mean over loads and seeds, simulated",
                    columns=("", *self.policies),
                    rows=tuple(map(tuple, rows)),
                ),
            ),
        )

    def _shares(self, policy: str, table: CostTable, condition: Condition | None) -> list[float]:
        """On time, the mean over all loads, by seed."""
        return [fmean(self._share(policy, table, load, seed, condition) for load in self.loads) for seed in self.seeds]

    def _share(self, policy: str, table: CostTable, load: Load, seed: int, condition: Condition | None) -> float:
        condition = condition or Condition(name="", goal_points=0.0)
        config = SimConfig(
            num_devices=self.devices,
            seed=seed,
            jitter=condition.jitter,
            switch_ns=round(condition.switch_ms * NS_PER_MS),
        )
        believed = _biased(table, condition.bias, Random(seed))
        kind = _Dropping if condition.is_dropping else Simulation
        simulation = kind(ControllerConfig(policy=policy), believed, config, table)
        trace = simulation.run(self._requests(load, seed))
        return sum(ending.on_time for ending in trace.endings) / len(trace.endings)

    def _requests(self, load: Load, seed: int) -> list[Request]:
        parameters = {"mix": load.mix, "scale": load.scale, "rate_per_s": load.rpm / 60, "num_requests": self.requests}
        return to_requests(make_workload("tetriserve", parameters).requests(seed))

    def _method(self) -> tuple[str, ...]:
        return (
            f"Simulated with the table {self.table} on {self.devices} devices: {self.requests} requests of "
            f"TetriServe's workload per run, {len(self.loads)} loads with {len(self.seeds)} seeds each.",
            "Points lost are the difference of the mean shares on time, by seed; intervals: extremes over them.",
            "A change of devices loses the time where devices go on with another job, or a job on other devices.",
            "The controller corrects its table while it runs, as it does when it serves.",
        )


class _Dropping(Simulation):
    """Cancels at once each job that is dropped to best effort."""

    def _perform(self, action: Action) -> None:
        super()._perform(action)
        if isinstance(action, DropToBestEffort):
            uid = self._jobs[action.job_id].uid
            self._clock.at(self._clock.now_ns, lambda: self._handle(Cancelled(uid, "it cannot be on time any more")))


def _biased(table: CostTable, bias: float, rng: Random) -> CostTable:
    rows = tuple(replace(row, seconds=row.seconds * rng.uniform(1 - bias, 1 + bias)) for row in table.rows)
    return replace(table, rows=rows) if bias else table


def _lost(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Points lost, by seed."""
    return extremes([100 * (one - other) for one, other in zip(before, after, strict=True)], fmean)
