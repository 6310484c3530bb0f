"""How long TridentServe's dispatcher thinks on large clusters, and what its greedy core is worth beside the solver."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from suite.case import Check, Finding, Note, Table
from suite.stages import DIFFUSE
from suite.stats import Interval, extremes, median, over_repeats, p99
from tilework.admission.contract import EtaPrediction
from tilework.control.cluster.job import Job
from tilework.core.block import Demand
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.policy.published.tridentserve.bids import one_by_one, read_bids
from tilework.policy.published.tridentserve.layout import PoolLayout
from tilework.policy.published.tridentserve.policy import TridentServe
from tilework.policy.published.tridentserve.program import EVERYWHERE, PoolOption, solve_quickly
from tilework.policy.published.tridentserve.ways import Profiles, Ways
from tilework.policy.toolkit.tasks import Task, TaskReader
from tilework.server.garbage import rare_collections
from tilework_lab.policies.tridentserve_ilp import Solution, solve, value_of

GOAL_SHARE = 0.995
NOW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trident:
    """All `sizes` devices are free, and so many requests wait for each device as `loads` say.

    Each has waited up to `waited_s`; a share is best effort, the others are due at a time after their arrival that is
    drawn from `slo_s`: some are roomy, some urgent, some late. `goals_ms` are those of a decision, by size.
    """

    table: str = "flux1dev_h100_eager"
    sizes: tuple[int, ...] = (1024, 4096)
    loads: tuple[float, ...] = (0.125, 0.5, 2.0)
    goals_ms: tuple[float, ...] = (5.0, 15.0)
    goals_up_to: float = 0.5
    waited_s: float = 30.0
    slo_s: tuple[float, float] = (5.0, 60.0)
    best_effort: float = 0.2
    max_nodes: int = 100
    decisions: int = 100
    seeds: tuple[int, ...] = (1, 2, 3)

    @classmethod
    def make(cls, quick: bool) -> Trident:
        return cls(sizes=(1024,), goals_ms=(5.0,), loads=(0.125, 0.5), decisions=20, seeds=(1,)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        table = read_table(self.table)
        checks, rows = [], []
        for size, goal_ms in zip(self.sizes, self.goals_ms, strict=True):
            for load in self.loads:
                note(f"{size} devices, {load:g} requests each")
                runs = [self._run(table, size, int(size * load), seed) for seed in self.seeds]
                times, knapsacks = [run.decision_ms for run in runs], [run.knapsack_ms for run in runs]
                shares = extremes([run.share for run in runs], min)
                if load <= self.goals_up_to:
                    what = f"{size} devices, {load:g} requests each"
                    kinds = (("median", median), ("p99", p99))
                    checks += [
                        Check(what=f"{what}: {name}", measured=over_repeats(times, of), high=goal_ms, unit="ms")
                        for name, of in kinds
                    ]
                    checks.append(Check(what=f"{what}: share of the bound", measured=shares, low=GOAL_SHARE))
                rows.append(
                    (
                        f"{size}, {load:g}",
                        *(_shown(over_repeats(of, how)) for of in (times, knapsacks) for how in (median, p99)),
                        f"{shares.value:.5f}",
                        f"{max(run.solved.gap for run in runs):.1e}",
                        f"{median([run.solve_ms for run in runs]):.0f}",
                    )
                )
        columns = ("devices, requests each", "decision", "p99", "knapsack alone", "p99", "share", "ILP's gap", "ILP")
        return Finding(
            checks=tuple(checks),
            method=self._method(),
            tables=(Table(title="In ms", columns=columns, rows=tuple(rows)),),
        )

    def _run(self, table: CostTable, size: int, count: int, seed: int) -> _Run:
        rng = Random(seed)
        tasks = self._tasks(table, count, rng)
        decision_ms, knapsack_ms = [], []
        options: Sequence[Sequence[PoolOption]] = ()
        layout = PoolLayout.colocated({0: range(table.devices_per_node)})
        profiles, costs = Profiles(), TableCosts(table)
        widest, capacities = {EVERYWHERE: table.devices_per_node}, {EVERYWHERE: size}
        with rare_collections():
            for _ in range(self.decisions):
                start_ns = time.thread_time_ns()
                options = [bid.within(widest) for bid in read_bids(one_by_one(tasks), Ways(layout, profiles, costs))]
                read_ns = time.thread_time_ns()
                chosen = solve_quickly(options, capacities)
                end_ns = time.thread_time_ns()
                decision_ms.append((end_ns - start_ns) / 1e6)
                knapsack_ms.append((end_ns - read_ns) / 1e6)
        start_ns = time.thread_time_ns()
        solved = solve(options, capacities, self.max_nodes)
        solve_ms = (time.thread_time_ns() - start_ns) / 1e6
        return _Run(decision_ms, knapsack_ms, value_of(options, chosen) / solved.bound, solved, solve_ms)

    def _tasks(self, table: CostTable, count: int, rng: Random) -> list[Task]:
        policy, costs = TridentServe(), TableCosts(table)
        reader = TaskReader({}, costs, table.devices_per_node, ns_from_s(NOW_S))
        shapes = sorted({Shape(row.height, row.width) for row in table.rows if row.stage == DIFFUSE})
        tasks = []
        for index in range(count):
            arrival_ns = ns_from_s(NOW_S - rng.uniform(0, self.waited_s))
            due_ns = arrival_ns + ns_from_s(rng.uniform(*self.slo_s))
            request = Request(
                uid=str(index),
                pipeline=table.rows[0].pipeline,
                shape=rng.choice(shapes),
                steps=table.steps or 20,
                arrival_ns=arrival_ns,
                deadline_ns=None if rng.random() < self.best_effort else due_ns,
            )
            job = Job(
                job_id=index,
                request=request,
                urgency_ns=policy.urgency_ns(request, False),
                eta_prediction=EtaPrediction(0, NS_PER_S, NS_PER_S, NS_PER_S, 0),
                demand=Demand(1, 0),
                done=costs.start(request),
            )
            task = reader.read(job)
            assert task is not None
            tasks.append(task)
        return tasks

    def _method(self) -> tuple[str, ...]:
        return (
            f"Snapshots of a cluster by the table {self.table}, with all devices free. A decision goes from the tasks "
            "that wait to the choice of their degrees: rewards, convex hulls, greedy knapsack. Reading the tasks and "
            "finding devices on nodes are not in it. Times are CPU time of the thread, with garbage collection as in "
            "the server.",
            f"The share is the value of the greedy knapsack, of the bound that HiGHS has proved after {self.max_nodes} "
            "nodes at most; the gap is between that bound and the solver's own choice. The ILP's time is in ms, too: "
            "building and solving.",
            f"Goals are for up to {self.goals_up_to:g} requests for each device.",
            "Intervals: extremes over the seeds.",
        )


@dataclass(frozen=True, slots=True)
class _Run:
    decision_ms: list[float]
    knapsack_ms: list[float]
    share: float
    solved: Solution
    solve_ms: float


def _shown(interval: Interval) -> str:
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"
