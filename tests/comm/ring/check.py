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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import debian
from comm.ring.cases import LONG, QUICK
from comm.ring.explorer import Explorer, Setting, Violation
from comm.ring.mutants import MISTAKES, Mistake
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


def _say(what: str, should_be_violated: bool, is_violated: bool, detail: str) -> bool:
    is_right = is_violated == should_be_violated
    found = "is violated" if is_violated else "holds"
    print(f"{'ok  ' if is_right else 'FAIL'} {what} {found} ({detail})", flush=True)
    return is_right


def _explore(make: Callable[[], Setting]) -> tuple[bool, str]:
    start_s = time.monotonic()
    explorer = Explorer(make())
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


def _mistaken(mistake: Mistake) -> Setting:
    return setting(protocol=mistake.protocol(), **mistake.where)


def _call(command: list[str], folder: str) -> str:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SPIN_S, check=False)
    return result.stdout + result.stderr


def _missing() -> str:
    """What keeps the models from being run, after trying to install SPIN; empty if nothing does."""
    if shutil.which("cc") is None:
        return "there is no C compiler"
    return "" if debian.has("spin", "spin") else "SPIN is missing and apt-get cannot install it here"


_SPIN = tuple((f"SPIN, {run.model}: {run.definitions}", run.is_violated, partial(_spin, run)) for run in RUNS)
_RIGHT = tuple(
    (f"explorer: {name}", False, partial(_explore, partial(setting, **where))) for name, where in (QUICK | LONG).items()
)
_WRONG = tuple((f"explorer: {one.name}", True, partial(_explore, partial(_mistaken, one))) for one in MISTAKES)
CHECKS: tuple[tuple[str, bool, Callable[[], tuple[bool, str]]], ...] = (*_SPIN, *_RIGHT, *_WRONG)
"""What is checked, whether a violation must be found, and how."""


def main() -> int:
    missing = _missing()
    checks = range(len(_SPIN) if missing else 0, len(CHECKS))
    failures = 0
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        for check, found in zip(checks, pool.map(_result, checks), strict=True):
            what, is_violated, _ = CHECKS[check]
            failures += not _say(what, is_violated, *found)
    if missing:
        print(f"NOT RUN: the models, because {missing}. Install the Debian package spin and a C compiler.")
    print(f"{failures} checks failed" if failures else "all checks that ran passed")
    return 1 if failures else 0


def _result(check: int) -> tuple[bool, str]:
    """By its number: what is checked cannot be sent to a process."""
    _, _, run = CHECKS[check]
    return run()


if __name__ == "__main__":
    sys.exit(main())
