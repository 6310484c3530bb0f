"""Runs of policies on cells: configuration, decision times, result; and many runs on all cores."""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import tilework
import tilework_lab
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.policy import ClusterView, CostModel, Policy
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.core.work import Plan
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import table_json
from tilework.formats.workload import WorkloadRequest
from tilework.policy.registry import make_policy
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation, without_collections
from tilework.sim.workloads.cells import Cell
from tilework.sim.workloads.requests import asking, check_requests, to_requests
from tilework_lab.compare.figures import figures_of, nearest_rank, promise_figures_of
from tilework_lab.compare.records import BoundFigures, Record, Timing, digest, digest_of_requests
from tilework_lab.optimum.bound import on_time_bound

_DECIDING = (
    *(Path(tilework.__file__).parent / room for room in ("core", "cost", "admission", "policy", "control", "sim")),
    *(Path(tilework_lab.__file__).parent / part for part in ("policies", "workloads", "compare/figures.py")),
)
"""Folders and files of the program that decide a result."""
_LONGEST_NS = 30 * 24 * 3600 * NS_PER_S  # After the last arrival: a run that takes longer makes no progress.


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions that all runs have in common (see `SimConfig`)."""

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
    """Return all that decides a result, as plain JSON. Equal configurations have equal results.

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
    requests = to_requests(asked)
    true = true_costs(task.cell)
    started_s = time.monotonic()
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
    """Return a digest of the program, as far as it decides a result."""
    found = hashlib.sha256()
    for part in _DECIDING:
        for path in sorted(part.rglob("*.py")) if part.is_dir() else (part,):
            found.update(path.relative_to(part.parent).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


@cache
def given(cell: Cell, seed: int) -> tuple[tuple[WorkloadRequest, ...], CostTable]:
    """Return the requests of a cell and its cost table, made once. Raises what making them raises, and BadRequests."""
    table = _table(cell)
    requests = cell.requests(seed)
    check_requests(requests, table, source=cell.source, costs=cell.table)
    return requests, table


@cache
def true_costs(cell: Cell) -> CostTable:
    """Return the times that the devices of a cell take, read once. Raises BadCostTable."""
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
    """Return the seed of the requests."""
    return task.seed if task.cell.is_drawn else 0


class Stopwatch:
    """Measures the plans of `policy`, which is the same object, so what else it can do is still found."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.calls_ns = calls_ns = array("q")

        class Timed(type(policy)):  # type: ignore[misc]
            __slots__ = ()

            def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
                started_ns = time.perf_counter_ns()
                plan = super().plan(view, costs, now_ns)
                calls_ns.append(time.perf_counter_ns() - started_ns)
                return cast(Plan, plan)

        object.__setattr__(policy, "__class__", Timed)  # Some are frozen.


def timing_of(calls_ns: Sequence[int], wall_s: float, num_processes: int) -> Timing:
    ordered = [call_ns / NS_PER_MS for call_ns in sorted(calls_ns)] or [0.0]
    return Timing(
        num_plans=len(calls_ns),
        plan_p50_ms=round(nearest_rank(ordered, 50), 6),
        plan_p99_ms=round(nearest_rank(ordered, 99), 6),
        wall_s=round(wall_s, 3),
        num_processes=num_processes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A run that raised: a policy that breaks the rules, or does not end. It has no result."""

    task: Task
    error: str


def run_all(
    tasks: Iterable[Task],
    conditions: Conditions,
    num_processes: int,
    begin: Callable[[Task], None] = lambda task: None,
) -> Generator[tuple[Task, Record | Failed], None, None]:
    """Run the tasks and yield their results as they come; `begin` is called as each task begins, in the order given.

    Closing the generator ends the runs that are running.
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
    """Leave Ctrl-C to the parent process, which ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _tried(task: Task, conditions: Conditions, num_processes: int) -> Record | Failed:
    try:
        return run(task, conditions, num_processes)
    except Exception as error:
        return Failed(task=task, error=f"{type(error).__name__}: {error}")
