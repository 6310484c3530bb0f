"""TridentServe's dispatch program, solved by HiGHS: the yardstick of the greedy solver, and `tridentserve-ilp`.

This is the only import of the solver here, made when a program is solved: everything else works without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilework.policy.registry import UnknownPolicy
from tilework.policy.toolkit.knapsack import Option, solve_knapsack_quickly

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


def require_solver() -> Any:
    """The module highspy. Raises UnknownPolicy."""
    try:
        import highspy
    except ImportError as error:
        raise UnknownPolicy(
            "policy 'tridentserve-ilp' needs a solver; run: pip install \"tilework[solve]\"; or choose tridentserve"
        ) from error
    return highspy


def solve_by_ilp(groups: Sequence[Sequence[Option]], capacity: int) -> list[int | None]:
    return solve(groups, capacity).chosen


def solve(groups: Sequence[Sequence[Option]], capacity: int, max_nodes: int = MAX_NODES) -> Solution:
    """Choose one option, or none, per group: the most value within `capacity` devices, as in `solve_knapsack`.

    x[r, k] = 1 says that request r is dispatched with degree k: one row per request (C1), one for the devices (C2). One
    thread, a fixed seed, and a limit of nodes in place of time: the same program has the same solution. If the search
    is cut short and has not found what the greedy solver finds, the result is that.

    Raises UnknownPolicy if the solver is missing.
    """
    columns = [
        (group, index, option)
        for group, options in enumerate(groups)
        for index, option in enumerate(options)
        if option.width <= capacity
    ]
    found, bound = _highs(columns, capacity, max_nodes) if columns else ([], 0.0)
    chosen: list[int | None] = [None] * len(groups)
    for (group, index, _), share in zip(columns, found, strict=False):
        if share > 0.5:
            chosen[group] = index
    quick = solve_knapsack_quickly(groups, capacity)
    best = max((chosen, quick), key=lambda found: value_of(groups, found))
    value = value_of(groups, best)
    most = sum(max([option.value for option in options], default=0) for options in groups)
    return Solution(best, value, max(value, min(bound, most)))


def value_of(groups: Sequence[Sequence[Option]], chosen: Sequence[int | None]) -> int:
    return sum(options[index].value for options, index in zip(groups, chosen, strict=True) if index is not None)


def _highs(columns: Sequence[tuple[int, int, Option]], capacity: int, max_nodes: int) -> tuple[list[float], float]:
    """The point that was found, empty if there is none, and the bound."""
    highspy = require_solver()
    solver = highspy.Highs()
    options = {"output_flag": False, "threads": 1, "random_seed": 0, "mip_rel_gap": 0.0, "mip_max_nodes": max_nodes}
    for option, value in options.items():
        solver.setOptionValue(option, value)
    solver.passModel(_model(highspy, columns, capacity))
    solver.run()
    info, statuses = solver.getInfo(), highspy.HighsModelStatus
    status = solver.getModelStatus()
    assert status in (statuses.kOptimal, statuses.kSolutionLimit), (
        f"HiGHS ends with {solver.modelStatusToString(status)}"
    )
    return list(solver.getSolution().col_value), -float(info.mip_dual_bound)


def _model(highspy: Any, columns: Sequence[tuple[int, int, Option]], capacity: int) -> Any:
    """As a minimisation, row by row: the devices, then each group that has a column."""
    rows: dict[int, list[int]] = {}
    for column, (group, _, _) in enumerate(columns):
        rows.setdefault(group, []).append(column)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(columns), 1 + len(rows)
    model.col_cost_ = [-float(option.value) for _, _, option in columns]
    model.col_lower_, model.col_upper_ = [0.0] * len(columns), [1.0] * len(columns)
    model.row_lower_ = [-highspy.kHighsInf] * (1 + len(rows))
    model.row_upper_ = [float(capacity), *([1.0] * len(rows))]
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.num_col_, matrix.num_row_ = len(columns), 1 + len(rows)
    starts = [0, len(columns)]
    for members in rows.values():
        starts.append(starts[-1] + len(members))
    matrix.start_ = starts
    matrix.index_ = [*range(len(columns)), *(column for members in rows.values() for column in members)]
    matrix.value_ = [float(option.width) for _, _, option in columns] + [1.0] * len(columns)
    model.integrality_ = [highspy.HighsVarType.kInteger] * len(columns)
    return model
