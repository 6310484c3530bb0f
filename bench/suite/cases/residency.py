"""Many checkpoints on few devices: how much of what knowing the future would gain does `tilework` gain? Simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from suite.case import Check, Finding, Note, Table
from suite.stats import Interval, extremes
from tilework.control.controller import ControllerConfig
from tilework.core.request import Request
from tilework.cost.table import CostTable
from tilework.cost.table_file import read_table
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.workloads.registry import make_workload
from tilework.sim.workloads.requests import to_requests

SIMPLE, FUTURE, OURS = "deadline-lru", "deadline-belady", "tilework"


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """`gentd26` at these loads, with deadlines of these times the inference time; the mean over seeds."""

    loads: tuple[float, ...] = (0.35, 0.5, 0.65, 0.8)
    slos: tuple[float, ...] = (2.5, 3.5, 5.0)
    seeds: tuple[int, ...] = (7, 8, 9)
    to_hour: int = 18
    least_share: float = 0.5

    @classmethod
    def make(cls, quick: bool) -> Residency:
        return cls(loads=(0.5,), slos=(2.5,), seeds=(1,), to_hour=15) if quick else cls()

    def measure(self, note: Note) -> Finding:
        table, rows, leads, shares = read_table("gentd26"), list[tuple[str, ...]](), list[float](), list[float]()
        for load in self.loads:
            for slo in self.slos:
                note(f"load {load:g}, deadlines of {slo:g} times")
                asked = [self._requests(load, slo, seed) for seed in self.seeds]
                runs = {
                    policy: [_run(policy, table, one, seed) for one, seed in zip(asked, self.seeds, strict=True)]
                    for policy in (SIMPLE, FUTURE, OURS)
                }
                simple, future, ours = (fmean(on_time for on_time, _ in of) for of in runs.values())
                leads.append(ours - simple)
                shares.append((ours - simple) / (future - simple))
                reads = [f"{fmean(share for _, share in of):.0f}" for of in runs.values()]
                worst = min(mine - other for (mine, _), (other, _) in zip(runs[OURS], runs[SIMPLE], strict=True))
                rows.append(
                    (
                        f"{load:g}, {slo:g}",
                        *(f"{one:.1f}" for one in (simple, future, ours)),
                        f"{worst:+.1f}",
                        f"{shares[-1]:.0%}",
                        " / ".join(reads),
                    )
                )
        return Finding(
            checks=(
                Check(what=f"lead over {SIMPLE} in the worst cell", measured=_least(leads), low=0, unit="points"),
                Check(
                    what=f"share of the way to {FUTURE} in the worst cell",
                    measured=_least(shares),
                    low=self.least_share,
                ),
            ),
            method=(
                "Simulated: 73 checkpoints on four devices with room for 2 each, a host with room for 6 "
                "(lab/docs/workloads.md). On time in %, the mean over seeds.",
                f"{FUTURE} knows all requests that will come; it is {SIMPLE} with the best eviction there is for one "
                "memory alone, and no bound: it loads nothing ahead, and chooses requests as simply.",
                "The share of the way is 100% where tilework is on time as often as that. Reads are loads from the "
                "disk, by devices or by hosts ahead of need, per 100 requests, in the order of the policies.",
                "Seeds 1 to 6 were looked at while the rules of tilework were chosen. Intervals: extremes over cells.",
            ),
            tables=(
                Table(
                    title="On time, %",
                    columns=(
                        "load, deadline",
                        SIMPLE,
                        FUTURE,
                        OURS,
                        "lead at the worst seed",
                        "share of the way",
                        "reads",
                    ),
                    rows=tuple(rows),
                ),
            ),
        )

    def _requests(self, load: float, slo: float, seed: int) -> Sequence[Request]:
        parameters = {"load": load, "slo": slo, "to_hour": self.to_hour}
        return to_requests(make_workload("gentd26", parameters).requests(seed))


def _run(policy: str, table: CostTable, requests: Sequence[Request], seed: int) -> tuple[float, float]:
    """The requests on time, and the loads from the disk, per 100 requests."""
    config = SimConfig(num_devices=4, seed=seed)
    trace = Simulation(ControllerConfig(policy=policy), table, config).run(requests)
    return 100 * fmean(ending.on_time for ending in trace.endings), 100 * trace.num_reads / len(requests)


def _least(values: Sequence[float]) -> Interval:
    return extremes(values, min)
