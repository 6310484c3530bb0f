"""Checks the ring's protocol: SPIN on both models, the explorer on the steps themselves. `make ring-check` runs it.

SPIN is installed by apt where it is missing and this user may do that. Where it cannot be, the models are not run. The
last lines say so; the exit status is then that of the explorer.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import debian
from comm.ring.cases import LONG, QUICK
from comm.ring.explorer import Explorer, Violation
from comm.ring.mutants import MISTAKES
from comm.ring.programs import setting

MODELS = Path(__file__).parent / "models"
SPIN_S = 300


@dataclass(frozen=True, slots=True)
class Run:
    """A model with definitions, and whether SPIN must find a violation."""

    model: str
    definitions: str
    is_violated: bool


_SAME_BYTES = "FIRST=2 LATER=2 CELLS=2"
RUNS = (
    *(Run("published", f"{claim} TIMEOUTS=0", False) for claim in ("VISITED", "ONE_LOST", "WHOLE LATER=3", "UNLOCKED")),
    *(Run("published", claim, True) for claim in ("VISITED", "ONE_LOST", "WHOLE LATER=3", "UNLOCKED")),
    Run("corrected", "FIRST=2 LATER=1 CELLS=2", False),
    Run("corrected", "MESSAGES=1 FIRST=2 LATER=2 CELLS=3 ABANDONS=2", False),
    Run("corrected", f"MESSAGES=1 {_SAME_BYTES} END_ANYWHERE", False),
    Run("corrected", f"MESSAGES=1 {_SAME_BYTES} NO_FENCE MAY_LOSE", False),
    Run("corrected", f"{_SAME_BYTES} PLAIN_COMMIT", True),
    Run("corrected", f"{_SAME_BYTES} NO_GENERATION", True),
    Run("corrected", f"{_SAME_BYTES} NO_FENCE", True),
    Run("corrected", f"{_SAME_BYTES} NO_FENCE MAY_LOSE HEADER_ONLY", True),
)


def main() -> int:
    missing = _missing()
    failures = 0
    if not missing:
        for run in RUNS:
            failures += not _say(f"SPIN, {run.model}: {run.definitions}", run.is_violated, *_spin(run))
    for name, where in {**QUICK, **LONG}.items():
        failures += not _say(f"explorer: {name}", False, *_explore(Explorer(setting(**where))))
    for mistake in MISTAKES:
        explorer = Explorer(setting(protocol=mistake.protocol(), **mistake.where))
        failures += not _say(f"explorer: {mistake.name}", True, *_explore(explorer))
    if missing:
        print(f"NOT RUN: the models, because {missing}. Install the Debian package spin and a C compiler.")
    print(f"{failures} checks failed" if failures else "all checks that ran passed")
    return 1 if failures else 0


def _say(what: str, should_be_violated: bool, is_violated: bool, detail: str) -> bool:
    is_right = is_violated == should_be_violated
    found = "is violated" if is_violated else "holds"
    print(f"{'ok  ' if is_right else 'FAIL'} {what} {found} ({detail})", flush=True)
    return is_right


def _explore(explorer: Explorer) -> tuple[bool, str]:
    start_s = time.monotonic()
    try:
        explorer.run()
    except Violation as violation:
        return True, str(violation).partition("\n")[0][:80]
    return False, f"{len(explorer.states):,} states, {time.monotonic() - start_s:.1f} s"


def _spin(run: Run) -> tuple[bool, str]:
    start_s = time.monotonic()
    definitions = [f"-D{one}" for one in run.definitions.split()]
    with tempfile.TemporaryDirectory() as folder:
        _call(["spin", "-a", *definitions, str(MODELS / f"{run.model}.pml")], folder)
        _call(["cc", "-O2", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=4000", "-w", "-o", "pan", "pan.c"], folder)
        output = _call(["./pan", "-m1000000"], folder)
    states = next(line for line in output.splitlines() if "states, stored" in line).split()[0]
    assert "max search depth too small" not in output
    assert "out of memory" not in output, "the model has become too large"
    return "errors: 0" not in output, f"{float(states):,.0f} states, {time.monotonic() - start_s:.1f} s"


def _call(command: list[str], folder: str) -> str:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SPIN_S, check=False)
    return result.stdout + result.stderr


def _missing() -> str:
    """What keeps the models from being run, after trying to install SPIN; empty if nothing does."""
    if shutil.which("cc") is None:
        return "there is no C compiler"
    return "" if debian.has("spin", "spin") else "SPIN is missing and apt-get cannot install it here"


if __name__ == "__main__":
    sys.exit(main())
