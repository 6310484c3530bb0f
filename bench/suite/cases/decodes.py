"""Requests of few steps that share their decode, too: what that gains. Costs measured, traffic simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

import torch

from suite.case import Check, Finding, Note, Table
from suite.stages import DECODE
from suite.stats import extremes
from tilework.control.controller import ControllerConfig
from tilework.core.cost_row import CostRow
from tilework.core.model import ModelSource
from tilework.core.request import Request, Shape
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.pipelines.loading import load
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace
from tilework.worker.calibrate import calibrate


@dataclass(frozen=True, slots=True, kw_only=True)
class Decodes:
    """`requests` of one size and `steps` steps on one device that is simulated by what `shapes` takes on this machine.

    `loads` are their times one by one, over the time in which they come. `slack` is a deadline over the time alone. The
    same requests meet a table with the times of shared decodes, and one without.
    """

    side: int = 64
    steps: int = 4
    batches: tuple[int, ...] = (1, 2, 4, 8)
    runs: int = 30
    loads: tuple[float, ...] = (0.8, 1.2, 1.6)
    slack: float = 2.5
    requests: int = 400
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)

    @classmethod
    def make(cls, quick: bool) -> Decodes:
        return cls(runs=3, loads=(1.1,), requests=60, seeds=(1, 2)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        table, rows = self._costs(note), list[tuple[str, ...]]()
        apart = replace(table, rows=tuple(row for row in table.rows if row.stage != DECODE or row.batch == 1))
        gained, ratios = list[float](), list[float]()
        for share in self.loads:
            note(f"load {share:.0%}")
            pairs = [[self._run(one, share, seed) for one in (apart, table)] for seed in self.seeds]
            gained.append(fmean(100 * (on_time(shared) - on_time(alone)) for alone, shared in pairs))
            ratios.append(fmean(mean_s(shared) / mean_s(alone) for alone, shared in pairs))
            both = list(zip(*pairs, strict=True))
            kept = [f"{100 * fmean(map(on_time, traces)):.1f}" for traces in both]
            means = [f"{1000 * fmean(map(mean_s, traces)):.0f}" for traces in both]
            shares = f"{100 * fmean(map(shared_decodes, both[1])):.0f}"
            rows.append((f"{share:.0%}", *kept, *means, shares))
        return Finding(
            checks=(
                Check(what="more on time with shared decodes", measured=extremes(gained, fmean), low=0, unit="points"),
                Check(what="mean latency with shared decodes, over without", measured=extremes(ratios, fmean), high=1),
            ),
            method=(
                f"`shapes`, {self.side} px, {self.steps} steps, one thread; each batch timed {self.runs} times.",
                f"Simulated: {self.requests} requests per seed, Poisson; half of them with a deadline of "
                f"{self.slack:g} times their time alone. Intervals: extremes over loads of means over seeds.",
            ),
            tables=(self._times(table), self._table(rows)),
        )

    def _costs(self, note: Note) -> CostTable:
        torch.set_num_threads(1)
        family, rows = load(ModelSource(path="shapes")), list[CostRow]()
        for size in self.batches:
            note(f"times of {size}")
            rows += calibrate(family, ((Shape(self.side, self.side),) * size,), num_runs=self.runs)
        return CostTable(hardware="this machine", rows=tuple(rows))

    def _run(self, table: CostTable, load: float, seed: int) -> Trace:
        config = SimConfig(num_devices=1)
        return Simulation(ControllerConfig(policy="tilework"), table, config).run(self._requests(table, load, seed))

    def _requests(self, table: CostTable, load: float, seed: int) -> list[Request]:
        rng, pipeline, shape = Random(seed), table.rows[0].pipeline, Shape(self.side, self.side)
        costs = TableCosts(table)
        stages = costs.graph(pipeline).stages
        alone_ns = sum(costs.run_ns(one, (shape,), 1, self.steps if one.has_steps else 1) for one in stages)
        arrival_s, made = 0.0, []
        for index in range(self.requests):
            arrival_s += rng.expovariate(load * NS_PER_S / alone_ns)
            arrival_ns = ns_from_s(arrival_s)
            made.append(
                Request(
                    uid=str(index),
                    pipeline=pipeline,
                    shape=shape,
                    steps=self.steps,
                    arrival_ns=arrival_ns,
                    deadline_ns=arrival_ns + round(self.slack * alone_ns) if index % 2 else None,
                )
            )
        return made

    def _times(self, table: CostTable) -> Table:
        times = {(row.stage, row.batch): row.seconds for row in table.rows}
        stages = sorted({stage for stage, size in times if size != 1})
        rows = [
            (
                f"{stage} of {size}",
                f"{1000 * times[stage, size]:.1f}",
                f"{times[stage, size] / size / times[stage, 1]:.2f}",
            )
            for stage in stages
            for size in self.batches
        ]
        return Table(title="Times", columns=("stage", "ms", "of the time one by one"), rows=tuple(rows))

    def _table(self, rows: Sequence[tuple[str, ...]]) -> Table:
        columns = ("load", "on time, apart, %", "shared, %", "mean, apart, ms", "shared, ms", "decodes shared, %")
        return Table(title="Simulated", columns=columns, rows=tuple(rows))


def on_time(trace: Trace) -> float:
    """The share of the requests with a deadline that keep it."""
    return fmean(ending.on_time for ending in trace.endings if ending.request.deadline_ns is not None)


def mean_s(trace: Trace) -> float:
    return fmean(ending.latency_ns / NS_PER_S for ending in trace.endings)


def shared_decodes(trace: Trace) -> float:
    """The share of the requests that are decoded with others."""
    sizes = [len(run.work.job_ids) for run in trace.runs if run.work.stage.name == DECODE]
    return sum(size for size in sizes if size > 1) / max(1, sum(sizes))
