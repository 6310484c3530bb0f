"""Yardsticks of the bound on requests on time: how tight it is, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from statistics import fmean

from suite.case import Check, Finding, Note, Table
from suite.stats import exact, extremes

from tilework.control.controller import ControllerConfig
from tilework.core.request import Request, Shape
from tilework.core.time import ns_from_s
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework_lab.optimum.bound import on_time_bound

GOAL_S, GOAL_LARGE_S = 1.0, 10.0  # On a machine that does nothing else.


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardsticks:
    """`cells` are (skew, factor of the deadlines, requests per minute and 8 devices), as in TetriServe §6.1.

    A size is the more probable the larger it is, by a factor exp(skew x pixels / most pixels).
    """

    table: str = "flux1dev_h100_eager"
    cells: tuple[tuple[float, float, float], ...] = ((0, 1.0, 12), (1, 1.0, 18))
    policies: tuple[str, ...] = ("tetriserve",)
    devices: int = 8
    requests: int = 300
    seeds: tuple[int, ...] = (0, 1)
    large: tuple[int, int, float] = (128, 5000, 30.0)

    @classmethod
    def make(cls, quick: bool) -> Yardsticks:
        return cls(requests=100, seeds=(0, 1), large=(128, 500, 30.0)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        table = read_table(self.table)
        rows = []
        times = []
        excess = 0
        for skew, scale, per_minute in self.cells:
            note(f"skew {skew:g}, deadlines x {scale:g}, {per_minute:g} per minute")
            loads = [_workload(table, self.requests, per_minute, scale, skew, seed) for seed in self.seeds]
            timed = [self._bound(load, table, self.devices) for load in loads]
            times += [seconds for _, seconds in timed]
            bounds = [bound for bound, _ in timed]
            reached = {policy: [self._reached(load, table, policy) for load in loads] for policy in self.policies}
            excess += sum(one > bound for some in reached.values() for one, bound in zip(some, bounds, strict=True))
            results: list[Sequence[float]] = [bounds, *reached.values()]
            shares = [fmean(one) / self.requests for one in results]
            rows.append((f"{skew:g}, {scale:g}, {per_minute:g}", *(f"{share:.3f}" for share in shares)))
        devices, count, per_minute = self.large
        note(f"{count} requests on {devices} devices")
        load = _workload(table, count, per_minute * devices / 8, 1.0, 1.0, 0)
        large, large_s = self._bound(load, table, devices)
        return Finding(
            checks=(
                Check(what="times that a policy exceeds the bound", measured=exact(excess), high=0),
                Check(
                    what=f"a bound of {self.requests} requests, {self.devices} devices",
                    measured=extremes(times),
                    high=GOAL_S,
                    unit="s",
                ),
                Check(
                    what=f"a bound of {count} requests, {devices} devices",
                    measured=extremes([large_s]),
                    high=GOAL_LARGE_S,
                    unit="s",
                ),
            ),
            method=(
                f"Simulated on {self.devices} devices by the table {self.table}, {self.requests} requests per seed; "
                "arrivals are Poisson, sizes are drawn independently. Shares are means over the seeds.",
                "Intervals: extremes over seeds and cells.",
            ),
            tables=(
                Table(
                    title="Share of requests on time",
                    columns=("skew, deadlines, per minute", "bound", *self.policies),
                    rows=tuple(rows),
                ),
            ),
            facts={f"bound of {count} requests on {devices} devices": f"{large / count:.4f}"},
        )

    def _bound(self, load: Sequence[Request], table: CostTable, devices: int) -> tuple[float, float]:
        """Return the bound, and the seconds that it took."""
        start = time.perf_counter()
        found = on_time_bound(load, TableCosts(table), num_devices=devices, devices_per_node=table.devices_per_node)
        return found.value, time.perf_counter() - start

    def _reached(self, load: Sequence[Request], table: CostTable, policy: str) -> int:
        simulation = Simulation(ControllerConfig(policy=policy), table, SimConfig(num_devices=self.devices))
        return sum(ending.on_time for ending in simulation.run(load).endings)


def _workload(table: CostTable, count: int, per_minute: float, scale: float, skew: float, seed: int) -> list[Request]:
    assert table.steps is not None
    rng = Random(seed)
    arrival_s = 0.0
    found = []
    shapes = {Shape(row.height, row.width) for row in table.rows}
    sizes = sorted((shape, table.slo_s[str(shape)]) for shape in shapes)
    most = max(shape.pixels for shape in shapes)
    weights = [exp(skew * shape.pixels / most) for shape, _ in sizes]
    for index in range(count):
        arrival_s += rng.expovariate(per_minute / 60)
        ((shape, slo_s),) = rng.choices(sizes, weights)
        found.append(
            Request(
                uid=str(index),
                pipeline=table.rows[0].pipeline,
                shape=shape,
                steps=table.steps,
                arrival_ns=ns_from_s(arrival_s),
                deadline_ns=ns_from_s(arrival_s + slo_s * scale),
            )
        )
    return found
