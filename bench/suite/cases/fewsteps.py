"""Models of few steps: are their deadlines kept as well as those of many, at the same relative load? Simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from suite.case import Check, Finding, Note, Table
from suite.stages import DECODE, DIFFUSE, ENCODE
from suite.stats import exact, extremes
from tilework.control.controller import ControllerConfig
from tilework.core.cost_row import CostRow
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_MS, NS_PER_S, ns_from_s
from tilework.cost.degrees import least_device_ns, optimal_latency_ns
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace
from tilework_lab.optimum.bound import on_time_bound

CHUNK_NS = 200 * NS_PER_MS
"""Of the default policy: a run of steps takes no longer, unless one step does."""
_SIDES = (256, 512, 1024, 2048)
_DECODE_S = {256: 0.02, 512: 0.04, 1024: 0.12, 2048: 0.55}
_ENCODE_S = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class FewSteps:
    """`requests` per seed of FLUX's four sizes on `devices` devices, `steps` each, the last of them the many.

    `loads` are least device times that arrive, over that of the devices; `slacks` deadlines over the latency alone at
    the optimal degree. Few steps are judged whole, and cut into as many as the many, so that the sum of their times
    stays: a step cannot be interrupted, which the bound leaves out. `goal_points` is how much of the bound they may
    reach less.
    """

    table: str = "flux1dev_h100_eager"
    steps: tuple[int, ...] = (4, 8, 28)
    loads: tuple[float, ...] = (0.4, 0.6, 0.8)
    slacks: tuple[float, ...] = (1.5, 2.5)
    policies: tuple[str, ...] = ("tilework", "edf", "tetriserve")
    judged: str = "tilework"
    devices: int = 8
    requests: int = 300
    seeds: tuple[int, ...] = (1, 2, 3)
    goal_points: float = 1.0

    @classmethod
    def make(cls, quick: bool) -> FewSteps:
        return cls(requests=60, loads=(0.6,), slacks=(1.5,), seeds=(1,)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        table, shares, rows, longest = staged(read_table(self.table)), dict[str, list[float]](), [], list[float]()
        *few, many = self.steps
        whole = {f"{steps} steps": (table, steps) for steps in self.steps}
        cut = {f"{steps} steps, cut into {many}": (cut_into(table, steps, many), many) for steps in few}
        for name, (costs, steps) in (whole | cut).items():
            for load in self.loads:
                for slack in self.slacks:
                    note(f"{name}, load {load:.0%}, deadlines x {slack:g}")
                    found = [self._cell(costs, steps, load, slack, seed) for seed in self.seeds]
                    of_bound = {
                        policy: [on_time(traces[policy]) / bound for bound, traces in found] for policy in self.policies
                    }
                    shares.setdefault(name, []).append(fmean(of_bound[self.judged]))
                    longest += [longest_chunk(traces[self.judged]) for _, traces in found]
                    means = (f"{100 * fmean(of_bound[policy]):.1f}" for policy in self.policies)
                    of_all = fmean(bound for bound, _ in found) / self.requests
                    rows.append((f"{name}, {load:.0%}, {slack:g}", f"{of_all:.3f}", *means))
        most = shares.pop(f"{many} steps")
        checks = [self._check(name, most, of_name) for name, of_name in shares.items()]
        too_long = sum(one > 1 for one in longest)
        checks.append(
            Check(what=f"{self.judged}: runs longer than a chunk and a step", measured=exact(too_long), high=0)
        )
        return Finding(checks=tuple(checks), method=self._method(), tables=(self._table(rows),))

    def _check(self, name: str, many: Sequence[float], few: Sequence[float]) -> Check:
        lost = [100 * (one - other) for one, other in zip(many, few, strict=True)]
        what = f"{self.judged}, {name}: share of the bound less than with {self.steps[-1]}"
        return Check(what=what, measured=extremes(lost, fmean), high=self.goal_points, unit="points")

    def _cell(
        self, table: CostTable, steps: int, load: float, slack: float, seed: int
    ) -> tuple[float, dict[str, Trace]]:
        """The bound on requests on time, and what each policy does."""
        costs = TableCosts(table)
        asked = requests(costs, self.devices, self.requests, steps, load, slack, seed)
        bound = on_time_bound(asked, costs, num_devices=self.devices, devices_per_node=self.devices)
        config = SimConfig(num_devices=self.devices)
        traces = {
            policy: Simulation(ControllerConfig(policy=policy), table, config).run(asked) for policy in self.policies
        }
        return bound.value, traces

    def _method(self) -> tuple[str, ...]:
        return (
            f"Simulated on {self.devices} devices by the table {self.table}, with encode and decode added: "
            f"{_ENCODE_S} s, and 0.02 to 0.55 s by size on one device. At four steps of 256 px they take a quarter "
            "of the time.",
            f"{self.requests} requests per seed, equally many of each size; Poisson arrivals at a rate that gives the "
            "load; the same arrivals and sizes, stretched, for each number of steps.",
            "The bound is `tilework bound`. Intervals: extremes over loads and deadlines of means over the seeds.",
        )

    def _table(self, rows: Sequence[tuple[str, ...]]) -> Table:
        return Table(
            title="On time, % of the bound, simulated",
            columns=("steps, load, deadlines", "bound, of all", *self.policies),
            rows=tuple(rows),
        )


def staged(table: CostTable) -> CostTable:
    """A table of FLUX's steps, with encode and decode."""
    first = table.rows[0]
    times = {ENCODE: dict.fromkeys(_SIDES, _ENCODE_S), DECODE: _DECODE_S}
    more = tuple(
        CostRow(pipeline=first.pipeline, stage=stage, height=side, width=side, link=first.link, seconds=seconds)
        for stage, by_side in times.items()
        for side, seconds in by_side.items()
    )
    return replace(table, rows=(*table.rows, *more))


