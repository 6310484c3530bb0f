"""Simulated runs for figures, each run once and kept in a file; and the parts of a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from suite.case import CaseFailed, Check, Note, Table
from suite.stats import Interval, extremes

from tilework.control.controller import ControllerConfig
from tilework.report.panels import Curve, CurvePanel
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Observe, Simulation, without_collections
from tilework.sim.trace import Trace
from tilework.sim.workloads.cells import Cell, CellDevices, cell_of
from tilework.sim.workloads.requests import to_requests
from tilework_lab.compare.figures import Figures
from tilework_lab.compare.records import Records, key_of
from tilework_lab.compare.runs import Conditions, Failed, Task, config_of, given, run_all

Point = TypeVar("Point")
Runs = Mapping[tuple[str, str], Sequence[Figures]]
"""Records by name of the cell and policy, seed by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemadeFigure:
    """A figure: `checks` are what the paper says of it, as far as runs can agree or disagree with it."""

    tables: tuple[Table, ...]
    checks: tuple[Check, ...]
    png: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRuns:
    """Runs by `num_seeds` seeds from 0 on, in `num_processes`, kept in the file of `records`.

    `num_requests` None leaves each workload's own number. `brief` leaves out most points of every sweep.
    """

    records: Records
    num_seeds: int
    num_processes: int
    note: Note
    num_requests: int | None = None
    brief: bool = False

    def cell(self, text: str, num_devices: int | None = None) -> Cell:
        """Return the cell of `NAME,key=value...`, as for `tilework compare --workload`."""
        count = "" if self.num_requests is None else f",num={self.num_requests}"
        return cell_of(text + count, CellDevices(num_devices=num_devices))

    def points(self, sweep: Sequence[Point]) -> Sequence[Point]:
        """Return the first and the last of a sweep if it is to be brief, else all."""
        return list(dict.fromkeys((sweep[0], sweep[-1]))) if self.brief else sweep

    def runs(self, cells: Iterable[Cell], policies: Sequence[str], conditions: Conditions | None = None) -> Runs:
        """Run the cells. Raises CaseFailed if a policy breaks."""
        conditions = conditions or Conditions()
        tasks = [
            Task(cell=cell, seed=seed, policy=policy)
            for cell in cells
            for seed in range(self.num_seeds)
            for policy in policies
        ]
        keys = {task: key_of(config_of(task, conditions)) for task in tasks}
        missing = [task for task in tasks if self.records.get(keys[task]) is None]
        self.note(f"{len(tasks) - len(missing)} of {len(tasks)} runs are there")
        for task, result in run_all(missing, conditions, self.num_processes):
            if isinstance(result, Failed):
                raise CaseFailed(f"{task}: {result.error}")
            self.records.add(result)
        found: dict[tuple[str, str], list[Figures]] = {}
        for task in tasks:
            record = self.records.get(keys[task])
            assert record is not None
            assert isinstance(record.result, Figures)
            found.setdefault((task.cell.name, task.policy or ""), []).append(record.result)
        return found


def traced(cell: Cell, policy: str, seed: int, observe: Observe | None = None) -> Trace:
    """Run once, and return all that happened, which is not kept. Calls `observe` after each event."""
    asked, table = given(cell, seed)
    simulation = Simulation(ControllerConfig(policy=policy), table, SimConfig(num_devices=cell.num_devices, seed=seed))
    with without_collections():
        return simulation.run(to_requests(asked), observe=observe)


def mean_of(runs: Sequence[Figures], read: Callable[[Figures], float | None]) -> float:
    """Return the mean over the seeds of a value that every run has."""
    return fmean(value for one in runs if (value := read(one)) is not None)


def attainment(runs: Sequence[Figures]) -> float:
    return mean_of(runs, lambda one: one.attainment)


def size_attainment(runs: Sequence[Figures], size: str) -> float:
    """Return the attainment of the requests of one size, over all seeds together."""
    found = [one.by_size[size] for one in runs if size in one.by_size]
    return sum(one.num_on_time for one in found) / max(1, sum(one.num_due for one in found))


def range_of(values: Sequence[float]) -> Interval:
    """Return the mean, and the extremes of the points of a sweep."""
    return extremes(values, fmean)


def least(values: Sequence[float]) -> Interval:
    return extremes(values, min)


def most(values: Sequence[float]) -> Interval:
    return extremes(values, max)


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def share_table(title: str, xs: Sequence[float], shares: Mapping[str, Sequence[float]]) -> Table:
    """Return a row for each name, a column for each x."""
    rows = tuple((name, *map(percent, found)) for name, found in shares.items())
    return Table(title=title, columns=("policy", *(f"{x:g}" for x in xs)), rows=rows)


def share_curves(title: str, x_label: str, xs: Sequence[float], shares: Mapping[str, Sequence[float]]) -> CurvePanel:
    """Return the same as a chart."""
    curves = {name: Curve(xs=tuple(map(float, xs)), ys=tuple(found)) for name, found in shares.items()}
    return CurvePanel(title=title, x_label=x_label, y_label="on time", curves=curves)
