"""How long it takes until thousands of requests that come at once to idle devices are accepted, placed and started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from suite.case import Check, Finding, Note, Table
from suite.decision_times import Thought, TimedController, row
from suite.stages import DIFFUSE
from suite.stats import median, over_repeats
from tilework.admission.admission import Admission
from tilework.admission.admission_limits import AdmissionLimits
from tilework.control.controller import ControllerConfig
from tilework.core.events import DeviceJoined, Submitted
from tilework.core.request import Request, Shape
from tilework.core.time import ns_from_s
from tilework.cost.table import CostTable
from tilework.cost.table_file import read_table
from tilework.policy.registry import make_policy
from tilework.server.garbage import rare_collections


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """`requests` of all sizes of the table, of `steps` steps, come together to `devices`, eight per node.

    Each is due at a time after its arrival that is drawn evenly from `slo_s`.
    """

    requests: int = 16_000
    devices: int = 4096
    policy: str = "tilework"
    table: str = "flux1dev_h100_eager"
    steps: int = 20
    slo_s: tuple[float, float] = (5.0, 120.0)
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    goal_ms: float = 1000.0

    @classmethod
    def make(cls, quick: bool) -> Burst:
        return cls(requests=1000, devices=256, seeds=(1,)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        thoughts = []
        for seed in self.seeds:
            note(f"seed {seed}")
            with rare_collections():
                thoughts.append(self._run(seed))
        plans, handles = [[one.plan_ms] for one in thoughts], [[one.handle_ms] for one in thoughts]
        rests = [[one.handle_ms - one.plan_ms] for one in thoughts]
        what = f"{self.requests} requests at once on {self.devices} devices"
        return Finding(
            checks=(
                Check(what=f"{what}: the plan", measured=over_repeats(plans, median), high=self.goal_ms, unit="ms"),
                Check(
                    what=f"{what}: accepted, placed and started",
                    measured=over_repeats(handles, median),
                    high=self.goal_ms,
                    unit="ms",
                ),
            ),
            method=(
                f"One event for `Controller.handle` with the policy {self.policy} and the table {self.table}. "
                "Admission predicts the finish of each request. CPU time of the thread, with garbage collection as in "
                "the server.",
                f"{min(one.num_starts for one in thoughts)} works or more are started.",
                "Intervals: extremes over the seeds.",
            ),
            tables=(
                Table(
                    title="In ms",
                    columns=("what", "count", "median", "p99", "largest"),
                    rows=(row("plan", plans), row("admission, and starting works", rests), row("all", handles)),
                ),
            ),
        )

    def _run(self, seed: int) -> Thought:
        table, config = read_table(self.table), ControllerConfig(policy=self.policy)
        limits = AdmissionLimits(max_jobs=config.max_jobs, max_backlog_ns=config.max_backlog_ns)
        timed = TimedController(config, table, make_policy(self.policy), Admission(limits=limits))
        for device_id in range(self.devices):
            timed.handle(DeviceJoined(device_id, device_id // 8), 0)
        first, *others = self._requests(table, Random(seed))
        timed.handle(Submitted(first, tuple(others)), 0)
        assert timed.num_jobs == self.requests, "all are accepted"
        return timed.thoughts[-1]

    def _requests(self, table: CostTable, rng: Random) -> Iterator[Request]:
        shapes = sorted({Shape(row.height, row.width) for row in table.rows if row.stage == DIFFUSE})
        for index in range(self.requests):
            yield Request(
                uid=str(index),
                pipeline=table.rows[0].pipeline,
                shape=rng.choice(shapes),
                steps=self.steps,
                arrival_ns=0,
                deadline_ns=ns_from_s(rng.uniform(*self.slo_s)),
            )