def cut_into(table: CostTable, steps: int, many: int) -> CostTable:
    """A table by which `many` steps take as long as `steps` do by the given one."""
    rows = (replace(row, seconds=row.seconds * steps / many) if row.stage == DIFFUSE else row for row in table.rows)
    return replace(table, rows=tuple(rows))


def requests(
    costs: TableCosts, devices: int, count: int, steps: int, load: float, slack: float, seed: int
) -> list[Request]:
    """Requests of FLUX's sizes in turn, shuffled. See `FewSteps`."""
    rng, pipeline = Random(seed), costs.table.rows[0].pipeline
    shapes = [Shape(side, side) for side in _SIDES]
    mean_ns = fmean(least_device_ns(costs, pipeline, shape, steps) for shape in shapes)
    rate_per_s = load * devices * NS_PER_S / mean_ns
    drawn = [shapes[index % len(shapes)] for index in range(count)]
    rng.shuffle(drawn)
    arrival_s, found = 0.0, []
    for index, shape in enumerate(drawn):
        arrival_s += rng.expovariate(1.0) / rate_per_s
        slo_ns = round(slack * optimal_latency_ns(costs, pipeline, shape, steps))
        found.append(
            Request(
                uid=str(index),
                pipeline=pipeline,
                shape=shape,
                steps=steps,
                arrival_ns=ns_from_s(arrival_s),
                deadline_ns=ns_from_s(arrival_s) + slo_ns,
            )
        )
    return found


def on_time(trace: Trace) -> int:
    return sum(ending.on_time for ending in trace.endings)


def longest_chunk(trace: Trace) -> float:
    """The longest run of steps, over the length of a chunk or of one step of it, whichever is longer."""
    runs = [run for run in trace.runs if run.work.stage.name == DIFFUSE and run.steps]
    return max((run.end_ns - run.start_ns) / max(CHUNK_NS, run.step_ns) for run in runs)
