"""TridentServe's dispatch program, solved by HiGHS: the yardstick of the greedy solver, and `tridentserve-ilp`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilework.policy.published.tridentserve.layout import Pool
from tilework.policy.published.tridentserve.program import Capacities, PoolOption, solve_quickly
from tilework.policy.toolkit.knapsack import Option
from tilework_lab.optimum.solver import silent_solver

MAX_NODES = 1000


@dataclass(frozen=True, slots=True)
class Solution:
    """The index of each group's option, their value together, and a bound that no solution exceeds."""

    chosen: list[int | None]
    value: int
    bound: float

    @property
    def gap(self) -> float:
        """The share of the bound by which the value may fall short of the optimum; 0 if it is the optimum."""
        return max(0.0, self.bound - self.value) / self.bound if self.bound > 0 else 0.0


def solve_by_ilp(groups: Sequence[Sequence[PoolOption]], capacities: Capacities) -> list[int | None]:
    return solve(groups, capacities).chosen


def solve(groups: Sequence[Sequence[PoolOption]], capacities: Capacities, max_nodes: int = MAX_NODES) -> Solution:
    """Choose one option, or none, per group: the most value within the devices of each pool.

    x[r, i, k] = 1 says that request r is dispatched on pool i with degree k: one row per request (C1), one per pool
    (C2). One thread, a fixed seed, and a limit of nodes in place of time: the same program has the same solution. If
    the search is cut short and has not found what the quick solver finds, the result is that.
    """
    columns = [
        (group, index, option)
        for group, options in enumerate(groups)
        for index, option in enumerate(options)
        if option.width <= capacities.get(option.pool, 0)
    ]
    found, bound = _highs(columns, capacities, max_nodes) if columns else ([], 0.0)
    chosen: list[int | None] = [None] * len(groups)
    for (group, index, _), share in zip(columns, found, strict=False):
        if share > 0.5:
            chosen[group] = index
    quick = solve_quickly(groups, capacities)
    best = max((chosen, quick), key=lambda found: value_of(groups, found))
    value = value_of(groups, best)
    most = sum(max([option.value for option in options], default=0) for options in groups)
    return Solution(best, value, max(value, min(bound, most)))


def value_of(groups: Sequence[Sequence[Option]], chosen: Sequence[int | None]) -> int:
    return sum(options[index].value for options, index in zip(groups, chosen, strict=True) if index is not None)


_Column = tuple[int, int, PoolOption]


def _highs(columns: Sequence[_Column], capacities: Capacities, max_nodes: int) -> tuple[list[float], float]:
    """Return the point that was found, empty if there is none, and the bound."""
    import highspy

    solver = silent_solver({"mip_rel_gap": 0.0, "mip_max_nodes": max_nodes})
    solver.passModel(_model(highspy, columns, capacities))
    solver.run()
    info = solver.getInfo()
    statuses = highspy.HighsModelStatus
    status = solver.getModelStatus()
    assert status in (statuses.kOptimal, statuses.kSolutionLimit), (
        f"HiGHS ends with {solver.modelStatusToString(status)}"
    )
    return list(solver.getSolution().col_value), -float(info.mip_dual_bound)


def _model(highspy: Any, columns: Sequence[_Column], capacities: Capacities) -> Any:
    """Return the program as a minimisation, row by row: the devices of each pool, then each group that has a column."""
    groups: dict[int, list[int]] = {}
    pools: dict[Pool, list[int]] = {}
    for column, (group, _, option) in enumerate(columns):
        groups.setdefault(group, []).append(column)
        pools.setdefault(option.pool, []).append(column)
    rows = [*pools.values(), *groups.values()]
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(columns), len(rows)
    model.col_cost_ = [-float(option.value) for _, _, option in columns]
    model.col_lower_, model.col_upper_ = [0.0] * len(columns), [1.0] * len(columns)
    model.row_lower_ = [-highspy.kHighsInf] * len(rows)
    model.row_upper_ = [*(float(capacities[pool]) for pool in pools), *([1.0] * len(groups))]
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.num_col_, matrix.num_row_ = len(columns), len(rows)
    starts = [0]
    for members in rows:
        starts.append(starts[-1] + len(members))
    matrix.start_ = starts
    matrix.index_ = [column for members in rows for column in members]
    widths = [float(columns[column][2].width) for members in pools.values() for column in members]
    matrix.value_ = [*widths, *([1.0] * sum(map(len, groups.values())))]
    model.integrality_ = [highspy.HighsVarType.kInteger] * len(columns)
    return model
