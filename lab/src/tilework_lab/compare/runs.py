"""One run of a policy on a cell: its configuration, and its result."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import tilework
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import table_json
from tilework.formats.workload import WorkloadRequest
from tilework.policy.registry import make_policy
from tilework.sim.config import SimConfig
from tilework.sim.garbage import without_collections
from tilework.sim.simulation import Simulation
from tilework.sim.workloads.cells import Cell
from tilework.sim.workloads.requests import asking, check_requests, to_requests
from tilework_lab.compare.digests import digest, digest_of_requests
from tilework_lab.compare.figures import figures_of, promise_figures_of
from tilework_lab.compare.records import BoundFigures, Record
from tilework_lab.compare.stopwatch import Stopwatch, timing_of
from tilework_lab.optimum.bound import on_time_bound

_DECIDING = ("core", "cost", "admission", "policy", "control", "sim")
_JUDGING = "compare"  # The part of sim that decides nothing, but for the file that reads figures from a trace.
_LONGEST_NS = 30 * 24 * 3600 * NS_PER_S  # After the last arrival: a run that takes longer makes no progress.


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What all runs have in common (see `SimConfig`)."""

    jitter: float = 0.0
    switch_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One policy on one cell with one seed; without a policy, the bound there.

    `promises`: the share of requests with a deadline that ask for a promise, all others being best effort; None: each
    asks for what the workload says.
    """

    cell: Cell
    seed: int
    policy: str | None
    promises: float | None = None

    def __str__(self) -> str:
        asking = "" if self.promises is None else f", {self.promises:g} ask for promises"
        return f"{self.cell.name}, {self.policy or 'bound'}, seed {self.seed}{asking}"


def config_of(task: Task, conditions: Conditions) -> dict[str, Any]:
    """All that decides a result, as plain JSON. Equal configurations have equal results.

    Requests and cost table are in it as digests: a file that has changed is another workload.
    """
    cell = task.cell
    requests_digest, table_digest, true_digest, devices_per_node = _digests(cell, _seed_of(task))
    config = {
        "version": tilework.__version__,
        "workload": cell.source,
        "parameters": cell.parameters,
        "requests": requests_digest,
        "cost": table_digest,
        "devices": cell.num_devices,
        "devices_per_node": devices_per_node,
        "seed": task.seed,
        **({} if cell.true_table is None else {"true_cost": true_digest}),
    }
    if task.policy is None:
        return config | {"bound": True}
    config |= {"policy": task.policy, "jitter": conditions.jitter, "switch_ms": conditions.switch_ns / NS_PER_MS}
    return config if task.promises is None else config | {"promises": task.promises}


def run(task: Task, conditions: Conditions, num_processes: int = 1) -> Record:
    """Run one task. Raises what a policy or the simulation raises; for the bound also UnknownCost."""
    config = config_of(task, conditions)
    asked, table = given(task.cell, _seed_of(task))
    requests, true, started_s = to_requests(asked), true_costs(task.cell), time.monotonic()
    if task.promises is not None:
        requests = asking(requests, task.promises, _seed_of(task))
    if task.policy is None:
        bound = on_time_bound(
            requests, TableCosts(true), num_devices=task.cell.num_devices, devices_per_node=true.devices_per_node
        )
        num_due = sum(one.deadline_ns is not None for one in requests)
        wall_s = round(time.monotonic() - started_s, 3)
        figures = BoundFigures(num_due=num_due, most_on_time=bound.value, wall_s=wall_s)
        return Record(config=config, result=figures, cell=task.cell.name, code=code_digest())
    sim = SimConfig(
        num_devices=task.cell.num_devices, seed=task.seed, jitter=conditions.jitter, switch_ns=conditions.switch_ns
    )
    stopwatch = Stopwatch(make_policy(task.policy))
    simulation = Simulation(
        ControllerConfig(policy=task.policy),
        table,
        sim,
        true,
        make_controller=partial(Controller, policy=stopwatch.policy),
    )
    last_ns = max(one.arrival_ns for one in requests)
    with without_collections():
        trace = simulation.run(requests, limit_ns=last_ns + _LONGEST_NS)
    return Record(
        config=config,
        result=figures_of(trace) if task.promises is None else promise_figures_of(trace),
        timing=timing_of(stopwatch.calls_ns, time.monotonic() - started_s, num_processes),
        cell=task.cell.name,
        code=code_digest(),
    )


@cache
def code_digest() -> str:
    """A digest of the program, as far as it decides a result."""
    root, found = Path(tilework.__file__).parent, hashlib.sha256()
    for package in _DECIDING:
        for path in sorted((root / package).rglob("*.py")):
            if path.parent.name == _JUDGING and path.name != "figures.py":
                continue
            found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


@cache
def given(cell: Cell, seed: int) -> tuple[tuple[WorkloadRequest, ...], CostTable]:
    """The requests of a cell and its cost table, made once. Raises what making them raises, and BadRequests."""
    table = _table(cell)
    requests = cell.requests(seed)
    check_requests(requests, table, source=cell.source, costs=cell.table)
    return requests, table


@cache
def true_costs(cell: Cell) -> CostTable:
    """The times that the devices of a cell take, read once. Raises BadCostTable."""
    return cell.true_costs()


@cache
def _table(cell: Cell) -> CostTable:
    return cell.costs()


@cache
def _digests(cell: Cell, seed: int) -> tuple[str, str, str, int]:
    requests, table = given(cell, seed)
    planned, true = (digest(table_json(one)) for one in (table, true_costs(cell)))
    return digest_of_requests(requests), planned, true, table.devices_per_node


def _seed_of(task: Task) -> int:
    """The seed of the requests."""
    return task.seed if task.cell.is_drawn else 0
