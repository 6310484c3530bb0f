"""Whether promised deadlines are kept, and how good the predicted finishes are, at loads up to three times capacity."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from suite.case import Check, Finding, Note, Table
from suite.stages import DIFFUSE
from suite.stats import Interval, bootstrap, exact, median
from tilework.control.controller import ControllerConfig
from tilework.core.request import OnMiss, Request, Shape
from tilework.core.time import ns_from_s
from tilework.cost.demand import demand_at
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import TraceEnding

_BANDS = ((0.5, 1.0), (1.0, 2.0), (2.0, 3.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservations:
    """Per seed and policy one simulation of `requests` requests at a load drawn between 0.5 and 3 times capacity.

    Every second seed has promises only; in the others half of the requests are promises, a quarter has deadlines
    without one, and a quarter has none. Deadlines are the table's by size, times `slo_scale`.
    """

    policies: tuple[str, ...] = ("edf", "fixed-sp4", "tetriserve")
    table: str = "flux1dev_h100_eager"
    devices: int = 8
    requests: int = 150
    seeds: int = 100
    slo_scale: float = 1.5
    jitter: float = 0.0

    @classmethod
    def make(cls, quick: bool) -> Reservations:
        return cls(requests=40, seeds=6) if quick else cls()

    def measure(self, note: Note) -> Finding:
        checks: list[Check] = []
        rows: list[tuple[str, ...]] = []
        for policy in self.policies:
            with ProcessPoolExecutor(2) as pool:
                runs = list(pool.map(partial(_run, self, policy), range(self.seeds)))
            note(f"{policy}: {sum(run.num_broken for run in runs)} promises broken")
            checks += _checks(policy, runs)
            for only in (True, False):
                for low, high in _BANDS:
                    band = [run for run in runs if run.only_promises is only and low <= run.load < high]
                    if band:
                        rows.append(_row(policy, only, low, high, band))
        return Finding(
            checks=tuple(checks),
            method=self._method(),
            tables=(
                Table(
                    title="By policy, mix and load (times capacity)",
                    columns=(
                        "policy",
                        "mix",
                        "load",
                        "runs",
                        "promises given",
                        "refused",
                        "broken",
                        "ETA error, promised",
                        "ETA error, others",
                    ),
                    rows=tuple(rows),
                ),
            ),
        )

    def _method(self) -> tuple[str, ...]:
        return (
            f"Simulated: {self.devices} devices by the table {self.table}, no faults, works take as long as predicted "
            f"(jitter {self.jitter:g}); {self.seeds} seeds, {self.requests} Poisson arrivals each, sizes drawn evenly, "
            f"deadlines {self.slo_scale:g} times the table's. Capacity is the rate at which all devices are busy with "
            "requests at degree 1.",
            "A promise is an accepted request with `on_miss: reject`; it is broken if it ends after its deadline.",
            "ETA error: |finish - ETA at admission| / latency. The goals are for the median over all requests of the "
            "runs that have promises only; the table shows it for the mixed runs, too.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    load: float
    only_promises: bool
    num_given: int
    num_refused: int
    num_broken: int
    errors: tuple[float, ...]
    other_errors: tuple[float, ...]


def _run(case: Reservations, policy: str, seed: int) -> Run:
    rng, table = Random(seed), read_table(case.table)
    load, only_promises = rng.uniform(0.5, 3.0), seed % 2 == 0
    requests = _requests(case, table, load, only_promises, rng)
    config = SimConfig(num_devices=case.devices, seed=seed, jitter=case.jitter)
    endings = Simulation(ControllerConfig(policy=policy), table, config).run(requests).endings
    promises = [ending for ending in endings if ending.request.is_promise]
    given = [ending for ending in promises if ending.eta_ns is not None]
    return Run(
        load=load,
        only_promises=only_promises,
        num_given=len(given),
        num_refused=len(promises) - len(given),
        num_broken=sum(not ending.on_time for ending in given),
        errors=_errors(given),
        other_errors=_errors([ending for ending in endings if not ending.request.is_promise]),
    )


def _requests(case: Reservations, table: CostTable, load: float, only_promises: bool, rng: Random) -> list[Request]:
    pipeline = table.rows[0].pipeline
    shapes = sorted({Shape(row.height, row.width) for row in table.rows if row.stage == DIFFUSE})
    steps, costs, requests, arrival_s = table.steps or 20, TableCosts(table), [], 0.0
    model = [Request(uid="", pipeline=pipeline, shape=shape, steps=steps, arrival_ns=0) for shape in shapes]
    mean_s = sum(demand_at(one, costs.start(one), 1, costs).run_ns for one in model) / len(model) / 1e9
    for index in range(case.requests):
        arrival_s += rng.expovariate(load * case.devices / mean_s)
        request, kind = rng.choice(model), rng.random()
        due_s = arrival_s + case.slo_scale * table.slo_s[str(request.shape)]
        request = replace(request, uid=str(index), arrival_ns=ns_from_s(arrival_s))
        if only_promises or kind < 0.75:
            request = replace(request, deadline_ns=ns_from_s(due_s))
        if only_promises or kind < 0.5:
            request = replace(request, on_miss=OnMiss.REJECT)
        requests.append(request)
    return requests


def _errors(endings: Sequence[TraceEnding]) -> tuple[float, ...]:
    return tuple(abs(one.finish_ns - one.eta_ns) / one.latency_ns for one in endings if one.eta_ns is not None)


def _checks(policy: str, runs: Sequence[Run]) -> list[Check]:
    num_broken = sum(run.num_broken for run in runs)
    errors = [error for run in runs if run.only_promises for error in run.errors]
    return [
        Check(what=f"{policy}: promises broken", measured=exact(num_broken), high=0),
        Check(what=f"{policy}: median ETA error, promises only", measured=_percent(errors), high=5, unit="%"),
    ]


def _percent(errors: Sequence[float]) -> Interval:
    return bootstrap(errors, seed=1).scaled(100)


def _row(policy: str, only: bool, low: float, high: float, runs: Sequence[Run]) -> tuple[str, ...]:
    errors = [error for run in runs for error in run.errors]
    others = [error for run in runs for error in run.other_errors]
    return (
        policy,
        "promises" if only else "mixed",
        f"{low:g} to {high:g}",
        str(len(runs)),
        str(sum(run.num_given for run in runs)),
        str(sum(run.num_refused for run in runs)),
        str(sum(run.num_broken for run in runs)),
        f"{median(errors):.1%}" if errors else "",
        f"{median(others):.1%}" if others else "",
    )
