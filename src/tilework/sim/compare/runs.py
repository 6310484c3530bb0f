"""Runs of policies on cells: what is to be run, one run, and many of them on all cores."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import signal
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import tilework
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.interfaces import ClusterView, CostModel, Demand, Policy
from tilework.core.progress import Cursor
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.core.work import Plan
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import table_json
from tilework.formats.workload import WorkloadRequest
from tilework.sim.compare.cells import Cell, check_requests, digest, digest_of_requests
from tilework.sim.compare.figures import figures_of, nearest_rank
from tilework.sim.compare.records import BoundFigures, Record, Timing
from tilework.sim.optimum.bound import on_time_bound
from tilework.sim.simulation import SimConfig, Simulation
from tilework.sim.workloads.requests import to_requests

_DECIDING = ("core", "cost", "policy", "control", "sim")
_JUDGING = "compare"  # The part of sim that decides nothing, but for the file that reads figures from a trace.
_LONGEST_NS = 30 * 24 * 3600 * NS_PER_S  # After the last arrival: whoever takes longer goes round in a circle.


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What all runs have in common (see `SimConfig`)."""

    jitter: float = 0.0
    switch_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One policy on one cell with one seed; without a policy, the bound there."""

    cell: Cell
    seed: int
    policy: str | None

    def __str__(self) -> str:
        return f"{self.cell.name}, {self.policy or 'bound'}, seed {self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A run that raised: a policy that breaks the rules, or does not end. It is told, and not kept."""

    task: Task
    error: str


def config_of(task: Task, conditions: Conditions) -> dict[str, Any]:
    """All that decides a result, as plain JSON. Equal configurations, equal results.

    Requests and cost table are there as digests: a file that has changed is another workload.
    """
    cell = task.cell
    requests_digest, table_digest, devices_per_node = _digests(cell, _seed_of(task))
    config = {
        "version": tilework.__version__,
        "workload": cell.source,
        "parameters": cell.parameters,
        "requests": requests_digest,
        "cost": table_digest,
        "devices": cell.num_devices,
        "devices_per_node": devices_per_node,
        "seed": task.seed,
    }
    if task.policy is None:
        return config | {"bound": True}
    return config | {"policy": task.policy, "jitter": conditions.jitter, "switch_ms": conditions.switch_ns / NS_PER_MS}


def run(task: Task, conditions: Conditions, num_processes: int = 1) -> Record:
    """Raises what a policy or the simulation raises; for the bound also SolverMissing and UnknownCost."""
    config = config_of(task, conditions)
    asked, table = given(task.cell, _seed_of(task))
    requests, started_s = to_requests(asked), time.monotonic()
    if task.policy is None:
        bound = on_time_bound(
            requests, TableCosts(table), num_devices=task.cell.num_devices, devices_per_node=table.devices_per_node
        )
        num_due = sum(one.deadline_ns is not None for one in requests)
        wall_s = round(time.monotonic() - started_s, 3)
        figures = BoundFigures(num_due=num_due, most_on_time=bound.value, wall_s=wall_s)
        return Record(config=config, result=figures, cell=task.cell.name, code=code_digest())
    sim = SimConfig(
        num_devices=task.cell.num_devices, seed=task.seed, jitter=conditions.jitter, switch_ns=conditions.switch_ns
    )
    simulation = Simulation(ControllerConfig(policy=task.policy), table, sim)
    timed = simulation.controller = _Timed(simulation.controller.config, table)
    last_ns = max(one.arrival_ns for one in requests)
    with _no_collections():
        trace = simulation.run(requests, limit_ns=last_ns + _LONGEST_NS)
    return Record(
        config=config,
        result=figures_of(trace),
        timing=_timing(timed.stopwatch.calls_ns, time.monotonic() - started_s, num_processes),
        cell=task.cell.name,
        code=code_digest(),
    )


