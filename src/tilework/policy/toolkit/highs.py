"""The solver HiGHS, which prints nothing. It is imported when a program is solved: all else works without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilework.distribution import install_command


class SolverMissing(RuntimeError):
    """highspy is not installed; the message says how to install it."""


def require_solver() -> Any:
    """The module highspy. Raises SolverMissing."""
    try:
        import highspy
    except ImportError as error:
        raise SolverMissing(f"highspy is not installed; run: {install_command('solve')}") from error
    return highspy


def silent_solver(options: Mapping[str, float]) -> Any:
    """A solver with these options, on one thread and without a limit of time: the same program, the same solution.

    Raises SolverMissing.
    """
    highspy = require_solver()

    class Silent(highspy.Highs):  # type: ignore[misc, name-defined, unused-ignore]
        """Highs prints what it is as soon as it is made: when its callbacks are enabled, before any option is set."""

        def enableCallbacks(self) -> None:  # noqa: N802
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    solver = Silent()
    for option, value in ({"output_flag": False, "threads": 1, "random_seed": 0} | dict(options)).items():
        solver.setOptionValue(option, value)
    return solver
