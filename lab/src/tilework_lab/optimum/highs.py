"""The solver HiGHS, which prints nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def silent_solver(options: Mapping[str, float]) -> Any:
    """A solver with these options, on one thread and without a limit of time: the same program, the same solution."""
    import highspy  # Not above: each start of `tilework` imports the commands, and few of them solve.

    class Silent(highspy.Highs):  # type: ignore[misc, name-defined, unused-ignore]
        """Highs prints what it is as soon as it is made: when its callbacks are enabled, before any option is set."""

        def enableCallbacks(self) -> None:  # noqa: N802
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()  # type: ignore[no-untyped-call, unused-ignore]

    solver = Silent()  # type: ignore[no-untyped-call, unused-ignore]
    for option, value in ({"output_flag": False, "threads": 1, "random_seed": 0} | dict(options)).items():
        solver.setOptionValue(option, value)
    return solver