def run_all(
    tasks: Iterable[Task],
    conditions: Conditions,
    num_processes: int,
    begin: Callable[[Task], None] = lambda task: None,
) -> Generator[tuple[Task, Record | Failed], None, None]:
    """Results as they come; `begin` is called with each task as it is begun, in the order given.

    Whoever stops asking ends what is running.
    """
    todo = iter(tasks)
    if num_processes == 1:
        for task in todo:
            begin(task)
            yield task, _tried(task, conditions, 1)
        return
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(num_processes, initializer=_ignore_interrupts) as pool:
        try:
            yield from _run_in(pool, todo, conditions, num_processes, begin)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                if child not in others:
                    child.terminate()
            raise


def _run_in(
    pool: ProcessPoolExecutor,
    todo: Iterator[Task],
    conditions: Conditions,
    num_processes: int,
    begin: Callable[[Task], None],
) -> Iterator[tuple[Task, Record | Failed]]:
    running: dict[Future[Record | Failed], Task] = {}

    def fill() -> None:
        for task in islice(todo, num_processes - len(running)):
            begin(task)
            running[pool.submit(_tried, task, conditions, num_processes)] = task

    fill()
    while running:
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        ended = [(running.pop(future), future.result()) for future in done]
        fill()
        yield from ended


def _ignore_interrupts() -> None:
    """Ctrl-C is for the process that asked for the runs; it ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _tried(task: Task, conditions: Conditions, num_processes: int) -> Record | Failed:
    try:
        return run(task, conditions, num_processes)
    except Exception as error:
        return Failed(task=task, error=f"{type(error).__name__}: {error}")


@contextmanager
def _no_collections() -> Iterator[None]:
    """Garbage is collected between runs only: it takes an eighth of a run, and falls upon some decision or other."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def code_digest() -> str:
    """Of the program, as far as it decides a result."""
    root, found = Path(tilework.__file__).parent, hashlib.sha256()
    for package in _DECIDING:
        for path in sorted((root / package).rglob("*.py")):
            if path.parent.name == _JUDGING and path.name != "figures.py":
                continue
            found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


@cache
def given(cell: Cell, seed: int) -> tuple[tuple[WorkloadRequest, ...], CostTable]:
    """The requests of a cell and what they cost; read and made once. Raises what these raise, and BadCell."""
    table = _table(cell)
    requests = cell.requests(seed)
    check_requests(cell, requests, table)
    return requests, table


@cache
def _table(cell: Cell) -> CostTable:
    return cell.costs()


@cache
def _digests(cell: Cell, seed: int) -> tuple[str, str, int]:
    requests, table = given(cell, seed)
    return digest_of_requests(requests), digest(table_json(table)), table.devices_per_node


def _seed_of(task: Task) -> int:
    """What decides the requests."""
    return task.seed if task.cell.is_drawn else 0


class _Timed(Controller):
    """A controller that takes the time of its policy."""

    def __init__(self, config: ControllerConfig, table: CostTable) -> None:
        super().__init__(config, table)
        self.stopwatch = self._policy = _Stopwatch(self._policy)


class _Stopwatch:
    """A policy, and how long each of its plans took."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.calls_ns = array("q")

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return self._policy.urgency_ns(request, dropped_to_best_effort, delay_ns)

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return self._policy.degrees(request, costs)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        return self._policy.demand(request, left, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        started_ns = time.perf_counter_ns()
        plan = self._policy.plan(view, costs, now_ns)
        self.calls_ns.append(time.perf_counter_ns() - started_ns)
        return plan


def _timing(calls_ns: Sequence[int], wall_s: float, num_processes: int) -> Timing:
    ordered = [call_ns / NS_PER_MS for call_ns in sorted(calls_ns)] or [0.0]
    return Timing(
        num_plans=len(calls_ns),
        plan_p50_ms=round(nearest_rank(ordered, 50), 6),
        plan_p99_ms=round(nearest_rank(ordered, 99), 6),
        wall_s=round(wall_s, 3),
        num_processes=num_processes,
    )
