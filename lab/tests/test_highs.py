"""The solver prints nothing: what a command prints may be JSON."""

from __future__ import annotations

import subprocess
import sys


def test_a_solver_prints_nothing() -> None:
    """In a process of its own: it says what it is once in a process, past Python's standard output."""
    lines = "from tilework_lab.optimum.solver import silent_solver; silent_solver({}).run()"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
