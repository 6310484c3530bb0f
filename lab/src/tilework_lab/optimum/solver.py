"""HiGHS behind a small interface: linear programs, with whole numbers or without. It prints nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Unsolved(RuntimeError):
    """The solver gave up, which does not happen with the programs that are built here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Maximise gains @ x, where matrix @ x <= limits and 0 <= x <= upper.

    The matrix is given by its entries (`rows`, `columns`, `values`), none of which comes twice.
    """

    gains: Floats
    upper: Floats
    limits: Floats
    rows: Ints
    columns: Ints
    values: Floats

    def bound(self, prices: Floats) -> float:
        """Return a bound that is at least the optimum for any prices of the rows, as long as none is below 0 (weak
        duality).

        What a solver calls optimal is so up to its tolerances; this holds up to the rounding of a sum. At the optimal
        prices it is the optimum.
        """
        paid = np.bincount(self.columns, self.values * prices[self.rows], minlength=len(self.gains))
        return float(prices @ self.limits + np.maximum(self.gains - paid, 0.0) @ self.upper)


@dataclass(slots=True)
class Builder:
    """Collects the columns and rows of a program, block by block."""

    _gains: list[Any] = field(default_factory=list)
    _upper: list[Any] = field(default_factory=list)
    _limits: list[Any] = field(default_factory=list)
    _entries: list[tuple[Any, Any, Any]] = field(default_factory=list)
    num_columns: int = 0
    num_rows: int = 0

    def add_columns(self, upper: Any, gains: Any = 0.0) -> Ints:
        """Add one column for each entry of `upper`; `gains` is one number, or one for each. Return their indices."""
        indices = np.arange(self.num_columns, self.num_columns + len(upper))
        self.num_columns += len(upper)
        self._upper.append(upper)
        self._gains.append(np.broadcast_to(gains, len(upper)))
        return indices

    def add_rows(self, limits: Any) -> Ints:
        """Add one empty row for each limit; return their indices."""
        indices = np.arange(self.num_rows, self.num_rows + len(limits))
        self.num_rows += len(limits)
        self._limits.append(limits)
        return indices

    def add_row(self, limit: float = 0.0) -> int:
        return int(self.add_rows([limit])[0])

    def put(self, rows: Any, columns: Any, values: Any) -> None:
        """Set entries of the matrix; each argument is a number or an array, stretched to the same length."""
        size = max((len(one) for one in (rows, columns, values) if np.ndim(one)), default=1)
        rows, columns, values = (one if np.ndim(one) else np.full(size, one) for one in (rows, columns, values))
        self._entries.append((rows, columns, values))

    def program(self) -> Program:
        rows, columns, values = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        return Program(
            gains=np.concatenate(self._gains).astype(np.float64),
            upper=np.concatenate(self._upper).astype(np.float64),
            limits=np.concatenate(self._limits).astype(np.float64),
            rows=rows.astype(np.int64),
            columns=columns.astype(np.int64),
            values=values.astype(np.float64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best point found, and what no point is better than: the same, unless the search was cut short."""

    point: Floats
    bound: float


def solve_relaxed(program: Program) -> Solution:
    """Solve without whole numbers. The bound is that of the solver's prices, not what the solver says of itself.

    Raises:
        Unsolved: see there.
    """
    solver, _ = _run(program, {})
    found = solver.getSolution()
    prices = np.maximum(-np.array(found.row_dual), 0.0)
    return Solution(point=np.array(found.col_value), bound=program.bound(prices))


def solve_whole(program: Program, whole: Ints, *, max_nodes: int = 2**31 - 1) -> Solution:
    """Solve with these variables as whole numbers, by branch and bound with at most `max_nodes` nodes.

    Raises:
        Unsolved: see there.
    """
    solver, is_optimal = _run(program, {"mip_rel_gap": 0.0, "mip_max_nodes": max_nodes}, whole)
    point = np.array(solver.getSolution().col_value)
    assert is_optimal or max_nodes < 2**31 - 1
    return Solution(point=point, bound=-solver.getInfo().mip_dual_bound)


def _run(program: Program, options: Mapping[str, float], whole: Ints | None = None) -> tuple[Any, bool]:
    import highspy

    solver = silent_solver(options)
    solver.passModel(_model(program, whole))
    solver.run()
    status = solver.getModelStatus()
    statuses = highspy.HighsModelStatus
    if status not in (statuses.kOptimal, statuses.kSolutionLimit):
        raise Unsolved(f"HiGHS ends with {solver.modelStatusToString(status)}")
    return solver, status == statuses.kOptimal


def _model(program: Program, whole: Ints | None) -> Any:
    """Return the program as a minimisation, row by row."""
    import highspy

    order = np.lexsort((program.columns, program.rows))
    num_rows, num_columns = len(program.limits), len(program.gains)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = num_columns, num_rows
    model.col_cost_ = -program.gains
    model.col_lower_, model.col_upper_ = np.zeros(num_columns), program.upper
    model.row_lower_, model.row_upper_ = np.full(num_rows, -highspy.kHighsInf), program.limits
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.num_col_, model.a_matrix_.num_row_ = num_columns, num_rows
    model.a_matrix_.start_ = np.concatenate(([0], np.cumsum(np.bincount(program.rows, minlength=num_rows))))
    model.a_matrix_.index_ = program.columns[order]
    model.a_matrix_.value_ = program.values[order]
    if whole is not None:
        types = [highspy.HighsVarType.kContinuous] * num_columns
        for column in whole:
            types[column] = highspy.HighsVarType.kInteger
        model.integrality_ = types
    return model


def silent_solver(options: Mapping[str, float]) -> Any:
    """Return a solver with these options, on one thread and without a limit of time: the same program, the same
    solution.
    """
    import highspy  # Not above: each start of `tilework` imports the commands, and few of them solve.

    class Silent(highspy.Highs):  # type: ignore[misc, name-defined, unused-ignore]
        """Highs without the banner that it prints once made: when callbacks are enabled, before any option is set."""

        def enableCallbacks(self) -> None:  # noqa: N802
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()  # type: ignore[no-untyped-call, unused-ignore]

    solver = Silent()  # type: ignore[no-untyped-call, unused-ignore]
    for option, value in ({"output_flag": False, "threads": 1, "random_seed": 0} | dict(options)).items():
        solver.setOptionValue(option, value)
    return solver
