"""How long a policy takes to decide, with many requests in the system."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from suite.case import Check, Finding, Note, Table
from suite.decision_times import FullSimulation, Thought, TimedController, row
from suite.stages import DIFFUSE
from suite.stats import median, over_repeats, p99
from tilework.control.controller import ControllerConfig
from tilework.core.request import Request, Shape
from tilework.core.time import ns_from_s
from tilework.cost.table import CostTable
from tilework.cost.table_file import read_table
from tilework.policy.registry import make_policy
from tilework.server.garbage import rare_collections
from tilework.sim.config import SimConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`jobs` requests are always in the system: as one ends, the next arrives, until `requests` have ended.

    `slo_s`: each request is due at a time after its arrival that is drawn evenly from this range. By default waiting
    takes about as long, so that some are early, some urgent and some late. `is_overloaded`: it takes longer, so that
    every node is full and defers requests all the time.
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
                with rare_collections():
                    repeats.append(self._run(size, seed))
            decisions = [[one for one in thoughts if one.num_starts] for thoughts in repeats]
            plans = [[one.plan_ms for one in thoughts] for thoughts in decisions]
            for name, of, goal_ms in (("median", median, size.median_ms), ("p99", p99, size.p99_ms)):
                check = Check(what=f"{size}: {name}", measured=over_repeats(plans, of), high=goal_ms, unit="ms")
                checks.append(check)
            rows.append(row(f"{size}: plan", plans))
            rows.append(row(f"{size}: handle", [[one.handle_ms for one in some] for some in decisions]))
            rows.append(row(f"{size}: handle, all events", [[one.handle_ms for one in some] for some in repeats]))
        columns = ("what", "count", "median", "p99", "largest")
        return Finding(
            checks=tuple(checks),
            method=self._method(),
            tables=(Table(title="In ms", columns=columns, rows=tuple(rows)),),
        )

    def _run(self, size: Size, seed: int) -> list[Thought]:
        """What the controller thought of each event while all `jobs` were there."""
        table = read_table(self.table)
        timed = TimedController(ControllerConfig(policy=size.policy), table, make_policy(size.policy))
        FullSimulation(
            timed,
            table,
            SimConfig(num_devices=size.devices, seed=seed, jitter=self.jitter),
            self._requests(table, size, Random(seed)),
            num_missing=lambda: size.jobs - timed.num_jobs,
            is_over=lambda: timed.num_ended >= size.requests,
        ).run_until_over()
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
            f"{self.table}, with so many requests in the system at all times. CPU time of the thread, with garbage "
            "collection as in the server.",
            "Judged are plans upon which works were started: a round policy plans only at the end of a round, "
            "and most events are over at once. If the policy is asked several times in one event, the sum counts.",
            "Every request is accepted without a predicted finish (see `queue`, `burst` and `frontdoor`).",
            "Intervals: extremes over the seeds.",
        )
